"""FlashAttention: tiles visited and skipped, the online softmax, and bytes moved."""

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from transformer import spec
from transformer.figures.data import tiles as data
from transformer.figures.look import Look, box, dressed, stepped
from transformer.figures.sizes import binary

CAUSAL = spec.Mask(causal=True)
# Ways to compute attention, as `data.tiles.Traffic` has them.
WAYS = {"standard": "muted", "unskipped": "purple", "tiled": "blue"}


def attention_tiles(
    mask: spec.Mask = CAUSAL,
    length: int = 64,
    q_block: int = 8,
    k_block: int = 8,
    segments: list[int] | None = None,
    language: str = "en",
    theme: str = "light",
) -> go.Figure:
    """The tiles of a mask: numbered in the order in which the splash kernels visit them; the others are skipped.

    Args:
      segments: ids of packed documents, one a token.
    """
    look = Look(language, theme)
    c, cut = look.colors, data.tiles(mask, length, q_block, k_block, segments)
    figure = go.Figure()
    figure.add_heatmap(
        z=cut.visible.astype(int), zmin=0, zmax=1, colorscale=[[0, c.faint], [1, look.tint("blue", 0.75)]],
        showscale=False, hovertemplate="query %{y}, key %{x}<extra></extra>",
    )  # fmt: skip
    for (i, j), step in np.ndenumerate(cut.order):
        x, y, seen = j * k_block - 0.5, i * q_block - 0.5, step != data.SKIPPED
        fill = "rgba(0,0,0,0)" if seen else c.line
        figure.add_shape(**box(x, y, k_block, q_block, "", c.paper, line_width=2, fillcolor=fill))
        text, color = (str(step + 1), c.ink) if seen else ("×", c.muted)
        if cut.order.size <= 400:
            figure.add_annotation(
                x=x + k_block / 2, y=y + q_block / 2, text=text, showarrow=False, font=dict(color=color, size=12),
                bgcolor=fill if not seen else c.paper, opacity=0.8, borderpad=1,
            )  # fmt: skip
    figure.update_xaxes(title_text=look("key"), showgrid=False, zeroline=False, constrain="domain")
    figure.update_yaxes(
        title_text=look("query"),
        autorange="reversed",
        showgrid=False,
        zeroline=False,
        scaleanchor="x",
        constrain="domain",
    )
    count = dict(visited=cut.visited, tiles=cut.order.size, share=cut.visited / cut.order.size)
    told = look("tiles visited", **count, partial=int(np.sum((cut.order != data.SKIPPED) & ~cut.whole)))
    return dressed(figure, look, f"{look('tiles')}<br><sup>{told}</sup>", height=680)


def online_softmax(
    row: int = -1,
    length: int = 16,
    block: int = 4,
    mask: spec.Mask = CAUSAL,
    seed: int = 29,
    language: str = "en",
    theme: str = "light",
) -> go.Figure:
    """The softmax of one query tile by tile: what is kept is a maximum, a sum and an output, never the whole row."""
    look = Look(language, theme)
    q, k, v = np.random.default_rng(seed).standard_normal((3, length, 4))
    row = range(length)[row]
    run = data.online(mask, q, k, v, 0.5, row, block)
    figures = {str(step + 1): _state(run, step, length, block, look) for step in range(len(run.blocks))}
    return stepped(figures, look("tile"), look)


def _state(run: data.Online, step: int, length: int, block: int, look: Look) -> go.Figure:
    c, high = look.colors, np.abs(run.scores[np.isfinite(run.scores)]).max() * 1.15
    titles = [look("scores of the row"), look("output so far")]
    figure = make_subplots(1, 2, subplot_titles=titles, column_widths=[0.64, 0.36], horizontal_spacing=0.1)
    x = np.concatenate([np.arange(i * block, (i + 1) * block) for i in run.blocks])
    met = np.repeat(np.arange(len(run.blocks)), block)
    scores = run.scores.reshape(-1)
    color = np.where(met == step, c.blue, np.where(met < step, look.tint("blue", 0.45), look.faded))
    figure.add_bar(
        x=x, y=np.where(np.isfinite(scores), scores, np.nan), marker_color=color, showlegend=False,
        hovertemplate="key %{x}: %{y:.3f}<extra></extra>", row=1, col=1,
    )  # fmt: skip
    figure.add_hline(y=run.top[step], line=dict(color=c.red, dash="dash"), row=1, col=1)
    figure.add_shape(**box(run.blocks[step] * block - 0.5, -high, block, 2 * high, "", c.ink, line_width=1.5))
    figure.update_xaxes(title_text=look("key"), range=[-0.5, length - 0.5], dtick=block, row=1, col=1)
    figure.update_yaxes(title_text=look("score"), range=[-high, high], zeroline=True, row=1, col=1)
    ordinary, now = run.ordinary, run.output[step]
    for name, values, shade in ((look("so far"), now, c.green), (look("in the end"), ordinary, look.faded)):
        figure.add_bar(x=[f"o{i}" for i in range(len(now))], y=values, name=name, marker_color=shade, row=1, col=2)
    edge = np.abs(run.output).max() * 1.15
    figure.update_yaxes(range=[-edge, edge], row=1, col=2)
    faded = look("faded", fade=run.fade[step]) if step else look("first tile")
    state = dict(top=run.top[step], total=run.total[step], error=run.error[step])
    told = look("online state", faded=faded, **state)
    figure = dressed(figure, look, f"{look('online softmax')}<br><sup>{told}</sup>", height=480)
    return figure.update_layout(legend=dict(orientation="h", x=0.68, y=1.26))


def memory_traffic(
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384),
    head_dim: int = 128,
    block: int = 512,
    mask: spec.Mask = CAUSAL,
    language: str = "en",
    theme: str = "light",
) -> go.Figure:
    """Bytes that a head moves, with whole score matrices and with tiles, counted from the list of visits."""
    look = Look(language, theme)
    runs = {n: data.traffic(mask, n, head_dim, min(block, n)) for n in lengths}
    last = lengths[-1]
    titles = [look("traffic over"), look("traffic parts", length=last)]
    figure = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.12)
    for way, color in WAYS.items():
        moved = [sum(getattr(runs[n], way).values()) for n in lengths]
        figure.add_scatter(
            x=lengths, y=[b / 2**20 for b in moved], mode="lines+markers", name=look(way), marker=dict(size=8),
            line=dict(color=getattr(look.colors, color), width=2.5), text=[binary(b) for b in moved],
            hovertemplate="%{x:,}: %{text}", row=1, col=1,
        )  # fmt: skip
    figure.update_xaxes(
        type="log", title_text=look("tokens"), tickvals=lengths, ticktext=[f"{n:,}" for n in lengths], row=1, col=1
    )
    figure.update_yaxes(type="log", title_text="MiB", dtick=1, row=1, col=1)
    _arrays(figure, runs[last], look)
    total = {way: sum(getattr(runs[last], way).values()) for way in WAYS}
    flops = {way: count / 1e9 for way, count in runs[last].flops.items()}
    ratios = dict(like=total["standard"] / total["unskipped"], ratio=total["standard"] / total["tiled"])
    said = dict(ratios, flops=flops["unskipped"], skipped=flops["tiled"], length=last, dim=head_dim, block=block)
    title = f"{look('traffic')}<br><sup>{look('traffic ratio', **said)}</sup>"
    return dressed(figure, look, title, height=500, barmode="stack")


def _arrays(figure: go.Figure, run: data.Traffic, look: Look) -> None:
    """Of which arrays the bytes are, at one length."""
    colors = {"q, k, v": look.colors.blue, "S": look.colors.orange, "P": look.colors.red, "o": look.colors.green}
    x, place = [look(way).replace(", ", ",<br>") for way in WAYS], dict(row=1, col=2)
    for part, color in colors.items():
        moved = [getattr(run, way)[part] for way in WAYS]
        figure.add_bar(
            x=x, y=[b / 2**20 for b in moved], name=look("scores whole", name=part) if part in "SP" else part,
            marker_color=color, text=[binary(b) for b in moved], hovertemplate="%{text}", textposition="none", **place,
        )  # fmt: skip
    totals = [sum(getattr(run, way).values()) for way in WAYS]
    figure.add_scatter(
        x=x, y=[b / 2**20 for b in totals], mode="text", text=[binary(b) for b in totals], textposition="top center",
        textfont_size=12, showlegend=False, hoverinfo="skip", cliponaxis=False, **place,
    )  # fmt: skip
    figure.update_yaxes(title_text="MiB", range=[0, max(totals) / 2**20 * 1.15], showgrid=False, **place)
    figure.update_xaxes(showgrid=False, **place)
