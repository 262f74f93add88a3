"""Kernels through the TPU compiler, which needs no TPU: run with `pytest -m slow tests/kernels/test_compile.py`."""

import dataclasses
import importlib.util
import os

import pytest

from benchmarks import attention_kernels as kernels
from transformer.kernels import blocks

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the libtpu of jax[tpu]"),
]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("chip", kernels.TOPOLOGIES)
@pytest.mark.parametrize("name", kernels.PROBLEMS)
def test_the_compiler_takes_every_published_shape(name, chip, backward):
    """In no more VMEM than the policy counted, and with the FLOPs of the visited blocks in its analysis."""
    problem, on = kernels.PROBLEMS[name], kernels.device(chip)
    best = blocks.choose(on.device_kind, problem.shape, problem.mask, backward)
    compiled = kernels.compiled(problem, on, backward)
    used = kernels.vmem_used(compiled.as_text())
    expected = {"splash_d_queries", "splash_d_keys_values"} if backward else {"splash_forward"}
    assert expected <= set(used)
    counted = blocks.vmem_bytes(dataclasses.replace(problem.shape, group=best.heads), best.q, best.k, backward)
    assert max(used[kernel] for kernel in expected) * blocks.MiB <= counted
    shown = 2 * problem.heads * kernels.needed_pairs(problem) * (problem.dim + problem.v_dim)
    assert compiled.cost_analysis()["flops"] >= shown
