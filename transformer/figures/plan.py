"""A plan's numbers: what a device of a mesh holds, and what it sends in a step."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from transformer.figures.data import plan as data
from transformer.figures.look import Look, dressed
from transformer.figures.sizes import binary, gib

# Eight devices three ways, and more of them.
MESHES = (dict(data=8), dict(fsdp=8), dict(fsdp=4, tensor=2), dict(fsdp=16, tensor=2), dict(fsdp=64))
HBM = {chip: data.HBM[chip] for chip in ("v5e", "v6e", "v5p")}
HELD_COLORS = dict(zip(data.PARTS, ("green", "blue", "orange", "red", "purple", "muted"), strict=True))
PURPOSE_COLORS = {"parameters": "green", "gradients": "orange", "activations": "blue", "tokens": "purple"}


def hbm_plan(
    reference: str = "llama3:8b",
    meshes: Sequence[Mapping[str, int]] = MESHES,
    rows: int = 64,
    length: int = 4096,
    remat: str = "full",
    language: str = "en",
    theme: str = "light",
) -> go.Figure:
    """What one device of each mesh holds, in training and in decoding, beside what chips have.

    Args:
      rows, length: of a training step, and of the texts that are decoded at once; on all devices.
      remat: what the backward pass computes again (`settings.Compute`).
    """
    look = Look(language, theme)
    plans = {
        "in training": [data.training(reference, rows, length, remat, **mesh) for mesh in meshes],
        "in decoding": [data.decoding(reference, rows, length, **mesh) for mesh in meshes],
    }
    figure = make_subplots(1, 2, subplot_titles=[look(way) for way in plans], horizontal_spacing=0.12)
    names = [_mesh(mesh, "<br>× ") for mesh in meshes]
    # Bars that no chip has room for are cut: else one mesh, of which all is copies, would make the others slivers.
    top = min(max(sum(one.values()) for plan in plans.values() for one in plan) / 2**30, max(HBM.values())) * 1.25
    for column, plan in enumerate(plans.values(), 1):
        place = dict(row=1, col=column)
        for part in data.PARTS:
            held = [one[part] for one in plan]
            figure.add_bar(
                x=names, y=[n / 2**30 for n in held], name=look(f"held {part}"), showlegend=column == 1,
                marker_color=getattr(look.colors, HELD_COLORS[part]), text=[gib(n) for n in held],
                textposition="none", hovertemplate="%{text}", **place,
            )  # fmt: skip
        _chips(figure, len(names), top, place, look)
        for name, one in zip(names, plan, strict=True):
            total = sum(one.values())
            text, y = (gib(total), total / 2**30) if total / 2**30 <= top else (f"{gib(total)} ↑", top)
            figure.add_annotation(
                x=name, y=y, text=text.replace(" ", "<br>", 1), showarrow=False, bgcolor=look.colors.paper,
                yanchor="bottom", borderpad=1, font=dict(size=10, color=look.colors.ink), **place,
            )  # fmt: skip
        figure.update_xaxes(range=[-0.5, len(names) + 0.4], showgrid=False, **place)
        figure.update_yaxes(title_text=look("GiB of a device"), range=[0, top * 1.12], showgrid=False, **place)
    note = dict(rows=rows, length=length, remat=remat, bytes=data.PARAMETER_BYTES, count=data.count(reference) / 1e9)
    title = f"{look('hbm plan', model=reference)}<br><sup>{look('hbm note', **note)}</sup>"
    return dressed(figure, look, title, height=520, barmode="stack")


def _chips(figure: go.Figure, count: int, top: float, place: dict, look: Look) -> None:
    """What a device of each chip has, written beside the bars; of `count` bars on an axis to `top`."""
    muted = look.colors.muted
    for chip, size in HBM.items():
        if size > top:
            continue
        figure.add_hline(y=size, line=dict(color=muted, dash="dot", width=1), **place)
        figure.add_annotation(
            x=count + 0.4, y=size, text=f"{chip} {size:.0f}", showarrow=False, xanchor="right", yanchor="bottom",
            font=dict(color=muted, size=11), **place,
        )  # fmt: skip


def step_traffic(
    reference: str = "llama3:tiny",
    rows: int = 16,
    length: int = 64,
    language: str = "en",
    theme: str = "light",
    **mesh: int,
) -> go.Figure:
    """What the compiled step of a small model sends, by mesh axis, and beside it what shapes say that it must.

    Needs as many host devices as the mesh has: `jax.config.update("jax_num_cpu_devices", 8)` before JAX is used.

    Args:
      mesh: sizes of its axes; data=2, fsdp=2, tensor=2 by default.
    """
    look, mesh = Look(language, theme), mesh or dict(data=2, fsdp=2, tensor=2)
    found = data.compiled(reference, rows, length, **mesh)
    titles = [look("sent along"), look("sent for")]
    figure = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.12)
    totals = {axes: sum(n for (a, _), n in found.by_axis.items() if a == axes) for axes, _ in found.by_axis}
    order = sorted(totals, key=totals.get, reverse=True)
    for kind in sorted({kind for _, kind in found.by_axis}):
        sent = [found.by_axis.get((axes, kind), 0) for axes in order]
        figure.add_bar(
            x=order, y=[n / 1024 for n in sent], name=kind, text=[binary(n) for n in sent], textposition="none",
            hovertemplate="%{text}", row=1, col=1,
        )  # fmt: skip
    figure.add_scatter(
        x=order, y=[totals[axes] / 1024 for axes in order], mode="text", text=[binary(totals[a]) for a in order],
        textposition="top center", textfont_size=10, showlegend=False, hoverinfo="skip", cliponaxis=False, row=1, col=1,
    )  # fmt: skip
    purposes = [look(f"sent {purpose}").replace(" ", "<br>") for purpose in found.expected]
    for told, sent in (("by shapes", found.expected), ("as compiled", found.compiled)):
        color = look.faded if told == "by shapes" else look.colors.purple
        figure.add_bar(
            x=purposes, y=[n / 1024 for n in sent.values()], name=look(told), marker_color=color, offsetgroup=told,
            text=[binary(n) for n in sent.values()], textposition="outside", textfont_size=10, constraintext="none",
            cliponaxis=False, row=1, col=2,
        )  # fmt: skip
    figure.update_yaxes(title_text="KiB", showgrid=False)
    # The bars of the right panel stand beside each other, those of the left one on each other.
    figure.update_traces(offsetgroup="axes", selector=lambda trace: trace.type == "bar" and not trace.offsetgroup)
    note = f"{look('traffic of', model=reference, mesh=_mesh(mesh), rows=rows, length=length)}; {look('tokens note')}"
    return dressed(figure, look, f"{look('step traffic')}<br><sup>{note}</sup>", height=480, barmode="relative")


def mesh_traffic(
    reference: str = "llama3:8b",
    devices: int = 64,
    rows: int = 64,
    length: int = 4096,
    language: str = "en",
    theme: str = "light",
) -> go.Figure:
    """What a device must send in a step of a published model, as more of the mesh is its tensor axis."""
    look = Look(language, theme)
    meshes = [dict(fsdp=devices // ways, tensor=ways) for ways in (1, 2, 4, 8)]
    sent = [data.sent(reference, rows, length, **mesh) for mesh in meshes]
    figure, names = go.Figure(), [_mesh(mesh, "<br>× ") for mesh in meshes]
    for purpose, color in PURPOSE_COLORS.items():
        figure.add_bar(
            x=names, y=[one[purpose] / 2**30 for one in sent], name=look(f"sent {purpose}"),
            marker_color=getattr(look.colors, color), text=[binary(one[purpose]) for one in sent],
            textposition="none", hovertemplate="%{text}",
        )  # fmt: skip
    totals = [sum(one.values()) for one in sent]
    figure.add_scatter(
        x=names, y=[n / 2**30 for n in totals], mode="text", text=[binary(n) for n in totals],
        textposition="top center", textfont_size=10, showlegend=False, hoverinfo="skip", cliponaxis=False,
    )  # fmt: skip
    figure.update_yaxes(title_text="GiB", showgrid=False)
    note = look("mesh traffic note", model=reference, devices=devices, rows=rows, length=length)
    note = f"{note}; {look('tokens note')}"
    return dressed(figure, look, f"{look('mesh traffic')}<br><sup>{note}</sup>", height=460, barmode="stack")


def _mesh(mesh: Mapping[str, int], between: str = " × ") -> str:
    return between.join(f"{name} {size}" for name, size in mesh.items() if size > 1)
