"""Sharding: which device holds which part of a parameter or an activation."""

import re

import plotly.graph_objects as go

from transformer.figures.data import placement as data
from transformer.figures.look import Look, box, dressed
from transformer.figures.sizes import binary

MOST_LISTED = 8  # devices named in a part
# Of the parts, one each: as many as a mesh of eight devices has, and more.
FILLS = [(color, share) for share in (0.35, 0.75) for color in ("blue", "orange", "green", "purple", "red", "muted")]
MOST_ACROSS = 4  # parts beside each other that have room for the word "device"


def sharding(
    reference: str = "llama3:8b",
    what: str = "decoder/body/block_0/ffn/up/kernel",
    rules: str = "default",
    language: str = "en",
    theme: str = "light",
    **mesh: int,
) -> go.Figure:
    """A parameter or an activation of any config on any mesh, drawn device by device.

    Args:
      what: a parameter's path, or one of `data.placement.ACTIVATIONS`; a wrong one is told all there are.
      rules: a preset of `transformer.sharding`.
      mesh: sizes of its axes (`settings.Mesh`); data=2, fsdp=2, tensor=2 by default.
    """
    look = Look(language, theme)
    found = data.place(reference, what, rules, **(mesh or dict(data=2, fsdp=2, tensor=2)))
    rows, columns = _axes(found)
    figure = go.Figure()
    x, y, hover = [], [], []
    parts = {}
    for part, devices in found.shares.items():
        span = (part[rows] if rows is not None else (0, 1)), part[columns]
        parts.setdefault(span, []).append(devices)
    across = len({span for _, span in parts})
    for number, (((top, bottom), (left, right)), groups) in enumerate(parts.items()):
        color = look.tint(*FILLS[number % len(FILLS)])
        outline = box(left, top, right - left, bottom - top, "", look.colors.paper, line_width=3, fillcolor=color)
        figure.add_shape(**outline)
        middle = dict(x=(left + right) / 2, y=(top + bottom) / 2)
        figure.add_annotation(
            text=_devices(groups, across > MOST_ACROSS, look),
            showarrow=False,
            font=dict(color=look.colors.ink),
            **middle,
        )
        x.append(middle["x"])
        y.append(middle["y"])
        hover.append(f"[{top:,}:{bottom:,}, {left:,}:{right:,}]")
    figure.add_scatter(
        x=x, y=y, mode="markers", marker=dict(opacity=0), text=hover, hovertemplate="%{text}<extra></extra>"
    )
    edge = found.shape[rows] if rows is not None else 1
    figure.update_xaxes(title_text=_name(found, columns), range=[0, found.shape[columns]], showgrid=False)
    figure.update_yaxes(
        title_text=_name(found, rows) if rows is not None else "", range=[edge, 0], showgrid=False,
        showticklabels=rows is not None,
    )  # fmt: skip
    return dressed(figure, look, f"{named(what, look)}<br><sup>{_told(found, reference, look)}</sup>", height=560)


def named(what: str, look: Look) -> str:
    """An array in words, where there are some, and its path."""
    key = "array " + re.sub(r"^decoder/body/block_\d+/", "", what)
    return f"{look(key)} · {what}" if look.says(key) else what


def _axes(found: data.Placement) -> tuple[int | None, int]:
    """The two dimensions that are drawn, in their order: those that are split, then the longest."""
    ranked = sorted(range(len(found.shape)), key=lambda i: (found.spec[i] is None, -found.shape[i]))
    drawn = sorted(ranked[:2])
    return (drawn[0], drawn[1]) if len(drawn) > 1 else (None, drawn[0])


def _devices(groups: list[tuple[int, ...]], narrow: bool, look: Look) -> str:
    """The devices of a part; one line for each part along the dimensions that are not drawn, one number if narrow."""
    if narrow:
        return "<br>".join(str(device) for devices in groups[:4] for device in devices[:MOST_LISTED])
    lines = []
    for devices in groups[:4]:
        rest = f" … ({len(devices)})" if len(devices) > MOST_LISTED else ""
        lines.append(look("device", numbers=", ".join(map(str, devices[:MOST_LISTED])) + rest))
    return "<br>".join([*lines, *["…"] * (len(groups) > 4)])


def _name(found: data.Placement, i: int) -> str:
    split = found.spec[i]
    ways = "" if split is None else f" ÷ {split if isinstance(split, str) else ' × '.join(split)}"
    return f"{found.names[i] or '—'} = {found.shape[i]:,}{ways}"


def _told(found: data.Placement, reference: str, look: Look) -> str:
    size, each = 2, 2
    for dim, (start, stop) in zip(found.shape, found.parts[0], strict=True):
        size, each = size * dim, each * (stop - start)
    mesh = " × ".join(f"{name} {n}" for name, n in found.mesh.items()) or "1"
    shape = " × ".join(f"{n:,}" for n in found.shape)
    block = re.match(r"\w+/body/(block_\d+)/", found.what)
    stacked = look("stacked", block=block[1], layers=found.shape[0]) if block else ""
    words = dict(
        stacked=stacked,
        model=reference,
        shape=shape,
        mesh=mesh,
        copies=found.copies,
        each=binary(each),
        size=binary(size),
    )
    return look("placed", **words)
