"""How figures look: language, colours, and the few arrangements that they share."""

import re
from dataclasses import dataclass
from typing import Any, Literal

try:
    import plotly.graph_objects as go
except ImportError as error:
    raise ImportError("figures are drawn with plotly: pip install 'transformer[figures]'") from error

from transformer.figures.words import LANGUAGES, TOKENS, WORDS

FONT = (
    "Inter, 'Helvetica Neue', Arial, 'PingFang SC', 'Microsoft YaHei', 'Noto Sans CJK SC', 'Noto Sans SC', sans-serif"
)


@dataclass(frozen=True)
class Palette:
    """Colours of a theme. Blue is queries and attention, orange keys, FFN and experts, green values and embedding."""

    paper: str
    ink: str
    muted: str
    line: str
    faint: str
    blue: str
    orange: str
    green: str
    purple: str
    red: str


PALETTES = {
    "light": Palette(
        paper="#ffffff", ink="#1d2530", muted="#677384", line="#dfe4eb", faint="#f3f5f9", blue="#2f6fed",
        orange="#e0791a", green="#1f9d66", purple="#8157c8", red="#d0455a",
    ),
    "dark": Palette(
        paper="#14181f", ink="#e8ecf2", muted="#9ba7b7", line="#2f3743", faint="#1d232c", blue="#6b9dff",
        orange="#f2a154", green="#4cc38a", purple="#b394f0", red="#f07a8a",
    ),
}  # fmt: skip


# What every step of a figure says anew.
STEPPED = ("title", "annotations", "shapes")
# Shares of a colour in the paper's, that figures paint areas with.
TINTS = (0.35, 0.45, 0.75)


@dataclass(frozen=True)
class Look:
    """The language of the labels and the colours of a figure."""

    language: Literal["en", "zh"] = "en"
    theme: Literal["light", "dark"] = "light"

    def __post_init__(self):
        if self.language not in LANGUAGES:
            raise ValueError(f"language={self.language!r}: use one of {', '.join(LANGUAGES)}")
        if self.theme not in PALETTES:
            raise ValueError(f"theme={self.theme!r}: use one of {', '.join(PALETTES)}")

    @property
    def colors(self) -> Palette:
        """Colours of the theme."""
        return PALETTES[self.theme]

    @property
    def font(self) -> str:
        """Families of fonts, as CSS lists them."""
        return FONT

    def __call__(self, key: str, **values: Any) -> str:
        """A phrase of the table of words, with its gaps filled."""
        return WORDS[key][LANGUAGES.index(self.language)].format(**values)

    def says(self, key: str) -> bool:
        """True for a phrase of the table of words."""
        return key in WORDS

    def token(self, number: int) -> str:
        """A token of the running example."""
        return TOKENS[number][LANGUAGES.index(self.language)]

    def knows(self, number: int) -> bool:
        """True for a token of the running example."""
        return number in TOKENS

    def scale(self, color: str) -> list[list]:
        """From the paper's colour to `color`."""
        return [[0, self.colors.faint], [1, getattr(self.colors, color)]]

    def tint(self, color: str, share: float = 0.45) -> str:
        """`share` of a colour in the paper's, one of `TINTS`."""
        if share not in TINTS:
            raise ValueError(f"share={share}: use one of {', '.join(map(str, TINTS))}")
        both = (getattr(self.colors, color), self.colors.paper)
        one, two = ([int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in both)
        return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in zip(one, two, strict=True))

    @property
    def faded(self) -> str:
        """Of what stands behind what is shown: grey, yet seen on both papers."""
        return self.tint("muted", 0.75)

    @property
    def signed(self) -> list[list]:
        """From orange for what is negative to blue for what is positive."""
        return [[0, self.colors.orange], [0.5, self.colors.faint], [1, self.colors.blue]]


def repainted() -> dict[str, str]:
    """The colours that light figures are made of, and the dark one for each: by these a page turns dark by itself."""
    one, other = Look(theme="light"), Look(theme="dark")
    names = vars(one.colors)
    plain = {getattr(one.colors, name): getattr(other.colors, name) for name in names}
    return plain | {one.tint(name, share): other.tint(name, share) for name in names for share in TINTS}


def dressed(figure: go.Figure, look: Look, title: str, height: int, width: int | None = None, **layout) -> go.Figure:
    """The figure with its title, fonts, colours and margins; `layout` goes to plotly."""
    c = look.colors
    axis = dict(gridcolor=c.line, zerolinecolor=c.line, linecolor=c.line, tickcolor=c.line, automargin=True)
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    for bars in (trace for trace in figure.data if trace.type == "bar" and trace.textposition == "outside"):
        # Bars that say their number need no grid, which would cross it.
        for side, its in (("x", bars.xaxis), ("y", bars.yaxis)):
            figure.layout[f"{side}axis{(its or side)[1:]}"].showgrid = False
    figure.update_layout(
        title=dict(text=title, x=0.01, xanchor="left", font=dict(size=18)),
        font=dict(family=FONT, size=13, color=c.ink),
        paper_bgcolor=c.paper,
        plot_bgcolor=c.paper,
        colorway=[c.blue, c.orange, c.green, c.purple, c.red, c.muted],
        height=height,
        width=width,
        margin=dict(l=70, r=30, t=110 if "<br>" in title else 80, b=60),
        hoverlabel=dict(bgcolor=c.faint, font=dict(family=FONT, color=c.ink), bordercolor=c.line),
        legend=dict(bgcolor="rgba(0,0,0,0)"),
        **layout,
    )
    # Titles of subplots and notes that have no colour of their own.
    figure.for_each_annotation(lambda note: note.font.color or note.update(font=dict(color=c.ink)))
    return figure


def box(x: float, y: float, width: float, height: float, axis: str, color: str, **options) -> dict:
    """The outline of a rectangle whose lower left corner is (x, y), on the axes "", "2", "3" …"""
    line = dict(color=color, width=options.pop("line_width", 2.5))
    corners = dict(x0=x, y0=y, x1=x + width, y1=y + height)
    return dict(type="rect", xref=f"x{axis}", yref=f"y{axis}", line=line, **corners, **options)


def stepped(figures: dict[str, go.Figure], prompt: str, look: Look, start: int = 0) -> go.Figure:
    """One figure with a slider that goes through `figures`, which have the same traces; no kernel is needed for it.

    Args:
      prompt: said before the name of the step.
      start: the step shown first.
    """
    names, steps = list(figures), list(figures.values())
    first = steps[start]
    # Also axes whose range moves with the step: one scale for all would hide small bars, the first's cut large ones.
    axes = [name for name in first.layout if re.fullmatch(r"[xy]axis\d*", name)]
    moved = [name for name in axes if any(f.layout[name] != first.layout[name] for f in steps)]
    frames = [
        go.Frame(name=name, data=f.data, layout={part: f.layout[part] for part in (*STEPPED, *moved)})
        for name, f in figures.items()
    ]
    shown = go.Figure(data=first.data, layout=first.layout, frames=frames)
    now = dict(mode="immediate", frame=dict(duration=0, redraw=True), transition=dict(duration=0))
    c = look.colors
    shown.update_layout(
        height=first.layout.height + 90,
        margin=dict(b=first.layout.margin.b + 90),
        sliders=[
            dict(
                active=start,
                currentvalue=dict(prefix=f"{prompt}: ", font=dict(size=14, color=c.ink)),
                pad=dict(t=70, b=10),
                bgcolor=c.line,
                bordercolor=c.line,
                activebgcolor=c.blue,
                tickcolor=c.muted,
                font=dict(color=c.muted, size=11),
                steps=[dict(label=name, method="animate", args=[[name], now]) for name in names],
            )
        ],
    )
    return shown
