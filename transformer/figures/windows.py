"""Windows and sinks: how far tokens see through a stack, patterns of layers, and the slots of a cache."""

import numpy as np
import plotly.graph_objects as go

from transformer import spec
from transformer.figures.data import caches
from transformer.figures.data import windows as data
from transformer.figures.look import Look, box, dressed, stepped

PATTERNS = ("mistral:7b-v0.1", "gemma3:27b", "gpt_oss:120b", "gpt3:175b", "llama3:8b")


def receptive_field(
    windows: tuple[int | None, ...] = (4, 4, 4, 4, 4, 4),
    length: int = 24,
    sinks: int = 0,
    language: str = "en",
    theme: str = "light",
) -> go.Figure:
    """What each token depends on after each layer, measured by gradient; the slider stacks the layers.

    Args:
      windows: of each layer; None sees all. (4, 4, 4, 4, 4, None) is five local layers and a global one.
      sinks: first tokens that windowed layers see too.
    """
    look = Look(language, theme)
    reached = data.influence(tuple(windows), length, sinks)
    figures = {str(layer + 1): _field(reached, layer, windows, sinks, look) for layer in range(len(windows))}
    return stepped(figures, look("layers stacked"), look, len(windows) - 1)


def _field(reached: np.ndarray, layer: int, windows: tuple, sinks: int, look: Look) -> go.Figure:
    c, length = look.colors, reached.shape[1]
    # 2: seen by the first layer itself; 1: reached through others.
    shade = reached[layer].astype(int) + (reached[layer] & reached[0])
    figure = go.Figure()
    words = [look("not reached"), look("reached"), look("seen directly")]
    figure.add_heatmap(
        z=shade, zmin=0, zmax=2, colorscale=_three(c.faint, look.tint("blue"), c.blue), showscale=False, xgap=1,
        ygap=1, text=[[words[value] for value in row] for row in shade],
        hovertemplate=f"{look('query token')} %{{y}}, token %{{x}}: %{{text}}<extra></extra>",
    )  # fmt: skip
    row = length - 1
    figure.add_shape(**box(-0.5, row - 0.5, length, 1, "", c.ink, line_width=2))
    figure.update_xaxes(title_text=look("token"), showgrid=False, zeroline=False, constrain="domain")
    figure.update_yaxes(
        title_text=look("query token"),
        autorange="reversed",
        showgrid=False,
        zeroline=False,
        scaleanchor="x",
        constrain="domain",
    )
    for name, color in zip(words[1:], (look.tint("blue"), c.blue), strict=True):
        figure.add_scatter(
            x=[None], y=[None], mode="markers", name=name, marker=dict(size=12, symbol="square", color=color)
        )
    near, far = (data.reach(tuple(windows[: layer + 1]), n) for n in (0, sinks))
    told = look("reach all") if near is None else look("reach formula", reach=near)
    told += look("reach sinks", reach=far) if near is not None and sinks else ""
    measured = look("reach measured", count=int(reached[layer, row].sum()))
    name = ", ".join(look("all") if w is None else str(w) for w in windows[: layer + 1])
    told = f"{look('receptive field')}<br><sup>{look('windows are', windows=name)} · {measured} · {told}</sup>"
    return dressed(figure, look, told, height=660)


def _three(*colors: str) -> list[list]:
    return [[i / 3 + edge / 3, color] for i, color in enumerate(colors) for edge in (0, 1)]


def layer_patterns(references: tuple[str, ...] = PATTERNS, language: str = "en", theme: str = "light") -> go.Figure:
    """Which layers of published models see a window and which see all, read off their specs."""
    look = Look(language, theme)
    c, figure = look.colors, go.Figure()
    for kind, color in (("windowed", c.orange), ("full", c.blue)):
        x, y, hover = [], [], []
        for name in references:
            for layer, window in enumerate(data.pattern(name)):
                if (window is not None) == (kind == "windowed"):
                    x.append(layer)
                    y.append(f"{name}  ")
                    hover.append(look("window", window=window) if window else look("all"))
        figure.add_scatter(
            x=x, y=y, mode="markers", name=look(kind), marker=dict(symbol="square", size=7, color=color), text=hover,
            hovertemplate="%{y}%{x}: %{text}<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text=look("layer"), showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return dressed(figure, look, look("layer patterns"), height=180 + 44 * len(references))


def ring_cache(
    window: int = 6, sinks: int = 2, steps: int = 18, language: str = "en", theme: str = "light"
) -> go.Figure:
    """Which position each slot of a windowed layer's cache holds, token by token; sinks are never overwritten."""
    look = Look(language, theme)
    c = look.colors
    held = caches.slots(spec.Mask(causal=True, window=window, sinks=sinks), steps)
    new = held == np.arange(steps)[:, None]
    shade = np.where(held < 0, 0, np.where(new, 3, np.where(held < sinks, 2, 1)))
    colors = (c.faint, look.tint("blue"), c.green, c.blue)
    scale = [[(i + edge) / 4, color] for i, color in enumerate(colors) for edge in (0, 1)]
    figure = go.Figure()
    figure.add_heatmap(
        z=shade, zmin=0, zmax=3, colorscale=scale, showscale=False, xgap=2, ygap=2,
        text=np.where(held < 0, "", held.astype(str)), texttemplate="%{text}",
        hovertemplate=f"{look('slot')} %{{x}}: %{{text}}<extra></extra>",
    )  # fmt: skip
    named = [("kept", colors[1]), *[("sink", colors[2])] * (sinks > 0), ("written", colors[3])]
    for name, color in named:
        marker = dict(size=12, symbol="square", color=color)
        figure.add_scatter(x=[None], y=[None], mode="markers", name=look(name), marker=marker)
    ticks = dict(showgrid=False, zeroline=False, dtick=1)
    figure.update_xaxes(title_text=look("slot"), **ticks)
    figure.update_yaxes(title_text=look("token written"), autorange="reversed", **ticks)
    title = look("ring cache", window=window, sinks=sinks)
    return dressed(figure, look, title, height=150 + 26 * steps, width=max(520, 260 + 48 * held.shape[1]))
