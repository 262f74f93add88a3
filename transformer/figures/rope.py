"""RoPE: position as rotation, scores over distance, and what scalings do to wavelengths."""

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from transformer.figures.data import rope as data
from transformer.figures.look import Look, dressed, stepped

SCALING_COLORS = {"plain": "muted", "larger base": "red", "linear": "orange", "piecewise": "blue", "yarn": "green"}


def rope_rotation(
    distance: int = 3, dim: int = 8, theta: float = 100.0, last: int = 24, language: str = "en", theme: str = "light"
) -> go.Figure:
    """A query and a key `distance` behind it, turned pair by pair; the slider moves both, and their score stays.

    Args:
      dim: features that rotate, two a circle.
      theta: base of the frequencies; small here, so that the slow pairs are seen to move.
      last: the farthest position of the query.
    """
    look, rope, vector = Look(language, theme), data.plain(dim, theta), data.content(dim)
    q_positions = np.arange(distance, max(last, distance) + 1)
    k_positions = q_positions - distance
    q, k = (data.pairs(data.turned(rope, vector, at)) for at in (q_positions, k_positions))
    scores = data.scores(rope, vector, vector, q_positions, k_positions)
    figures = {
        str(m): _circles(q[i], k[i], data.wavelengths(rope), scores, q_positions, i, distance, look)
        for i, m in enumerate(q_positions)
    }
    return stepped(figures, look("query position"), look)


def _circles(q, k, waves, scores, positions, i: int, distance: int, look: Look) -> go.Figure:
    count, c = len(q), look.colors
    titles = [look("pair", pair=p, wave=waves[p]) for p in range(count)]
    layout = [[{} for _ in range(count)], [{"colspan": count}, *[None] * (count - 1)]]
    figure = make_subplots(
        2,
        count,
        specs=layout,
        subplot_titles=[*titles, look("same score")],
        vertical_spacing=0.16,
        row_heights=[0.6, 0.4],
    )
    around = np.linspace(0, 2 * np.pi, 73)
    for p in range(count):
        place = dict(row=1, col=p + 1)
        figure.add_scatter(
            x=np.cos(around), y=np.sin(around), mode="lines", line=dict(color=c.line), hoverinfo="skip",
            showlegend=False, **place,
        )  # fmt: skip
        for name, vector, color in (("k", k[p], c.orange), ("q", q[p], c.blue)):
            figure.add_scatter(
                x=[0, vector[0]], y=[0, vector[1]], mode="lines+markers", name=name, showlegend=p == 0,
                line=dict(color=color, width=3), marker=dict(size=[0, 11], color=color), **place,
            )  # fmt: skip
        figure.update_xaxes(range=[-1.2, 1.2], visible=False, **place)
        figure.update_yaxes(range=[-1.2, 1.2], visible=False, scaleanchor="x" if p == 0 else f"x{p + 1}", **place)
    bottom = dict(row=2, col=1)
    figure.add_scatter(
        x=positions, y=scores, mode="lines", line=dict(color=c.muted, width=2), showlegend=False, **bottom
    )
    where = "bottom center" if scores[i] > 0 else "top center"
    figure.add_scatter(
        x=[positions[i]], y=[scores[i]], mode="markers+text", marker=dict(size=13, color=c.blue),
        text=[f"{scores[i]:.3f}"], textposition=where, showlegend=False, **bottom,
    )  # fmt: skip
    figure.update_xaxes(title_text=look("query position"), **bottom)
    figure.update_yaxes(title_text="q·k", range=[-count * 1.1, count * 1.25], **bottom)
    title = f"{look('rope rotation')}<br><sup>{look('moved together', distance=distance)}</sup>"
    return dressed(figure, look, title, height=540)


def rope_scores(
    thetas: tuple[float, ...] = (1e4, 5e5),
    dim: int = 128,
    farthest: int = 1024,
    language: str = "en",
    theme: str = "light",
) -> go.Figure:
    """The score of equal contents over their distance, for several bases: it falls in waves, not evenly."""
    look, vector, distances = Look(language, theme), data.content(dim), np.arange(farthest + 1)
    figure = go.Figure()
    for theta in thetas:
        scores = data.scores(data.plain(dim, theta), vector, vector, distances, np.zeros_like(distances))
        figure.add_scatter(x=distances, y=scores / (dim // 2), mode="lines", name=look("rope", theta=theta))
    figure.update_xaxes(title_text=look("distance"))
    figure.update_yaxes(title_text=look("score share"))
    return dressed(figure, look, look("rope scores", dim=dim), height=440)


def rope_wavelengths(
    dim: int = 128,
    base: float = 5e5,
    factor: float = 8.0,
    original: int = 8192,
    language: str = "en",
    theme: str = "light",
) -> go.Figure:
    """Wavelengths of every pair, and how often they are stretched, under each way to a longer context."""
    look = Look(language, theme)
    ropes = data.scalings(dim, base, factor, original)
    titles = [look("wavelength"), look("stretched")]
    figure = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.1)
    plain, numbers = data.wavelengths(ropes["plain"]), np.arange(dim // 2)
    for name, rope in ropes.items():
        waves = data.wavelengths(rope)
        line = dict(color=getattr(look.colors, SCALING_COLORS[name]), width=2.5)
        label = look(f"scaling {name}", theta=rope.theta, factor=factor)
        figure.add_scatter(x=numbers, y=waves, mode="lines", name=label, line=line, row=1, col=1)
        figure.add_scatter(x=numbers, y=waves / plain, mode="lines", line=line, showlegend=False, row=1, col=2)
    figure.add_scatter(
        x=[0, dim // 2 - 1], y=[original] * 2, mode="lines", name=look("trained length", length=original),
        line=dict(color=look.colors.muted, dash="dot"), row=1, col=1,
    )  # fmt: skip
    figure.update_xaxes(title_text=look("pair number"))
    figure.update_yaxes(type="log", title_text=look("tokens"), dtick=1, row=1, col=1)
    figure.update_yaxes(title_text="×", row=1, col=2)
    title = f"{look('rope wavelengths')}<br><sup>{look('scaled to', dim=dim, theta=base, factor=factor)}</sup>"
    figure = dressed(figure, look, title, height=500)
    return figure.update_layout(legend=dict(orientation="h", y=-0.2))
