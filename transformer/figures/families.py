"""One block, many families: diagrams side by side, and the table of families."""

import itertools
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

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
GAP, LINE, WIDTH = 0.5, 1.0, 9.0  # between boxes, of a line of text, and of a box
NUMBERS = "①②③④"  # of `data.families.CHANGES`


def block_diagrams(
    one: str = "llama3:8b", other: str = "deepseek_v3:671b", language: str = "en", theme: str = "light"
) -> go.Figure:
    """Two models' blocks side by side, drawn from their specs: numbers mark what is of another kind, dots the rest."""
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
    figure, changes = make_subplots(1, 2, horizontal_spacing=0.02), data.changes(one, other)
    for column, (reference, parts) in enumerate(zip(references, drawn, strict=True), 1):
        drawing = Drawing(figure, column, look, parts, tops)
        drawing.stack(reference)
        drawing.marks(drawn[2 - column], changes)
    figure.update_xaxes(range=[-1.0, 11.2], visible=False, fixedrange=True)
    figure.update_yaxes(range=[-0.6, y + 3.2], visible=False, fixedrange=True)
    # On a narrow page each of the two keeps this height.
    layout = dict(height=int(150 + 24 * y), width=1000, showlegend=False, meta="tall")
    return dressed(figure, look, f"{look('block diagrams')}<br><sup>{_told(one, other, changes, look)}</sup>", **layout)


def _told(one: str, other: str, changes: tuple[str, ...], look: Look) -> str:
    """What the numbers stand for: each aspect, in one model and in the other."""
    told, both = [look("marked")], [data.aspects(name) for name in (one, other)]
    for number, aspect in zip(NUMBERS, data.CHANGES, strict=True):
        if aspect in changes:
            a, b = (", ".join(look(key, **values) for key, values in aspects[aspect]) for aspects in both)
            told.append(f"<b>{number} {look(f'aspect {aspect}')}</b>: {a} → {b}")
    return " · ".join([*told, look("marked small")])


@dataclass(frozen=True)
class Drawing:
    """One model's column: its parts by slot, and where each slot lies (y, height)."""

    figure: go.Figure
    column: int
    look: Look
    parts: dict[str, data.Part]
    tops: dict[str, tuple[float, float]]

    @property
    def axis(self) -> str:
        """The end of its axes' names."""
        return "" if self.column == 1 else str(self.column)

    def note(self, x: float, y: float, text: str, **options) -> None:
        """Text at a place of the column."""
        place = dict(row=1, col=self.column)
        self.figure.add_annotation(x=x, y=y, text=text, showarrow=False, **options, **place)

    def line(self, **shape) -> None:
        """A line below the boxes."""
        muted = dict(color=self.look.colors.muted, width=1.5)
        self.figure.add_shape(line=muted, layer="below", row=1, col=self.column, **shape)

    def stack(self, reference: str) -> None:
        """Everything but the marks."""
        c, tops = self.look.colors, self.tops
        top = max(y + height for y, height in tops.values())
        layout = " · ".join(self.look(key, **values) for key, values in data.aspects(reference)["layout"])
        self.note(WIDTH / 2, top + 2.2, f"<b>{reference}</b><br>{layout}", font=dict(color=c.ink, size=13))
        present = [slot for slot in tops if slot in self.parts]
        inner = [slot for slot in present if slot not in AROUND]
        low, high = tops[inner[0]][0], sum(tops[inner[-1]])
        outline = (-0.7, low - GAP, WIDTH + 1.4, high - low + 1.6 * GAP, self.axis, c.line)
        self.figure.add_shape(**box(*outline, line_width=2, fillcolor=c.faint), layer="below")
        layers = data.published.model(reference).trunk.num_layers
        self.note(WIDTH + 0.8, (low + high) / 2, f"× {layers}", xanchor="left", font=dict(color=c.muted, size=14))
        for below, above in itertools.pairwise(present):
            self.line(type="line", x0=WIDTH / 2, x1=WIDTH / 2, y0=sum(tops[below]), y1=tops[above][0])
        for branch in ("attention", "cross", "ffn"):
            if branch in self.parts:
                self.residual(branch)
        for slot in present:
            self.part(slot)
        self.figure.add_scatter(x=[None], y=[None], hoverinfo="skip", row=1, col=self.column)

    def part(self, slot: str) -> None:
        """The box of a slot, or the sign of a sum."""
        c, part, (y, height) = self.look.colors, self.parts[slot], self.tops[slot]
        if part.role == "add":
            self.note(WIDTH / 2, y + height / 2, "⊕", font=dict(size=20, color=c.ink), bgcolor=c.faint, borderpad=0)
            return
        outline = box(0, y, WIDTH, height, self.axis, getattr(c, ROLE_COLORS[part.role]), line_width=1.5)
        self.figure.add_shape(**outline, fillcolor=c.paper, layer="below")
        text = "<br>".join(self.look(key, **values) for key, values in part.facts)
        self.note(WIDTH / 2, y + height / 2, text, font=dict(size=12, color=c.ink))

    def residual(self, branch: str) -> None:
        """The way around a branch, from below it to its sum."""
        first = next(slot for slot in (f"{branch} norm in", branch) if slot in self.parts)
        low, (y, height) = self.tops[first][0] - GAP / 2, self.tops[f"{branch} add"]
        left, middle, high = -0.4, WIDTH / 2, y + height / 2
        self.line(type="path", path=f"M {middle},{low} L {left},{low} L {left},{high} L {middle - 0.3},{high}")

    def marks(self, others: dict[str, data.Part], changes: tuple[str, ...]) -> None:
        """A number where one of `changes` is seen, and a dot at whatever else differs."""
        red, numbered = self.look.colors.red, {}
        for number, aspect in zip(NUMBERS, data.CHANGES, strict=True):
            if aspect in changes:
                numbered.setdefault(self.seen(aspect), []).append(number)
        for slot, part in self.parts.items():
            y, height = self.tops[slot]
            if slot in numbered:
                text = f"<b>{' '.join(numbered[slot])}</b>"
                # On the edge, where no words are, however narrow the drawing.
                self.note(WIDTH, y + height / 2, text, font=dict(size=19, color=red), bgcolor=self.look.colors.paper)
            elif part.role != "add" and (slot not in others or others[slot].facts != part.facts):
                self.note(WIDTH, y + height / 2, "●", font=dict(size=14, color=red))

    def seen(self, aspect: str) -> str:
        """The slot in which an aspect is said first."""
        if aspect == "norm":
            return next(slot for slot in self.parts if slot.startswith("attention norm"))
        added = any(key in ("learned positions", "sinusoids") for key, _ in self.parts["embedding"].facts)
        return "embedding" if aspect == "positions" and added else "ffn" if aspect == "ffn" else "attention"


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
            columnwidth=[90, 150, 115, 140, 205, 130, 60, 85],
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
