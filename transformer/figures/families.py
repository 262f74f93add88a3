"""One block, many families: diagrams side by side, and the table of families."""

import itertools

import plotly.graph_objects as go

from transformer.figures.data import families as data
from transformer.figures.data import published
from transformer.figures.look import Look, box, dressed

ROLE_COLORS = {
    "embedding": "green",
    "norm": "muted",
    "attention": "blue",
    "ffn": "orange",
    "add": "ink",
    "head": "green",
}
# From the bottom up; what belongs to a block is between the first and the last two.
SLOTS = (
    "embedding",
    *(f"{branch}{place}" for branch in ("attention", "cross", "ffn") for place in (" norm in", "", " norm out", " add",
                                                                                   " norm sum")),
    "final norm",
    "head",
)  # fmt: skip
AROUND = ("embedding", "final norm", "head")
GAP, LINE = 0.5, 1.0  # between boxes, and of a line of text


def block_diagrams(
    one: str = "llama3:8b", other: str = "deepseek_v3:671b", language: str = "en", theme: str = "light"
) -> go.Figure:
    """Two models' blocks side by side, drawn from their specs; a dot marks what differs."""
    look, references = Look(language, theme), (one, other)
    drawn = [{part.slot: part for part in data.parts(name)} for name in references]
    slots = [slot for slot in SLOTS if any(slot in parts for parts in drawn)]
    inner = [slot for slot in slots if slot not in AROUND]
    tops, y, edges = {}, 0.0, ("embedding", inner[-1])
    for slot in slots:
        lines = max(len(parts[slot].facts) for parts in drawn if slot in parts)
        height = 0.55 if slot.endswith("add") else max(lines, 1) * LINE + 0.6
        tops[slot] = (y, height)
        y += height + (2.5 * GAP if slot in edges else GAP)
    figure = go.Figure()
    for column, (reference, parts) in enumerate(zip(references, drawn, strict=True)):
        _column(figure, 12.0 * column, reference, parts, drawn[1 - column], tops, look)
    bare = dict(visible=False, fixedrange=True)
    figure.update_xaxes(range=[-1.6, 23.2], **bare)
    figure.update_yaxes(range=[-0.6, y + 3.2], **bare)
    title = f"{look('block diagrams')}<br><sup>{look('marked')}</sup>"
    return dressed(figure, look, title, height=int(150 + 24 * y), width=1000, showlegend=False)


def _column(figure: go.Figure, x: float, reference: str, parts: dict, others: dict, tops: dict, look: Look) -> None:
    c, width = look.colors, 9.0
    top = max(y + height for y, height in tops.values())
    layout = " · ".join(look(key, **values) for key, values in data.aspects(reference)["layout"])
    figure.add_annotation(
        x=x + width / 2,
        y=top + 2.2,
        text=f"<b>{reference}</b><br>{layout}",
        showarrow=False,
        font=dict(color=c.ink, size=14),
    )
    inner = [slot for slot in tops if slot in parts and slot not in AROUND]
    low, high = tops[inner[0]][0], sum(tops[inner[-1]])
    figure.add_shape(
        **box(x - 0.7, low - GAP, width + 1.4, high - low + 1.6 * GAP, "", c.line, line_width=2, fillcolor=c.faint),
        layer="below",
    )
    layers = data.published.model(reference).trunk.num_layers
    figure.add_annotation(
        x=x + width + 0.85,
        y=(low + high) / 2,
        text=f"× {layers}",
        showarrow=False,
        xanchor="left",
        font=dict(color=c.muted, size=14),
    )
    present = [slot for slot in tops if slot in parts]
    for below, above in itertools.pairwise(present):
        line = dict(color=c.muted, width=1.5)
        figure.add_shape(
            type="line",
            x0=x + width / 2,
            x1=x + width / 2,
            y0=sum(tops[below]),
            y1=tops[above][0],
            line=line,
            layer="below",
        )
    _residuals(figure, x, parts, tops, look)
    marks = []
    for slot in present:
        part, (y, height) = parts[slot], tops[slot]
        differs = slot not in others or others[slot].facts != part.facts
        marks += [(x + width - 0.35, y + height - 0.35)] if differs else []
        _box(figure, x, y, width, height, part, differs, look)
    at = dict(zip("xy", zip(*marks, strict=True), strict=True)) if marks else {}
    figure.add_scatter(mode="markers", marker=dict(size=9, color=c.red), hoverinfo="skip", **at)


def _box(figure: go.Figure, x: float, y: float, width: float, height: float, part, differs: bool, look: Look) -> None:
    c = look.colors
    middle = dict(x=x + width / 2, y=y + height / 2, showarrow=False)
    if part.role == "add":
        figure.add_annotation(text="⊕", font=dict(size=20, color=c.ink), bgcolor=c.faint, borderpad=0, **middle)
        return
    color = getattr(c, ROLE_COLORS[part.role])
    figure.add_shape(
        **box(x, y, width, height, "", color, line_width=3 if differs else 1.2, fillcolor=c.paper, layer="below")
    )
    text = "<br>".join(look(key, **values) for key, values in part.facts)
    figure.add_annotation(text=text, font=dict(size=12, color=c.ink), **middle)


def _residuals(figure: go.Figure, x: float, parts: dict, tops: dict, look: Look) -> None:
    """The way around each branch, from below it to its sum."""
    for branch in ("attention", "cross", "ffn"):
        if branch not in parts:
            continue
        first = next(slot for slot in (f"{branch} norm in", branch) if slot in parts)
        low, (y, height) = tops[first][0] - GAP / 2, tops[f"{branch} add"]
        left, middle, high = x - 0.4, x + 4.5, y + height / 2
        path = f"M {middle},{low} L {left},{low} L {left},{high} L {middle - 0.3},{high}"
        figure.add_shape(type="path", path=path, line=dict(color=look.colors.muted, width=1.5), layer="below")


def family_table(
    references: tuple[str, ...] = published.LESSON, language: str = "en", theme: str = "light"
) -> go.Figure:
    """Layout, norm, positions, attention, FFN, context and size of published models, read off their specs."""
    look = Look(language, theme)
    c = look.colors
    rows = [data.aspects(name) for name in references]
    cells = [[f"<b>{name.replace(':', '<br>')}</b>" for name in references]]
    cells += [["<br>".join(look(key, **v) for key, v in row[aspect]) for row in rows] for aspect in data.ASPECTS]
    lines = sum(max(len(row[aspect]) for aspect in data.ASPECTS) for row in rows)
    figure = go.Figure(
        go.Table(
            columnwidth=[100, 150, 120, 130, 165, 140, 65, 90],
            header=dict(
                values=[f"<b>{look(key)}</b>" for key in ("family", *(f"aspect {name}" for name in data.ASPECTS))],
                fill_color=c.line, font=dict(color=c.ink, size=13), align="left", height=32, line_color=c.line,
            ),
            cells=dict(
                values=cells, fill_color=c.paper, font=dict(color=c.ink, size=12), align="left", height=24,
                line_color=c.line,
            ),
        )
    )  # fmt: skip
    figure = dressed(figure, look, look("families"), height=150 + 17 * lines + 12 * len(rows), width=1200)
    return figure.update_layout(margin=dict(l=20, r=20, b=20))
