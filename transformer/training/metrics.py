"""Where metrics go: a live progress line, JSONL, boards."""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from transformer.checkpoints.workdir import Workdir
from transformer.settings import Train
from transformer.training.boards import Board, Histogram, Shown, TensorBoard, WeightsAndBiases

# Dense bfloat16 peak of one device, FLOP/s, from the vendors' pages.
PEAK_FLOPS = {
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v5p": 459e12,
    "TPU v6 lite": 918e12, "TPU v6e": 918e12, "TPU7x": 1153.5e12,
    "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12,
}  # fmt: skip


def peak_flops(dtype: str) -> float | None:
    """Peak FLOP/s of all devices together: published, or measured on a CPU; None where it isn't known."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return _measured_peak(dtype)
    one = PEAK_FLOPS.get(device.device_kind)
    return None if one is None else one * jax.device_count()


def _measured_peak(dtype: str, size: int = 1024, tries: int = 5) -> float:
    """Best FLOP/s of a square matmul. Virtual CPU devices share the cores, so this is the whole host's."""
    x = jnp.ones((size, size), dtype)
    multiply = jax.jit(jnp.matmul)
    multiply(x, x).block_until_ready()
    best = math.inf
    for _ in range(tries):
        start = time.perf_counter()
        multiply(x, x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def plain(values: Any) -> Any:
    """Metrics as plain data: numbers, and lists of them where there is one for each layer or expert."""
    return jax.tree.map(lambda x: x.tolist(), jax.device_get(values))


class Clock:
    """Time between records, without compiling and evaluation.

    Attributes:
      started: (step, time) of the last record; None before the first step was compiled.
    """

    def __init__(self):
        self.started: tuple[int, float] | None = None
        self._waited = 0.0

    def start(self, step: int) -> None:
        """Begins anew after this step."""
        self.started, self._waited = (step, time.perf_counter()), 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts this time as waited."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    def lap(self, step: int) -> tuple[int, float, float] | None:
        """(steps, seconds, those waited) since the start, which then is now; None before the first step compiled."""
        if self.started is None:
            return None
        (before, then), waited = self.started, self._waited
        self.start(step)
        return (step - before, self.started[1] - then, waited) if step > before else None


class MetricsLog:
    """Writes records of (step, values). A resumed run drops what was written after the step it resumes from."""

    def __init__(self, workdir: Path, first_step: int, finished: bool, boards: Sequence[Board] = ()):
        """`boards` are those beside TensorBoard."""
        self._file = workdir / "metrics.jsonl"
        self._keep_until(first_step, finished)
        self._jsonl = self._file.open("a", encoding="utf-8")
        self._boards = TensorBoard(workdir / "tensorboard", first_step + 1), *boards

    def _keep_until(self, step: int, finished: bool) -> None:
        """A killed run may have logged steps that it never saved, and half a line; a finished one evaluates again."""
        if not self._file.exists():
            return
        kept = []
        for line in self._file.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
                again = finished and (record["step"], record["kind"]) == (step, "eval")
                if record["step"] <= step and not again:
                    kept.append(line + "\n")
            except (json.JSONDecodeError, KeyError):
                continue
        partial = self._file.with_suffix(".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        os.replace(partial, self._file)

    def write(
        self, step: int, kind: str, values: dict[str, Any], histograms: dict[str, Histogram] | None = None
    ) -> None:
        """One record; `kind` is "train", "eval" or "norms". Histograms are for the boards alone."""
        self._jsonl.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
        self._jsonl.flush()
        scalars = {f"{kind}/{name}": x for name, x in values.items() if isinstance(x, int | float)}
        spread = {f"{kind}/{name}": x for name, x in values.items() if isinstance(x, list)}
        experts = values.get("experts", {})
        scalars |= {f"{kind}/experts/{name}": x for name, x in _worst(experts).items()}
        pictures = {f"{kind}/experts/{name}": _picture(layer["share"]) for name, layer in experts.items()}
        drawn = {tag: Histogram.of(x) for tag, x in spread.items()}
        drawn |= {f"numbers/{name}": x for name, x in (histograms or {}).items() if np.isfinite(x.edges).all()}
        self._show(step, Shown(scalars, drawn, pictures))

    def text(self, step: int, name: str, text: str) -> None:
        """A text, for the boards."""
        self._show(step, Shown(texts={name: text}))

    def _show(self, step: int, shown: Shown) -> None:
        for board in self._boards:
            board.show(step, shown)

    def close(self) -> None:
        """Flushes and closes all."""
        self._jsonl.close()
        for board in self._boards:
            board.close()


def open_log(workdir: Workdir, train: Train, step: int) -> MetricsLog:
    """The log of a run that goes on from `step`.

    Raises:
      SettingsError: Weights & Biases lets nobody in.
    """
    project, path = train.wandb_project, workdir.path
    boards = [WeightsAndBiases(project, path, workdir.read_config())] if project else []
    return MetricsLog(path, step, step == train.steps, boards)


def _worst(layers: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Of all layers of experts."""
    if not layers:
        return {}
    most = {name: max(float(np.max(layer[name])) for layer in layers.values()) for name in ("violation", "dropped")}
    return {**most, "entropy": min(float(np.min(layer["entropy"])) for layer in layers.values())}


def _picture(share: Sequence) -> np.ndarray:
    """A row a layer, a column an expert, mid-grey for an even share."""
    share = np.atleast_2d(share)
    return np.clip(share * share.shape[1] * 127, 0, 255).astype(np.uint8).repeat(8, axis=0).repeat(8, axis=1)


class ProgressLine:
    """Progress with an ETA: a live bar on a terminal, a plain line a record elsewhere."""

    def __init__(self, first_step: int, steps: int, quiet: bool):
        self._console = Console(quiet=quiet, highlight=False, soft_wrap=True)
        self._first, self._steps, self._start = first_step, steps, time.perf_counter()
        columns = (
            TextColumn("training"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("ETA"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
        )  # fmt: skip
        self._live = Progress(*columns, console=self._console, disable=quiet or not self._console.is_terminal)
        self._task = self._live.add_task("", total=steps, completed=first_step, note="")
        self._live.start()

    def step(self, step: int) -> None:
        """Moves the bar."""
        self._live.update(self._task, completed=step)

    def record(self, step: int, values: dict[str, Any]) -> None:
        """Shows the newest training metrics."""
        note = (
            f"loss {values['loss']:.4f}  {values['bits_per_byte']:.3f} bits/byte  "
            f"grad {values['grad_norm']:.2f}  lr {values['learning_rate']:.2e}"
        )
        if "tokens_per_second" in values:
            note += f"  {values['tokens_per_second']:,.0f} tokens/s"
        if "mfu" in values:
            note += f"  MFU {values['mfu']:.1%}"
        if values.get("data_wait", 0) >= 0.01:
            note += f"  data wait {values['data_wait']:.0%}"
        self._live.update(self._task, completed=step, note=note)
        if not self._console.is_terminal:
            elapsed = time.perf_counter() - self._start
            left = elapsed / max(step - self._first, 1) * (self._steps - step)
            self._console.print(f"step {step}/{self._steps}  {note}  ETA {left:.0f} s")

    def say(self, text: str) -> None:
        """Prints above the bar."""
        self._console.print(text, markup=False)

    def close(self) -> None:
        """Ends the bar."""
        self._live.stop()
