"""A training run as it goes."""

import contextlib
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from transformer.figures.data import training as data
from transformer.figures.look import Look, dressed


def training_curves(workdir: str | Path, language: str = "en", theme: str = "light") -> go.Figure:
    """Losses that a run has reported in its workdir so far."""
    look, found = Look(language, theme), data.curves(workdir)
    figure = go.Figure()
    for told, steps, losses, color, mode in (
        ("on batches", found.train_steps, found.train, look.colors.muted, "lines"),
        ("held out", found.held_out_steps, found.held_out, look.colors.blue, "lines+markers"),
    ):
        figure.add_scatter(x=steps, y=losses, mode=mode, name=look(told), line=dict(color=color, width=2))
    figure.update_xaxes(title_text=look("step"))
    figure.update_yaxes(title_text=look("nats a token"))
    return dressed(figure, look, look("training curves"), height=380)


# What a run tells of its steps, in the order of the panels: of which records, by what name, on which axis.
PANELS = (
    ("bits a byte", (("train", "bits_per_byte"), ("eval", "bits_per_byte")), "linear"),
    ("learning rate", (("train", "learning_rate"),), "linear"),
    ("gradient norm", (("train", "grad_norm"),), "log"),
    ("tokens a second", (("train", "tokens_per_second"),), "linear"),
    ("waiting for data", (("train", "data_wait"),), "linear"),
    ("model flops", (("train", "mfu"),), "linear"),
    ("steps skipped", (("train", "skipped"),), "linear"),
    ("pairs exact", (("eval", "exact_match"),), "linear"),
)


def run_panels(workdir: str | Path, language: str = "en", theme: str = "light") -> go.Figure:
    """What a run has told of its steps beside the loss, a panel each."""
    look, records = Look(language, theme), data.read(workdir)
    panels = [(name, [data.series(records, *source) for source in sources], axis) for name, sources, axis in PANELS]
    for name, worst in (("violation", max), ("dropped", max), ("entropy", min)):
        panels.append((f"experts {name}", [data.experts(records, name, worst)], "linear"))
    # The first one is there before anything is told.
    panels = panels[:1] + [panel for panel in panels[1:] if any(steps for steps, _ in panel[1])]
    rows = -(-len(panels) // 2)
    figure = make_subplots(rows, 2, subplot_titles=[look(name) for name, *_ in panels], vertical_spacing=0.3 / rows)
    for i, (_, found, axis) in enumerate(panels):
        where = dict(row=i // 2 + 1, col=i % 2 + 1)
        for (steps, values), color in zip(found, (look.colors.muted, look.colors.blue), strict=False):
            figure.add_scatter(
                x=steps, y=values, mode="lines", line=dict(color=color, width=2), showlegend=False, **where
            )
        figure.update_yaxes(type=axis, **where)
    return dressed(figure, look, look("run panels"), height=120 + 230 * rows)


def run_layers(workdir: str | Path, what: str, language: str = "en", theme: str = "light") -> go.Figure:
    """How large what `train.norms_every` records is, layer by layer (down) and step by step: what, as `data.layers`."""
    look = Look(language, theme)
    steps, names, norms = data.layers(data.read(workdir), what)
    logs = [[math.log10(x) if x > 0 else None for x in line] for line in norms]
    hover = "%{y}<br>%{x}: 10^%{z:.2f}<extra></extra>"
    figure = go.Figure(go.Heatmap(x=steps, y=names, z=logs, colorscale=look.scale("blue"), hovertemplate=hover))
    figure.update_traces(colorbar=dict(title=look("log10")))
    figure.update_xaxes(title_text=look("step"), type="category")
    figure.update_yaxes(autorange="reversed")
    return dressed(figure, look, look(f"run {what}"), height=180 + 16 * len(names))


@contextlib.contextmanager
def live_curves(workdir: str | Path, every: float = 2.0, language: str = "en", theme: str = "light") -> Iterator[None]:
    """In a notebook: shows `training_curves` and draws them anew every so many seconds, while its body trains."""
    from IPython.display import display  # of the kernel, which only notebooks need

    def draw() -> go.Figure:
        return training_curves(workdir, language, theme)

    shown, over = display(draw(), display_id=True), threading.Event()

    def follow() -> None:
        while not over.wait(every):
            shown.update(draw())

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        over.set()
        follower.join()
        shown.update(draw())
