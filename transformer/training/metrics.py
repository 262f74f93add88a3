"""Where metrics go: a live progress line, JSONL, TensorBoard."""

import contextlib
import json
import math
import os
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

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


def png(pixels: np.ndarray) -> bytes:
    """A grey picture uint8 [height, width] as PNG (ISO/IEC 15948)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


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

    def __init__(self, workdir: Path, first_step: int, finished: bool):
        self._file = workdir / "metrics.jsonl"
        self._keep_until(first_step, finished)
        self._jsonl = self._file.open("a", encoding="utf-8")
        self._board = _Board(workdir / "tensorboard", first_step + 1)

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

    def write(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """One record; `kind` is "train", "eval" or "norms"."""
        self._jsonl.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
        self._jsonl.flush()
        for name, value in values.items():
            if isinstance(value, int | float):
                self._board.add(step, f"{kind}/{name}", simple_value=value)
            elif isinstance(value, list):
                self._board.add_histogram(step, f"{kind}/{name}", value)
        if "experts" in values:
            self._experts(step, kind, values["experts"])
        self._board.flush()

    def _experts(self, step: int, kind: str, layers: dict[str, dict[str, Any]]) -> None:
        """The worst layer's numbers, and a picture: a row a layer, a column an expert, mid-grey for an even share."""
        for name in ("violation", "dropped"):
            worst = max(np.max(layer[name]) for layer in layers.values())
            self._board.add(step, f"{kind}/experts/{name}", simple_value=worst)
        lowest = min(np.min(layer["entropy"]) for layer in layers.values())
        self._board.add(step, f"{kind}/experts/entropy", simple_value=lowest)
        for name, layer in layers.items():
            share = np.atleast_2d(layer["share"])
            pixels = np.clip(share * share.shape[1] * 127, 0, 255).astype(np.uint8).repeat(8, axis=0).repeat(8, axis=1)
            image = dict(height=pixels.shape[0], width=pixels.shape[1], colorspace=1, encoded_image_string=png(pixels))
            self._board.add(step, f"{kind}/experts/{name}", image=image)

    def text(self, step: int, name: str, text: str) -> None:
        """A text, for TensorBoard."""
        self._board.add_text(step, name, text)
        self._board.flush()

    def close(self) -> None:
        """Flushes and closes both."""
        self._jsonl.close()
        self._board.close()


class _Board:
    """An event file of TensorBoard, written where it is called: an error of the disk is raised, and loses no thread."""

    def __init__(self, folder: Path, first_step: int):
        from tensorboardX import summary  # slow to import, and only training needs it
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        folder.mkdir(exist_ok=True)
        self._event, self._summary, self._text = event_pb2.Event, summary_pb2.Summary, summary.text
        self._histogram = summary.histogram
        self._writer = EventsWriter(str(folder / "events"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # hides what a killed run wrote beyond
        self._writer.write_event(self._event(wall_time=time.time(), step=first_step, session_log=start))

    def add(self, step: int, tag: str, **value: Any) -> None:
        """One value: a field of the protocol's Summary.Value."""
        self._write(step, self._summary(value=[self._summary.Value(tag=tag, **value)]))

    def add_text(self, step: int, tag: str, text: str) -> None:
        self._write(step, self._text(tag, text))

    def add_histogram(self, step: int, tag: str, values: list[float]) -> None:
        self._write(step, self._histogram(tag, np.asarray(values), bins="auto"))

    def _write(self, step: int, summary: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


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
