"""Mixtures of experts: the router's picks at true size, load before and after training, dropped tokens."""

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from transformer.figures.data import experts as data
from transformer.figures.look import Look, box, dressed, stepped
from transformer.nn.model import Transformer
from transformer.settings import Compute

SIZES = ("mixtral:8x7b", "qwen3_moe:235b-a22b", "deepseek_v3:671b")
REMEDY_COLORS = {"none": "red", "auxiliary": "orange", "correction": "blue"}
LOADED = 512  # tokens whose load is shown


def router_grid(
    references: tuple[str, ...] = SIZES, tokens: int = 8, language: str = "en", theme: str = "light"
) -> go.Figure:
    """The experts of published models, all of them, and those that a token is sent to; the slider picks the token.

    Routers are at their initial weights and tokens random; below is the load of 512 of them.
    """
    look = Look(language, theme)
    mixtures = {name: data.mixture(name) for name in references}
    picks = {name: data.random_picks(one, LOADED) for name, one in mixtures.items()}
    figures = {str(t + 1): _grid(mixtures, picks, t, look) for t in range(tokens)}
    return stepped(figures, look("token"), look)


def _grid(mixtures: dict, picks: dict, token: int, look: Look) -> go.Figure:
    c, titles = look.colors, []
    for name, one in mixtures.items():
        shared = look("and shared") if one.shared else ""
        titles.append(f"{name}<br>{look('experts', count=one.num_experts, top=one.top_k)}{shared}")
    loads = [look("load of", count=LOADED)] * len(mixtures)
    figure = make_subplots(2, len(mixtures), subplot_titles=[*titles, *loads], row_heights=[0.68, 0.32])
    for column, (name, one) in enumerate(mixtures.items(), 1):
        index, weight = picks[name]
        cells = np.zeros(one.num_experts)
        cells[index[token]] = weight[token] / weight[token].max() * 0.6 + 0.4
        wide = 4 if one.num_experts <= 8 else 16
        number = np.arange(one.num_experts).reshape(-1, wide)
        figure.add_heatmap(
            z=cells.reshape(-1, wide), zmin=0, zmax=1, colorscale=look.scale("orange"), showscale=False, xgap=2, ygap=2,
            text=number, hovertemplate="expert %{text}<extra></extra>", row=1, col=column,
        )  # fmt: skip
        bare = dict(visible=False, constrain="domain", row=1, col=column)
        figure.update_xaxes(**bare)
        figure.update_yaxes(
            autorange="reversed", scaleanchor="x" if column == 1 else f"x{column}", constraintoward="top", **bare
        )
        if one.shared:
            _shared(figure, column, len(number), look)
        load = data.counts(index, one.num_experts)
        here = dict(row=2, col=column)
        colors = np.full(one.num_experts, look.tint("orange"))
        colors[index[token]] = c.orange
        figure.add_bar(y=load, marker=dict(color=colors, line_width=0), showlegend=False, **here)
        figure.add_hline(y=load.mean(), **_even(look), **here)
        figure.update_xaxes(title_text="expert", **here)
        figure.update_yaxes(title_text=look("assignments"), **here)
    note = look("router note", count=LOADED)
    figure = dressed(figure, look, f"{look('router')}<br><sup>{note}</sup>", height=660, bargap=0)
    return figure.update_layout(margin_t=140)


def _shared(figure: go.Figure, column: int, rows: int, look: Look) -> None:
    """The expert that every token visits, below the grid of `rows` rows of those that are picked."""
    axis, c = "" if column == 1 else str(column), look.colors
    figure.add_shape(**box(-0.45, rows + 0.3, 0.9, 0.9, axis, c.orange, line_width=0, fillcolor=c.orange))
    figure.add_annotation(
        x=0.8, y=rows + 0.75, xref=f"x{axis}", yref=f"y{axis}", text=look("shared cell"), showarrow=False,
        xanchor="left", font=dict(size=11, color=c.muted),
    )  # fmt: skip
    figure.update_yaxes(autorange=None, range=[rows + 1.4, -0.5], row=1, col=column)


def _even(look: Look) -> dict:
    """The line of an even share, with its name."""
    c = look.colors
    name = dict(text=look("even share"), font=dict(size=10, color=c.ink), bgcolor=c.paper, opacity=0.85)
    return dict(line=dict(color=c.ink, dash="dot", width=1), annotation=name, annotation_position="top right")


def expert_parameters(
    reference: str = "mixtral:8x7b",
    experts: tuple[int, ...] = (8, 16, 32, 64, 128),
    language: str = "en",
    theme: str = "light",
) -> go.Figure:
    """Parameters stored and used by a token, were there more experts; the slider sets how many a token visits."""
    look = Look(language, theme)
    sizes = {top: data.sizes(reference, experts, top) for top in (1, 2, 4, 8)}
    figures = {str(top): _parameters(reference, found, top, look) for top, found in sizes.items()}
    return stepped(figures, look("experts a token"), look, 1)


def _parameters(reference: str, found: dict[int, tuple[int, int]], top: int, look: Look) -> go.Figure:
    figure, names = go.Figure(), [str(count) for count in found]
    for told, which, color in (("stored", 0, look.faded), ("used by a token", 1, look.colors.orange)):
        counts = [both[which] / 1e9 for both in found.values()]
        figure.add_bar(
            x=names, y=counts, name=look(told), marker_color=color, text=[f"{n:.1f}" for n in counts],
            textangle=0, textfont_size=10, constraintext="none", textposition="outside", cliponaxis=False,
        )  # fmt: skip
    figure.update_xaxes(title_text=look("experts in a layer"), type="category")
    figure.update_yaxes(title_text=look("billions of parameters"), rangemode="tozero")
    few, many = min(found), max(found)
    creep = (found[many][1] - found[few][1]) / 1e9
    note = look("parameters note", model=reference, top=top, few=few, many=many, creep=creep)
    return dressed(figure, look, f"{look('expert parameters')}<br><sup>{note}</sup>", height=440)


def expert_load(
    runs: dict[str, data.Balancing] | None = None, steps: int = 80, language: str = "en", theme: str = "light"
) -> go.Figure:
    """Each expert's share before and after training, and how uneven the load is on the way, by remedy.

    Args:
      runs: `data.experts.train` of each remedy; by default small models are trained on the spot, for `steps` steps.
    """
    look = Look(language, theme)
    runs = runs or {remedy: data.train(remedy, steps) for remedy in data.REMEDIES}
    names = [look(f"remedy {remedy}") for remedy in runs]
    layout = [[{} for _ in runs], [{"colspan": len(runs)}, *[None] * (len(runs) - 1)]]
    figure = make_subplots(
        2, len(runs), specs=layout, subplot_titles=[*names, look("violation")], vertical_spacing=0.26
    )
    top = max(run.after[-1].max() for run in runs.values()) * 1.1
    for column, (remedy, run) in enumerate(runs.items(), 1):
        color = getattr(look.colors, REMEDY_COLORS[remedy])
        for when, shares, shade in (("before", run.before, look.faded), ("after", run.after, color)):
            figure.add_bar(
                y=shares[-1], name=look(f"{when} training"), marker_color=shade, showlegend=False, row=1, col=column
            )
        even = 1 / run.after.shape[-1]
        figure.add_hline(y=even, **_even(look), row=1, col=column)
        figure.update_yaxes(range=[0, top], tickformat=".0%", row=1, col=column)
        figure.update_xaxes(title_text="expert", dtick=1, row=1, col=column)
        line = dict(color=color, width=2)
        figure.add_scatter(y=run.violation, mode="lines", name=look(f"remedy {remedy}"), line=line, row=2, col=1)
    figure.update_yaxes(title_text=look("share of assignments"), row=1, col=1)
    figure.update_yaxes(title_text=look("over the mean"), row=2, col=1)
    figure.update_xaxes(title_text=look("step"), row=2, col=1)
    title = f"{look('load')}<br><sup>{look('load note')}</sup>"
    return dressed(figure, look, title, height=640)


def dropped_tokens(
    references: tuple[str, ...] = SIZES,
    factors: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0),
    runs: dict[str, data.Balancing] | None = None,
    language: str = "en",
    theme: str = "light",
) -> go.Figure:
    """Assignments that no slot is left for, over the capacity factor.

    Args:
      runs: of `data.experts.train`, to see trained routers too.
    """
    look = Look(language, theme)
    figure = go.Figure()
    for name in references:
        one = data.mixture(name)
        index, _ = data.random_picks(one, LOADED)
        lost = data.dropped(index, one.num_experts, np.array(factors))
        figure.add_scatter(x=factors, y=lost, mode="lines+markers", name=name)
    for remedy, run in (runs or {}).items():
        lost = data.dropped(run.picks, run.after.shape[-1], np.array(factors))
        line = dict(color=getattr(look.colors, REMEDY_COLORS[remedy]), dash="dash")
        label = look("trained with", remedy=look(f"remedy {remedy}"))
        figure.add_scatter(x=factors, y=lost, mode="lines+markers", name=label, line=line)
    own = Compute().expert_capacity
    figure.add_vline(
        x=own, line=dict(color=look.colors.muted, dash="dot"), annotation_text=look("usual capacity", factor=own),
        annotation_position="top right",
    )  # fmt: skip
    figure.update_xaxes(title_text=look("capacity factor"))
    figure.update_yaxes(title_text=look("dropped share"), tickformat=".0%", rangemode="tozero")
    return dressed(figure, look, f"{look('dropped')}<br><sup>{look('dropped note', count=LOADED)}</sup>", height=460)


def router_picks(
    model: Transformer,
    params: dict,
    token_ids: list[int],
    tokens: list[str] | None = None,
    language: str = "en",
    theme: str = "light",
) -> go.Figure:
    """Which experts each token of a text is sent to in a model, trained or imported, and how much each counts.

    Args:
      tokens: what the tokens are called; the slider goes through the layers that have experts.
    """
    look, routed = Look(language, theme), data.picks(model, params, token_ids)
    names = [str(i) for i in range(len(token_ids))] if tokens is None else list(tokens)
    figures = {str(layer): _picks(weights, names, layer, look) for layer, weights in routed.items()}
    return stepped(figures, look("layer"), look, len(figures) - 1)


def _picks(weights: np.ndarray, names: list[str], layer: int, look: Look) -> go.Figure:
    place, (count, experts) = list(range(len(names))), weights.shape
    hover = [[f"{token} → expert {e}" for e in range(experts)] for token in names]
    figure = go.Figure()
    figure.add_heatmap(
        z=weights.T, zmin=0, zmax=max(1.0, weights.max()), colorscale=look.scale("orange"), showscale=False, xgap=1,
        ygap=1, text=list(zip(*hover, strict=True)), hovertemplate="%{text}: %{z:.2f}<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(tickvals=place, ticktext=names, showgrid=False)
    figure.update_yaxes(title_text="expert", autorange="reversed", showgrid=False, dtick=1 if experts <= 32 else None)
    note = look("picks note", layer=layer, count=count, used=int((weights.sum(axis=0) > 0).sum()), experts=experts)
    return dressed(figure, look, f"{look('picks')}<br><sup>{note}</sup>", height=220 + 22 * min(experts, 32))
