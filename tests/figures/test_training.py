"""Curves of a run in progress."""

import time

import pytest

pytest.importorskip("plotly")

from transformer.figures import training as figures
from transformer.figures.data import training
from transformer.training.metrics import MetricsLog


def test_curves_are_what_the_run_has_reported(tmp_path):
    assert training.curves(tmp_path) == training.Curves((), (), (), ())
    log = MetricsLog(tmp_path, 0, False)
    log.write(1, "train", {"loss": 3.5})
    log.write(2, "train", {"loss": 3.25})
    log.write(2, "eval", {"loss": 3.375})
    with (tmp_path / training.FILE).open("a") as file:
        file.write('{"step": 3, "kin')  # a line that is being written
    assert training.curves(tmp_path) == training.Curves((1, 2), (3.5, 3.25), (2,), (3.375,))
    log.close()
    drawn = figures.training_curves(tmp_path)
    assert [trace.y for trace in drawn.data] == [(3.5, 3.25), (3.375,)]


def test_live_curves_are_drawn_while_the_body_runs_and_once_more_at_its_end(tmp_path, monkeypatch):
    display = pytest.importorskip("IPython.display")
    drawn = []

    class Handle:
        def update(self, figure):
            drawn.append(figure.data[0].x)

    monkeypatch.setattr(display, "display", lambda figure, display_id: Handle())
    log = MetricsLog(tmp_path, 0, False)
    with figures.live_curves(tmp_path, every=0.01):
        log.write(1, "train", {"loss": 2.0})
        deadline = time.monotonic() + 20
        while (1,) not in drawn and time.monotonic() < deadline:
            time.sleep(0.01)
        log.write(2, "train", {"loss": 1.0})
    log.close()
    assert (1,) in drawn and drawn[-1] == (1, 2)
    count = len(drawn)
    time.sleep(0.05)
    assert len(drawn) == count, "nothing is drawn after the body"
