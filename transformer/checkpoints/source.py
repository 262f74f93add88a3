"""What a model can start from: a Hugging Face directory, a GGUF file or a training workdir, behind one interface."""

import dataclasses
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from transformer import families
from transformer.checkpoints import hugging_face, weights
from transformer.checkpoints.gguf import GGUFFile, locate
from transformer.checkpoints.gguf_tokenizer import write_companions
from transformer.checkpoints.packages import PACKAGE
from transformer.checkpoints.tensors import CheckpointError
from transformer.checkpoints.workdir import Workdir
from transformer.spec import Model
from transformer.tokenizer import Tokenizer, load_tokenizer, tokenizer_file

# A published file's beginning and end tell it from another one: those of one architecture have equal headers.
SAMPLE = 2**20
# Seconds that need no bar.
PATIENCE = 2.0


class Source(Protocol):
    """A model whose parameters can be read.

    Attributes:
      path: where it lies.
      spec: what the model is; may be laid out otherwise before the parameters are read (`Stack.unrolled`).
      companions: the directory of its tokenizer, chat template and generation config.
    """

    path: Path
    spec: Model
    companions: Path

    def read_params(self, like: dict, dtype: Any, progress: weights.Tick) -> dict:
        """The parameters in the shapes and shardings of `like` (abstract arrays)."""
        ...

    def files(self) -> list[Path]:
        """What the parameters are read from."""
        ...

    def tokenizer_name(self) -> str:
        """What `load_tokenizer` takes: the path of its tokenizer's file, or "bytes"."""
        ...

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, with the special ids that lie beside it."""
        ...


class HuggingFace:
    """A directory with config.json and safetensors; `mtp` as in `hugging_face.open_spec`."""

    def __init__(self, directory: str | Path, mtp: bool = True):
        self.path = self.companions = Path(directory).absolute()
        self.spec = hugging_face.open_spec(self.path, mtp)

    def read_params(self, like: dict, dtype: Any, progress: weights.Tick) -> dict:
        """The parameters, tensor by tensor."""
        return hugging_face.read_params(self.path, self.spec, like, dtype, progress)

    def tokenizer_name(self) -> str:
        """Its tokenizer.json, whether it is there or not, unless there is a SentencePiece model alone."""
        return str(tokenizer_file(self.companions))

    def tokenizer(self) -> Tokenizer:
        """That of the checkpoint."""
        return load_tokenizer(self.tokenizer_name(), published=True)

    def files(self) -> list[Path]:
        """The config and the weights."""
        return [self.path / "config.json", *self.path.glob("*.safetensors")]


class GGUF:
    """A GGUF file, or the one in an installed package; its tokenizer files live as long as this object."""

    def __init__(self, name: str | Path):
        self.path = locate(str(name))
        self._file = GGUFFile(self.path)
        self.spec = hugging_face.read_spec(self._file.config)
        self._directory = tempfile.TemporaryDirectory(prefix="gguf-")
        self.companions = Path(self._directory.name)
        write_companions(self._file, self.companions)

    def read_params(self, like: dict, dtype: Any, progress: weights.Tick) -> dict:
        """The parameters, dequantised tensor by tensor."""
        table = families.get(self.spec.origin.family).table(self.spec)
        return weights.load(self._file, table, self.spec, like, np.dtype(dtype), progress)

    def tokenizer_name(self) -> str:
        """The tokenizer.json made of its metadata."""
        return str(self.companions / "tokenizer.json")

    def tokenizer(self) -> Tokenizer:
        """That of the metadata."""
        return load_tokenizer(self.tokenizer_name(), published=True)

    def files(self) -> list[Path]:
        """The one file."""
        return [self.path]


class TrainedRun:
    """The newest checkpoint of a training workdir."""

    def __init__(self, workdir: str | Path):
        self._workdir = Workdir(workdir)
        self.path = self.companions = self._workdir.path
        self.spec = families.build_spec(self._workdir.read_config()["model"])

    def read_params(self, like: dict, dtype: Any, progress: weights.Tick) -> dict:
        """The parameters, all at once."""
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.dtype(dtype), sharding=x.sharding), like)
        try:
            params = self._workdir.restore_params(wanted)
        finally:
            self._workdir.close()
        for path, count in sizes(like).items():
            progress(path, count)
        return params

    def tokenizer_name(self) -> str:
        """The tokenizer that the run keeps a copy of."""
        return self._workdir.tokenizer_name()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the run was trained with."""
        return self._workdir.tokenizer()

    def files(self) -> list[Path]:
        """The newest checkpoint's files."""
        step = self._workdir.latest_step()
        self._workdir.close()
        state = self.path / "checkpoints" / str(step) / "state"
        return [file for file in state.rglob("*") if file.is_file()]


def open_source(name: str | Path) -> Source:
    """The source that a path names: a *.gguf file (or package:NAME), a Hugging Face directory, else a workdir.

    Raises:
      CheckpointError, WorkdirError, SettingsError: it is none of them, or can't be used.
    """
    if str(name).startswith(PACKAGE) or str(name).endswith(".gguf"):
        return GGUF(name)
    if hugging_face.is_directory(name):
        return HuggingFace(name)
    if not (Path(name) / "config.json").is_file():
        raise CheckpointError(f"{name}: neither a Hugging Face directory nor a training workdir: it has no config.json")
    return TrainedRun(name)


def model_values(spec: Model) -> dict[str, Any]:
    """The `model` group of a config: the family and its dimensions, as plain data."""
    return {"family": spec.origin.family, **json.loads(json.dumps(dataclasses.asdict(spec.origin.dims)))}


def record(source: Source) -> dict[str, str]:
    """What a run remembers of its source: the path, and a digest that a changed source doesn't have."""
    digest = hashlib.sha256()
    for file in sorted(source.files()):
        with file.open("rb") as content:
            size = file.stat().st_size
            digest.update(f"{file.relative_to(source.path) if file != source.path else ''} {size}\n".encode())
            digest.update(content.read(SAMPLE))
            content.seek(max(SAMPLE, size - SAMPLE))
            digest.update(content.read(SAMPLE))
    return {"path": str(source.path), "sha256": digest.hexdigest()}


def sizes(like: dict) -> dict[str, int]:
    """Bytes of every parameter by its path."""
    return {path: x.size * x.dtype.itemsize for path, x in weights.flatten(like).items()}


@contextmanager
def progress_bar(total: int, what: str, show: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar of `total` bytes with the time left, on a terminal's stderr, of what takes longer than `PATIENCE`."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    console, begin = Console(stderr=True), time.monotonic()
    progress = Progress(*columns, console=console, transient=True, disable=not (show and console.is_terminal))
    task = progress.add_task(what, total=total)

    def advance(count: int) -> None:
        progress.advance(task, count)
        if time.monotonic() - begin > PATIENCE:
            progress.start()

    try:
        yield advance
    finally:
        progress.stop()
