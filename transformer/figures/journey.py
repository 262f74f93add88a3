"""One token's journey through a model, and the softmax of the lesson."""

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from transformer.figures.data import journey as data
from transformer.figures.look import Look, dressed


def token_journey(
    journey: data.Journey | None = None, tokens: list[str] | None = None, language: str = "en", theme: str = "light"
) -> go.Figure:
    """小猫跑了一天，它很 → 累: the vector of 很 at every point of a tiny model that is trained on the spot.

    Args:
      journey: of another model (`data.journey.follow`), whose tokens are then called `tokens`.
    """
    look = Look(language, theme)
    if journey is None:
        model, params, _ = data.learn()
        journey, tokens = data.follow(model, params), [look.token(number) for number in data.PROMPT]
    count = journey.looks.shape[-1]
    tokens = tokens or [str(i) for i in range(count)]
    titles = [look("vector of", token=tokens[-1]), look("heads look", token=tokens[-1]), look("next token")]
    layout = [[{"rowspan": 2}, {}], [None, {}]]
    figure = make_subplots(
        2, 2, specs=layout, subplot_titles=titles, column_widths=[0.6, 0.4], horizontal_spacing=0.13,
        vertical_spacing=0.17,
    )  # fmt: skip
    _vectors(figure, journey, look)
    _looks(figure, journey, tokens, look)
    _chances(figure, journey, look)
    return dressed(figure, look, f"{look('journey')}<br><sup>{look('journey note')}</sup>", height=760)


def _vectors(figure: go.Figure, journey: data.Journey, look: Look) -> None:
    names = [look(stage.key, **stage.values) for stage in journey.stages]
    names = [f"<b>{n}</b>" if stage.stream else f"{n}" for n, stage in zip(names, journey.stages, strict=True)]
    vectors = np.stack([stage.vector for stage in journey.stages])
    edge = np.abs(vectors).max()
    shown = np.where(np.abs(vectors) < 0.05, 0.0, vectors)  # what rounds to 0 shows no sign
    figure.add_heatmap(
        z=shown, y=list(range(len(names))), zmin=-edge, zmax=edge, colorscale=look.signed, showscale=False, xgap=1,
        ygap=2, texttemplate="%{z:.1f}" if vectors.shape[1] <= 16 else "", textfont=dict(size=10), text=vectors,
        hovertemplate="%{text:.4f}<extra></extra>", row=1, col=1,
    )  # fmt: skip
    place = dict(showgrid=False, zeroline=False, row=1, col=1)
    figure.update_yaxes(tickvals=list(range(len(names))), ticktext=names, autorange="reversed", **place)
    figure.update_xaxes(title_text=look("feature"), **place)


def _looks(figure: go.Figure, journey: data.Journey, tokens: list[str], look: Look) -> None:
    layers, heads, count = journey.looks.shape
    names = [look("layer and head", layer=layer, head=head) for layer in range(layers) for head in range(heads)]
    place = dict(showgrid=False, zeroline=False, row=1, col=2)
    figure.add_heatmap(
        z=journey.looks.reshape(-1, count), x=list(range(count)), y=names, zmin=0, zmax=1,
        colorscale=look.scale("blue"), showscale=False, xgap=1, ygap=2, texttemplate="%{z:.2f}", textfont=dict(size=10),
        hovertemplate="%{z:.4f}<extra></extra>", row=1, col=2,
    )  # fmt: skip
    figure.update_xaxes(tickvals=list(range(count)), ticktext=tokens, **place)
    figure.update_yaxes(autorange="reversed", **place)


def _chances(figure: go.Figure, journey: data.Journey, look: Look, most: int = 6) -> None:
    best = np.argsort(journey.probabilities)[::-1][:most]
    names = [look.token(int(i)) if look.knows(int(i)) else f"ID {i}" for i in best]
    values = journey.probabilities[best]
    figure.add_bar(
        x=[f"{name}<br>{journey.logits[i]:.1f}" for name, i in zip(names, best, strict=True)], y=values,
        marker_color=[look.colors.green, *[look.faded] * (most - 1)], text=[f"{p:.2f}" for p in values],
        textposition="outside", cliponaxis=False, showlegend=False, row=2, col=2,
    )  # fmt: skip
    figure.update_yaxes(range=[0, 1.15], row=2, col=2)
    figure.update_xaxes(title_text=look("token and logit"), row=2, col=2)


def softmax_steps(
    scores: tuple[float, ...] = (2.0, 1.0, 0.0),
    names: tuple[str, ...] | None = None,
    language: str = "en",
    theme: str = "light",
) -> go.Figure:
    """From scores to weights: e^z, divided by the sum; [2, 1, 0] gives 0.67, 0.24 and 0.09."""
    look = Look(language, theme)
    powers, weights = data.softmax(scores)
    lesson = [look.token(number) for number in (11, 13, 10)]
    names = names or (lesson if len(scores) == 3 else [str(i) for i in range(len(scores))])
    titles = [look("score z"), look("power"), look("weight sum")]
    figure = make_subplots(1, 3, subplot_titles=titles, horizontal_spacing=0.08)
    panels = zip((np.array(scores), powers, weights), ("muted", "orange", "blue"), strict=True)
    for column, (values, color) in enumerate(panels, 1):
        figure.add_bar(
            x=list(names), y=values, marker_color=getattr(look.colors, color), text=[f"{v:.2f}" for v in values],
            textposition="outside", cliponaxis=False, showlegend=False, row=1, col=column,
        )  # fmt: skip
        low, high = min(values.min(), 0), max(values.max(), 0)
        figure.update_yaxes(range=[low * 1.2, high * 1.2 or 1], row=1, col=column)
    return dressed(figure, look, look("softmax steps"), height=380)
