"""What caches cost: MHA, GQA, MQA and MLA, and published models."""

import dataclasses

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from transformer import spec
from transformer.figures.data import caches as data
from transformer.figures.data import published
from transformer.figures.data.families import windows
from transformer.figures.look import Look, dressed, stepped
from transformer.figures.sizes import binary

LENGTHS = tuple(1024 << power for power in range(8))
SCHEME_COLORS = {"MHA": "blue", "GQA": "green", "MQA": "orange", "MLA": "purple"}


def cache_sizes(
    preset: str | None = None,
    *,
    length: int = 32768,
    dtype: str = "bfloat16",
    language: str = "en",
    theme: str = "light",
    **shape: int,
) -> go.Figure:
    """The cache of MHA, GQA, MQA and MLA with all else equal; the slider sets the length of the text.

    Args:
      preset: a published model whose layers and heads to start from: "llama3:8b".
      length: tokens at first, a power of two from 1,024 to 131,072.
      dtype: "float32", "bfloat16" or "int8" (with a float32 scale a token and head).
      shape: fields of `data.caches.Shape` to set: layers, heads, groups, head_dim, latent, rope_dim.

    Raises:
      ValueError: another length.
    """
    look = Look(language, theme)
    if length not in LENGTHS:
        raise ValueError(f"length={length}: use one of {', '.join(map(str, LENGTHS))}")
    turned = dataclasses.replace(data.Shape.of(preset) if preset else data.Shape(), **shape)
    model = published.model(preset) if preset else None
    own = _kind(model.decoder.layers[-1].mixer) if model and not shape else None
    told = [look("cache shape", dtype=dtype, **dataclasses.asdict(turned))]
    told += [look("windows ignored")] if model and any(b.mixer.mask.window for b in model.decoder.layers) else []
    sizes = {n: data.schemes(turned, n, dtype) for n in LENGTHS}
    figures = {f"{n:,}": _schemes(sizes, n, own, model.max_length if model else None, told, look) for n in LENGTHS}
    return stepped(figures, look("tokens"), look, LENGTHS.index(length))


def _schemes(
    sizes: dict[int, tuple], length: int, own: str | None, context: int | None, told: list[str], look: Look
) -> go.Figure:
    """One length; `own` is what the model of this shape uses, on `context` tokens at most."""
    titles = [look("cache of a text", length=length), look("cache over length")]
    titles[1] += look("dashed context") if context else ""
    figure = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.12, column_widths=[0.55, 0.45])
    now = sizes[length]
    colors = [getattr(look.colors, SCHEME_COLORS[s.name]) for s in now]
    per_layer = [s.numbers // s.layers for s in now]
    uses = [look("as published" if s.name == own else "what if") for s in now]
    figure.add_bar(
        x=[f"{s.name}<br>{n:,}<br>{use}" for s, n, use in zip(now, per_layer, uses, strict=True)],
        y=[s.bytes / 2**30 for s in now],
        marker=dict(color=colors, pattern_shape=["" if s.name == own else "/" for s in now]),
        text=[f"<b>{binary(s.bytes)}</b><br>{s.bytes / now[0].bytes:.1%}" for s in now],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
        row=1,
        col=1,
    )
    figure.update_yaxes(title_text="GiB", range=[0, now[0].bytes / 2**30 * 1.2], row=1, col=1)
    figure.update_xaxes(title=dict(text=look("numbers a token and layer"), standoff=14), row=1, col=1)
    for i, scheme in enumerate(now):
        along = [sizes[n][i].bytes for n in sizes]
        figure.add_scatter(
            x=list(sizes), y=[b / 2**30 for b in along], name=scheme.name, mode="lines+markers",
            line=dict(color=colors[i], width=2.5), text=[binary(b) for b in along],
            hovertemplate="%{x:,}: %{text}", row=1, col=2,
        )  # fmt: skip
    ticks = dict(tickvals=list(sizes), ticktext=[f"{n // 1024}K" for n in sizes])
    figure.update_xaxes(type="log", title_text=look("tokens"), **ticks, row=1, col=2)
    figure.update_yaxes(type="log", title_text="GiB", row=1, col=2, dtick=1)
    figure.add_vline(x=length, line=dict(color=look.colors.muted, dash="dot"), row=1, col=2)
    if context:
        figure.add_vline(x=context, line=dict(color=look.colors.red, dash="dash", width=1.5), row=1, col=2)
    beyond = [f"<b>{look('beyond', context=context)}</b>"] if context and length > context else []
    title = f"{look('cache sizes')}<br><sup>{' · '.join([*told, *beyond])}</sup>"
    return dressed(figure, look, title, height=500)


def published_caches(
    references: tuple[str, ...] = published.LESSON,
    *,
    length: int = 32768,
    dtype: str = "bfloat16",
    language: str = "en",
    theme: str = "light",
) -> go.Figure:
    """What published decoders keep of a text of `length` tokens, or as long as their context; windows counted."""
    look = Look(language, theme)
    models = {name: model for name in references if (model := published.model(name)).decoder is not None}
    sizes = [data.size(name, model, length, dtype) for name, model in models.items()][::-1]
    kinds = {name: _kind(model.decoder.layers[-1].mixer) for name, model in models.items()}
    figure = go.Figure()
    figure.add_bar(
        x=[s.bytes / 2**30 for s in sizes],
        y=[f"{s.name}  " for s in sizes],
        orientation="h",
        marker_color=[getattr(look.colors, SCHEME_COLORS[kinds[s.name]]) for s in sizes],
        text=[_row(s, models[s.name], length, look) for s in sizes],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{text}<extra></extra>",
    )
    figure.update_xaxes(title_text="GiB", range=[0, max(s.bytes for s in sizes) / 2**30 * 1.6])
    title = f"{look('published caches', length=length, dtype=dtype)}<br><sup>{look('published note')}</sup>"
    return dressed(figure, look, title, height=140 + 42 * len(sizes))


def _row(size: data.CacheSize, model: spec.Model, length: int, look: Look) -> str:
    """What is said beside a bar: bytes, kind of attention, windows, and a context that is shorter than the text."""
    told = [binary(size.bytes), _kind(model.decoder.layers[-1].mixer)]
    told += [look(key, **values) for key, values in windows([b.mixer.mask.window for b in model.decoder.layers])]
    return " · ".join(told + ([look("short text", length=size.length)] if size.length < length else []))


def _kind(mixer) -> str:
    kv_heads = getattr(mixer, "num_kv_heads", None)
    if kv_heads is None:
        return "MLA"
    return "MHA" if kv_heads == mixer.num_heads else "MQA" if kv_heads == 1 else "GQA"
