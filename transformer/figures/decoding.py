"""Why generation needs a key/value cache."""

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from transformer.figures.data import decoding as data
from transformer.figures.look import Look, dressed, stepped
from transformer.figures.sizes import binary

WAYS = ("without", "with")


def decoding_work(steps: int = 16, language: str = "en", theme: str = "light") -> go.Figure:
    """Keys, values and scores of each step of generation, with and without a cache; the slider generates."""
    look = Look(language, theme)
    runs = data.work(steps)
    figures = {str(t): _until(runs, t, look) for t in range(1, steps + 1)}
    return stepped(figures, look("tokens so far"), look, steps - 1)


def _until(runs: dict[str, data.Work], t: int, look: Look) -> go.Figure:
    c, steps = look.colors, len(runs["with"].keys)
    titles = [look("this step"), look("all steps")]
    figure = make_subplots(1, 2, subplot_titles=titles, column_widths=[0.42, 0.58], horizontal_spacing=0.1)
    shades = {"without": c.orange, "with": c.blue}
    names = [look("keys"), look("values"), look("visible scores")]
    for way in WAYS:
        run, color = runs[way], shades[way]
        counts = [int(run.keys[t - 1]), int(run.keys[t - 1]), int(run.scores[t - 1])]
        figure.add_bar(
            x=names, y=counts, name=look(f"{way} a cache"), marker_color=color, text=[str(n) for n in counts],
            textposition="outside", cliponaxis=False, row=1, col=1,
        )  # fmt: skip
        done = [int(total) if step < t else None for step, total in enumerate(run.total)]
        figure.add_bar(
            x=list(range(1, steps + 1)), y=done, name=way, marker_color=color, showlegend=False,
            text=[f"{n:,}" if step == t - 1 else "" for step, n in enumerate(run.total)], textposition="outside",
            cliponaxis=False, constraintext="none", textangle=0, textfont_size=12, row=1, col=2,
        )  # fmt: skip
    counted = dict(title_text=look("vectors and scores"))
    figure.update_yaxes(range=[0, runs["without"].scores[-1] * 1.15], row=1, col=1, **counted)
    figure.update_yaxes(range=[0, runs["without"].total[-1] * 1.15], row=1, col=2, **counted)
    figure.update_xaxes(title_text=look("tokens so far"), row=1, col=2)
    told = look("work formula")
    figure = dressed(figure, look, f"{look('decoding')}<br><sup>{told}</sup>", height=480)
    return figure.update_layout(legend=dict(orientation="h", x=0.7, y=1.22))


def decoding_flops(
    reference: str = "llama3:tiny",
    lengths: tuple[int, ...] = (1, 8, 16, 32, 64),
    language: str = "en",
    theme: str = "light",
) -> go.Figure:
    """FLOPs of the compiled programs of one step of a real model, with and without a cache."""
    look = Look(language, theme)
    counted = data.compiled(reference, lengths)
    figure = go.Figure()
    for way, color in zip(WAYS, (look.colors.orange, look.colors.blue), strict=True):
        figure.add_scatter(
            x=lengths, y=counted.flops[way], mode="lines+markers", name=look(f"{way} a cache"),
            line=dict(color=color, width=2.5), marker=dict(size=9),
        )  # fmt: skip
    figure.update_xaxes(title_text=look("tokens so far"))
    figure.update_yaxes(title_text=look("FLOPs of a step"), type="log", exponentformat="power", dtick=1)
    ratio = counted.flops["without"][-1] / counted.flops["with"][-1]
    told = look("flops ratio", ratio=ratio, length=lengths[-1])
    return dressed(figure, look, f"{look('decoding flops', model=reference)}<br><sup>{told}</sup>", height=460)


def decoding_limits(
    reference: str = "llama3:8b", chip: str = "v5p", language: str = "en", theme: str = "light"
) -> go.Figure:
    """How long a step's products and how long its bytes take, over the texts decoded together; the slider makes the
    texts longer."""
    look = Look(language, theme)
    lengths = tuple(1024 << power for power in range(6))
    figures = {f"{n:,}": _limits(data.limits(reference, n, chip=chip), reference, n, chip, look) for n in lengths}
    return stepped(figures, look("tokens so far"), look, 3)


def _limits(found: data.Limits, reference: str, length: int, chip: str, look: Look) -> go.Figure:
    names, figure = [str(n) for n in found.rows], go.Figure()
    for told, seconds, color in (("bytes take", found.memory, "green"), ("products take", found.compute, "blue")):
        figure.add_bar(
            x=names, y=[s * 1e3 for s in seconds], name=look(told), marker_color=getattr(look.colors, color),
            text=[f"{s * 1e3:.2g}" if s < 0.0995 else f"{s * 1e3:,.0f}" for s in seconds],
            textangle=0, textfont_size=10, constraintext="none", textposition="outside", cliponaxis=False,
        )  # fmt: skip
    figure.update_xaxes(title_text=look("texts together"), type="category")
    figure.update_yaxes(title_text="ms", type="log", range=[-2, 3])
    beyond = f"; {look('beyond', context=found.context)}" if length > found.context else ""
    rates = dict(peak=found.peak / 1e12, bandwidth=found.bandwidth / 1e9, beyond=beyond)
    one = dict(rates, flops=found.flops[0] / 1e9, bytes=binary(found.weights[0] + found.cache[0]))
    note = look("limits note", model=reference, chip=chip, weights=binary(found.weights[0]), **one)
    title = f"{look('decoding limits', length=length)}<br><sup>{note}</sup>"
    return dressed(figure, look, title, height=480)
