"""The decode kernel compiles for every generation of TPUs, reads the cache once and copies none of it; nothing runs."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.decode_kernels import CHIPS, SHAPES, STEPS, loop_bytes, one_device

ROOT = Path(__file__).parent.parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='needs libtpu: pip install "jax[tpu]"'),
]
BESIDE_MB = 8.0  # queries, output, positions and lists, of 128 heads and 8 rows


@functools.cache
def rows(chip: str, *options: str) -> list[dict]:
    """What the benchmark prints, from a process whose compiler leaves nothing out."""
    env = {name: value for name, value in os.environ.items() if name != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    command = [sys.executable, "benchmarks/decode_kernels.py", "--chips", chip, *options]
    done = subprocess.run(command, cwd=ROOT, env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_and_reads_the_cache_once(chip):
    found = rows(chip, "--steps")
    assert [row["shape"] for row in found] == list(SHAPES)
    for row in found:
        assert row["copies"] == 0, row
        assert row["padded_MB"] <= row["accessed_MB"] <= row["padded_MB"] + BESIDE_MB, row


@pytest.mark.parametrize("chip", CHIPS)
def test_a_step_over_a_latent_cache_reads_cache_and_weights(chip):
    """Within 5 % of the weights and 576 numbers a token; docs/decode_kernels.md says what v5p moves besides."""
    found = rows(chip, "--shapes", "--steps", *STEPS)
    for size, row in zip(STEPS, found, strict=True):
        assert row["copies"] == 0 and row["padded_MB"] == row["cache_MB"], row
        assert abs(row["ratio"] - 1) <= (0.13 if (chip, size) == ("v5p", "64x4096") else 0.05), row


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", ["Llama 3 8B", "Llama 3 8B, int8 cache", "gpt-oss 120B, full", "DeepSeek-V3"])
def test_a_loop_of_steps_copies_no_cache(name, chip):
    """Not even from the form that a scatter likes into the one that the kernel reads."""
    temporary, held = loop_bytes(SHAPES[name], one_device(chip))
    assert temporary < held / 8  # what is no cache: queries, output and their copies
