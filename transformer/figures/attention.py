"""Attention step by step, and head by head."""

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from transformer.figures.data import attention as data
from transformer.figures.look import Look, box, dressed, stepped
from transformer.nn.model import Transformer

# What each panel shows: the field of `Steps`, its colours, and whether its columns are tokens.
PANELS = (
    ("query", "q", "blue", False), ("key", "k", "orange", False), ("value", "v", "green", False),
    ("scores", "scores", None, True), ("scaled", "scaled", None, True), ("masked", "masked", None, True),
    ("softmax", "weights", "blue", True), ("output", "output", "green", False),
)  # fmt: skip


def attention_steps(
    steps: data.Steps | None = None,
    tokens: list[str] | None = None,
    row: int = 0,
    causal: bool = True,
    language: str = "en",
    theme: str = "light",
) -> go.Figure:
    """q, k, v, scores, scaling, mask, softmax and output of one head; the slider picks the query.

    Args:
      steps: of a model's head (`data.attention.of_head`); by default those of a toy of six tokens and d_k = 4.
      tokens: what its tokens are called.
      row: the query shown first.
      causal: whether the toy's queries see only what is behind them.
    """
    look = Look(language, theme)
    if steps is None:
        steps, tokens = data.toy(causal), [look.token(number) for number in data.TOY_TOKENS]
    tokens = _names(tokens, len(steps.q))
    figures = {f"{i} {token}": _steps_of(steps, tokens, i, look) for i, token in enumerate(tokens)}
    return stepped(figures, look("query token"), look, range(len(tokens))[row])


def _steps_of(steps: data.Steps, tokens: list[str], row: int, look: Look) -> go.Figure:
    key = "scaled" if steps.softcap is None else "capped"
    fill = {"scaled": dict(scale=steps.scale, cap=steps.softcap), "weights": {}}
    hides = not np.isfinite(steps.masked).all()
    said = {"scaled": key, "masked": "masked" if hides else "not masked"}
    titles = [look(said.get(name, name), **fill.get(name, {})) for name, *_ in PANELS]
    if np.isclose(steps.scale, steps.q.shape[1] ** -0.5):
        titles[4] += look("root", dim=steps.q.shape[1])
    titles.append(look("weights of", token=tokens[row]))
    figure = make_subplots(3, 3, subplot_titles=titles, vertical_spacing=0.1, horizontal_spacing=0.08)
    count, digits = len(tokens), "%{z:.3~g}" if len(tokens) <= 12 and steps.q.shape[1] <= 12 else ""
    for i, (_, field, color, over_tokens) in enumerate(PANELS):
        values = getattr(steps, field)
        finite = np.where(np.isfinite(values), values, np.nan)
        edge = np.nanmax(np.abs(finite)) or 1.0
        columns = tokens if over_tokens else [str(c) for c in range(values.shape[1])]
        scale = dict(colorscale=look.scale("blue"), zmin=0, zmax=edge) if field == "weights" else None
        tint = look.signed if color is None else _signed(look, color)
        scale = scale or dict(colorscale=tint, zmin=-edge, zmax=edge)
        figure.add_heatmap(
            z=np.round(finite, 3) + 0.0,  # no -0
            x=list(range(len(columns))),
            y=list(range(count)),
            texttemplate="%{z:.2f}" if field == "weights" and digits else digits,
            showscale=False,
            xgap=1,
            ygap=1,
            hovertemplate="%{z:.4f}<extra></extra>",
            row=i // 3 + 1,
            col=i % 3 + 1,
            **scale,
        )
        place = dict(row=i // 3 + 1, col=i % 3 + 1, showgrid=False, zeroline=False)
        figure.update_xaxes(tickvals=list(range(len(columns))), ticktext=columns, **place)
        figure.update_yaxes(tickvals=list(range(count)), ticktext=tokens, autorange="reversed", **place)
        axis = "" if i == 0 else str(i + 1)
        figure.add_shape(**box(-0.5, row - 0.5, len(columns), 1, axis, look.colors.ink))
    figure.add_bar(
        x=list(range(count)), y=steps.weights[row], marker_color=look.colors.blue, row=3, col=3, showlegend=False,
        text=[f"{w:.2f}" for w in steps.weights[row]], textposition="outside", cliponaxis=False,
    )  # fmt: skip
    figure.update_xaxes(tickvals=list(range(count)), ticktext=tokens, row=3, col=3)
    figure.update_yaxes(range=[0, max(1.0, steps.weights.max()) * 1.12], row=3, col=3)
    sight = look("causal" if hides else "both ways")
    return dressed(figure, look, f"{look('attention')} · {sight}", height=860)


def _signed(look: Look, color: str) -> list[list]:
    """Of q, k and v: their own colour where positive, grey where negative."""
    return [[0, look.colors.muted], [0.5, look.colors.faint], [1, getattr(look.colors, color)]]


def attention_heads(
    model: Transformer,
    params: dict,
    token_ids: list[int],
    layer: int = 0,
    tokens: list[str] | None = None,
    language: str = "en",
    theme: str = "light",
) -> go.Figure:
    """Where each query looks, head by head, in one layer of a model, trained or imported."""
    look = Look(language, theme)
    weights = data.heads(model, params, token_ids, layer)
    tokens = _names(tokens, len(token_ids))
    columns = min(4, len(weights))
    rows = -(-len(weights) // columns)
    titles = [look("head", head=head) for head in range(len(weights))]
    figure = make_subplots(rows, columns, subplot_titles=titles, horizontal_spacing=0.05, vertical_spacing=0.25 / rows)
    hover = [[f"{query} → {key}" for key in tokens] for query in tokens]
    for head, matrix in enumerate(weights):
        place = dict(row=head // columns + 1, col=head % columns + 1)
        ticks = dict(tickvals=list(range(len(tokens))), ticktext=tokens, showgrid=False, **place)
        figure.add_heatmap(
            z=matrix, zmin=0, zmax=1, colorscale=look.scale("blue"), showscale=False, xgap=1, ygap=1, text=hover,
            hovertemplate="%{text}: %{z:.2f}<extra></extra>", **place,
        )  # fmt: skip
        figure.update_xaxes(**ticks)
        figure.update_yaxes(autorange="reversed", **ticks)
    return dressed(figure, look, look("heads", layer=layer), height=120 + 270 * rows)


def _names(tokens: list[str] | None, count: int) -> list[str]:
    if tokens is None:
        return [str(i) for i in range(count)]
    if len(tokens) != count:
        raise ValueError(f"tokens: {len(tokens)} names for {count} tokens; give one each")
    return list(tokens)
