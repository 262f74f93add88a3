"""Which entries of a cache die when a token of the text changes."""

import numpy as np
import plotly.graph_objects as go

from transformer.figures.data import prefix as data
from transformer.figures.data.journey import PROMPT
from transformer.figures.look import Look, box, dressed, stepped


def stale_cache(
    causal: bool = True, window: int | None = None, language: str = "en", theme: str = "light"
) -> go.Figure:
    """The keys and values of each layer and token that change with one token; the slider picks it."""
    look = Look(language, theme)
    tokens = [look.token(number) for number in PROMPT]
    stale = data.stale(causal, window)
    steps = {f"{i} {token}": _changed(stale[i], tokens, i, look) for i, token in enumerate(tokens)}
    return stepped(steps, look("changed token"), look, 3)


def _changed(stale: np.ndarray, tokens: list[str], at: int, look: Look) -> go.Figure:
    c, figure = look.colors, go.Figure()
    words, shades = [look("reusable"), look("dead")], [look.tint("blue"), c.red]
    figure.add_heatmap(
        z=stale.astype(int), zmin=0, zmax=1, colorscale=[[0, shades[0]], [1, shades[1]]], showscale=False, xgap=3,
        ygap=3, text=[[words[dead] for dead in layer] for layer in stale.astype(int)],
        hovertemplate="%{text}<extra></extra>",
    )  # fmt: skip
    for name, color in zip(words, shades, strict=True):
        figure.add_scatter(
            x=[None], y=[None], mode="markers", name=name, marker=dict(size=12, symbol="square", color=color)
        )
    figure.add_shape(**box(at - 0.5, -0.5, 1, len(stale), "", c.ink))
    bare = dict(showgrid=False, zeroline=False)
    figure.update_xaxes(tickvals=list(range(len(tokens))), ticktext=tokens, **bare)
    figure.update_yaxes(title_text=look("layer"), dtick=1, **bare)
    note = look("stale note", token=tokens[at], count=int(stale.sum()), all=stale.size)
    return dressed(figure, look, f"{look('stale')}<br><sup>{note}</sup>", height=340)
