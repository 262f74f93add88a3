"""Where metrics are looked at: TensorBoard always, Weights & Biases where a run asks for it."""

import html
import secrets
import struct
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from transformer.settings import SettingsError


class Histogram(NamedTuple):
    """How many numbers lie in each bin.

    Attributes:
      edges: [bins + 1], rising.
      counts: [bins].
      sum, squares: of the numbers, and of their squares.
    """

    edges: np.ndarray
    counts: np.ndarray
    sum: float
    squares: float

    @classmethod
    def of(cls, values: Any) -> "Histogram":
        """Of a few numbers at hand."""
        values = np.asarray(values, np.float64)
        counts, edges = np.histogram(values, bins=30)
        return cls(edges, counts, float(values.sum()), float(np.square(values).sum()))


@dataclass(frozen=True)
class Shown:
    """What a board is to show, by tag; pictures are grey, uint8 [height, width]."""

    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    pictures: dict[str, np.ndarray] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


class Board(Protocol):
    """Shows what belongs to a step, steps rising."""

    def show(self, step: int, shown: Shown) -> None: ...

    def close(self) -> None: ...


def png(pixels: np.ndarray) -> bytes:
    """A grey picture uint8 [height, width] as PNG (ISO/IEC 15948)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


class TensorBoard:
    """An event file of TensorBoard, written where it is called: an error of the disk is raised, and loses no thread."""

    def __init__(self, folder: Path, first_step: int):
        from tensorboardX import summary  # slow to import, and only training needs it
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        folder.mkdir(exist_ok=True)
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._text, self._histogram = summary.text, summary.histogram_raw
        self._writer = EventsWriter(str(folder / "events"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # hides what a killed run wrote beyond
        self._writer.write_event(self._event(wall_time=time.time(), step=first_step, session_log=start))

    def show(self, step: int, shown: Shown) -> None:
        """Writes all of it to the disk."""
        for tag, value in shown.scalars.items():
            self._value(step, tag, simple_value=value)
        for tag, (edges, counts, *sums) in shown.histograms.items():
            numbers = map(float, (edges[0], edges[-1], np.sum(counts), *sums))
            self._write(step, self._histogram(tag, *numbers, edges[1:].tolist(), counts.tolist()))
        for tag, pixels in shown.pictures.items():
            height, width = pixels.shape
            image = dict(height=height, width=width, colorspace=1, encoded_image_string=png(pixels))
            self._value(step, tag, image=image)
        for tag, text in shown.texts.items():
            self._write(step, self._text(tag, text))
        self._writer.flush()

    def _value(self, step: int, tag: str, **value: Any) -> None:
        """One value: a field of the protocol's Summary.Value."""
        self._write(step, self._summary(value=[self._summary.Value(tag=tag, **value)]))

    def _write(self, step: int, summary: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Flushes and closes the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of a project of Weights & Biases: one for a workdir, which a resumed run goes on with.

    Steps that a killed run showed and never saved are shown once, as they were: a resumed run repeats them.
    """

    def __init__(self, project: str, workdir: Path, config: dict[str, Any]):
        """Raises `SettingsError`: its packages aren't installed, or it lets nobody in."""
        self._wandb = imported_wandb(project)
        file = workdir / "wandb.id"
        if not file.exists():
            file.write_text(secrets.token_hex(4))
        try:
            self._run = self._wandb.init(
                project=project, id=file.read_text(), name=workdir.name, dir=workdir, config=config, resume="allow"
            )
        except self._wandb.Error as error:
            remedy = "run `wandb login`, set WANDB_MODE=offline, or leave it empty"
            raise SettingsError(f"train.wandb_project={project!r}: {str(error).rstrip('.')}; {remedy}") from None

    def show(self, step: int, shown: Shown) -> None:
        """Hands all of it to the process that sends it."""
        wandb = self._wandb
        histograms = {tag: wandb.Histogram(np_histogram=(h.counts, h.edges)) for tag, h in shown.histograms.items()}
        pictures = {tag: wandb.Image(pixels) for tag, pixels in shown.pictures.items()}
        texts = {tag: wandb.Html(f"<pre>{html.escape(text)}</pre>") for tag, text in shown.texts.items()}
        self._run.log({**shown.scalars, **histograms, **pictures, **texts}, step=step)

    def close(self) -> None:
        """Waits until all is sent."""
        self._run.finish()


def check_project(project: str) -> None:
    """Raises `SettingsError` where a project is named and the packages for it aren't installed."""
    if project:
        imported_wandb(project)


def imported_wandb(project: str) -> Any:
    """The module, which nothing else needs.

    Raises:
      SettingsError: it, or what it draws with, isn't installed.
    """
    try:
        import PIL  # noqa: F401 (by which it draws pictures, and which it doesn't bring)
        import wandb
    except ImportError as error:
        remedy = f"needs {error.name}; pip install 'transformer[wandb]', or leave it empty"
        raise SettingsError(f"train.wandb_project={project!r}: {remedy}") from None
    return wandb
