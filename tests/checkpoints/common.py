"""The recorded outputs of Hugging Face models (`tests/golden`), discovered, and what the tests here share."""

import functools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import safe_open

import transformer
from transformer.checkpoints.weights import flatten
from transformer.nn.model import Transformer

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = tuple(sorted(file.parent.name for file in GOLDEN.glob("*/model.safetensors")))
HEADER = 8  # bytes of the length that a safetensors file begins with


@functools.cache
def imported(case: str) -> tuple[Transformer, dict]:
    """(model, parameters) of a case, in float32."""
    return transformer.from_hf(GOLDEN / case)


@functools.cache
def expected(case: str) -> Mapping[str, np.ndarray]:
    """The recorded arrays of a case."""
    with np.load(GOLDEN / case / "expected.npz") as arrays:
        return dict(arrays)


def config(case: str, file: str = "config.json") -> dict[str, Any]:
    """A config of a case, as plain data."""
    return json.loads((GOLDEN / case / file).read_text())


def quantized(case: str) -> bool:
    """True where weights are stored in few bits, which we read and don't write."""
    return "quantization_config" in config(case)


def copy(case: str, directory: Path) -> Path:
    """A directory with the case's config and weights, to be damaged."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / case / name, directory / name)
    return directory


def stored(*files: Path) -> dict[str, np.ndarray]:
    """The tensors of safetensors files as they lie there, read by the library alone."""
    found = {}
    for path in files:
        with safe_open(path, framework="numpy") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def assert_identical(got: Any, want: Any) -> None:
    """Two trees of arrays are the same bit for bit, names, dtypes and NaN included."""
    got, want = flatten(got), flatten(want)
    assert set(got) == set(want)
    for name in want:
        a, b = np.asarray(jax.device_get(got[name])), np.asarray(jax.device_get(want[name]))
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert a.tobytes() == b.tobytes(), f"{name} differs"
