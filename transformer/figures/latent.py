"""What latent attention keeps of a token, and the keys and values that it makes of that."""

import plotly.graph_objects as go

from transformer.figures.data import caches as data
from transformer.figures.look import Look, box, dressed, stepped

HEADS = (16, 32, 64, 128, 256)
WIDTH, HEIGHT = 3.0, 1.4


def latent_cache(reference: str = "deepseek_v3:671b", language: str = "en", theme: str = "light") -> go.Figure:
    """From a token to the latent vector that is cached, and to the keys and values of all heads; the slider sets how
    many heads there are."""
    look, own = Look(language, theme), data.latent(reference).heads
    counts = sorted({*HEADS, own})
    figures = {f"{n}": _sketch(data.latent(reference, n), reference, look) for n in counts}
    return stepped(figures, look("heads of"), look, counts.index(own))


def _sketch(one: data.Latent, reference: str, look: Look) -> go.Figure:
    c, figure = look.colors, go.Figure()
    figure.add_scatter(x=[0, 10], y=[1, 4], mode="markers", marker_opacity=0, hoverinfo="skip", showlegend=False)
    boxes = {
        "latent token": (0.0, 1.25, "ink"),
        "latent vector": (3.6, 2.1, "purple"),
        "latent rope key": (3.6, 0.4, "purple"),
        "latent keys": (7.2, 0.4, "orange"),
        "latent values": (7.2, 2.1, "green"),
    }
    sizes = dict(width=one.width, heads=one.heads, latent=one.latent, rope=one.rope, k=one.key, v=one.value)
    for name, (x, y, color) in boxes.items():
        figure.add_shape(**box(x, y, WIDTH, HEIGHT, "", getattr(c, color), fillcolor=c.paper))
        text = dict(text=look(name, **sizes), showarrow=False, font=dict(color=c.ink, size=11))
        figure.add_annotation(x=x + WIDTH / 2, y=y + HEIGHT / 2, **text)
    kept = box(3.45, 0.25, WIDTH + 0.3, 3.4, "", c.muted, line_width=1.5, fillcolor=c.faint, layer="below")
    figure.add_shape(**kept | dict(line_dash="dot"))
    for name, x in (("latent kept", 5.1), ("latent made", 8.7)):
        text = dict(text=f"<b>{look(name, kept=one.kept)}</b>", showarrow=False, font=dict(color=c.muted, size=11))
        figure.add_annotation(x=x, y=3.75, yanchor="bottom", **text)
    for start, end in (
        ((3.0, 2.1), (3.6, 2.8)),
        ((3.0, 1.8), (3.6, 1.1)),
        ((6.6, 2.8), (7.2, 2.8)),
        ((6.6, 2.5), (7.2, 1.4)),
        ((6.6, 1.0), (7.2, 1.0)),
    ):
        figure.add_annotation(
            x=end[0], y=end[1], ax=start[0], ay=start[1], xref="x", yref="y", axref="x", ayref="y", text="",
            showarrow=True, arrowhead=2, arrowwidth=1.5, arrowcolor=c.muted,
        )  # fmt: skip
    bare = dict(visible=False, fixedrange=True)
    figure.update_xaxes(range=[-0.1, 10.3], **bare)
    figure.update_yaxes(range=[0.1, 4.7], **bare)
    note = dict(model=reference, heads=one.heads, kept=one.kept, made=one.made, weights=one.weights / 1e6)
    return dressed(figure, look, f"{look('latent cache')}<br><sup>{look('latent note', **note)}</sup>", height=420)
