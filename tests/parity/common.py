"""Asking the oracle: an interpreter with torch and transformers, in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from transformer.nn.model import Transformer

PYTHON = os.environ.get("TRANSFORMER_ORACLE_PYTHON", sys.executable)
SCRIPT = Path(__file__).parent / "oracle.py"
# Of logits: the noise between two correct float32 programs is about 3e-5 where they are of the size 10.
LIMIT = 3e-4


class Job(NamedTuple):
    """One question: a kind and its fields (`oracle.py` lists them), and the arrays that go in."""

    fields: dict[str, Any]
    inputs: Mapping[str, np.ndarray]


class Answer(NamedTuple):
    """What came back, and where the files lie that the oracle wrote."""

    found: dict[str, Any]
    arrays: dict[str, np.ndarray]
    directory: Path


def ask(root: Path, jobs: Mapping[str, Job]) -> dict[str, Answer]:
    """Answers by the names of the jobs, all from one process, since starting torch takes longer than most jobs."""
    for name, job in jobs.items():
        (root / name).mkdir()
        np.savez(root / name / "inputs.npz", **job.inputs)
    (root / "jobs.json").write_text(json.dumps({name: job.fields for name, job in jobs.items()}))
    try:
        done = subprocess.run([PYTHON, SCRIPT, root], capture_output=True, text=True, check=False)
        failure = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except OSError as error:
        failure = [f"{PYTHON}: {error.strerror}"]
    if failure:
        pytest.fail(
            f"no oracle: {failure[0]}; name an interpreter with torch, transformers and numpy in "
            "TRANSFORMER_ORACLE_PYTHON, or install the torch extra",
            pytrace=False,
        )
    return {name: _read(root / name) for name in jobs}


def _read(directory: Path) -> Answer:
    with np.load(directory / "answer.npz") as arrays:
        return Answer(json.loads((directory / "answer.json").read_text()), dict(arrays), directory)


def logits(model: Transformer, params: dict, tokens: np.ndarray) -> np.ndarray:
    """Our logits [B, T, V]."""
    return np.asarray(jax.jit(model.apply)({"params": params}, tokens))


def worst(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference of two finite arrays."""
    assert got.shape == want.shape and np.isfinite(got).all() and np.isfinite(want).all()
    return float(np.abs(got.astype(np.float64) - want).max())


def quick_compiles():
    """For a module's fixture: two thirds of the compile time; the arithmetic is the same."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
