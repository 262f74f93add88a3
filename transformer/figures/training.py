"""A training run as it goes."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import plotly.graph_objects as go

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
