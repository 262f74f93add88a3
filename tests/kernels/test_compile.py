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


@pytest.mark.parametrize("chip", kernels.TOPOLOGIES)
@pytest.mark.parametrize("name", kernels.PROBLEMS)
def test_the_compiler_takes_every_published_shape(name, chip):
    """Forward and backward, in no more VMEM than was counted, with the FLOPs of the visited blocks in the analysis."""
    problem, on = kernels.PROBLEMS[name], kernels.device(chip)
    compiled = kernels.compiled(problem, on)
    used = kernels.vmem_used(compiled.as_text())
    assert set(used) == {"splash_forward", "splash_d_queries", "splash_d_keys_values"}
    for backward in (False, True):
        best = blocks.choose(on.device_kind, problem.shape, problem.mask, backward)
        counted = blocks.vmem_bytes(dataclasses.replace(problem.shape, group=best.heads), best.q, best.k, backward)
        assert counted <= best.vmem < blocks.CHIPS[on.device_kind].vmem
        for kernel, size in used.items():
            assert ("forward" in kernel) == backward or size * blocks.MiB <= counted, kernel
    # Products over the head dims: one and one forward, two and one for queries, two and two for keys and values.
    shown = 2 * problem.heads * kernels.needed_pairs(problem) * (5 * problem.dim + 4 * problem.v_dim)
    assert compiled.cost_analysis()["flops"] >= shown


@pytest.mark.parametrize("chip", kernels.TOPOLOGIES)
def test_a_block_too_large_for_vmem_is_refused_before_the_compiler_sees_it(chip):
    with pytest.raises(
        ValueError, match=r"compute\.attention_block=8192: needs .* MiB of VMEM, and TPU.* use a smaller"
    ):
        kernels.compiled(kernels.PROBLEMS["Llama 3 8B"], kernels.device(chip), block=8192)


@pytest.mark.parametrize("chip", ["v4", "v6e"])
def test_the_largest_block_that_is_allowed_compiles(chip):
    """What a setting may ask for, the compiler takes: the policy's refusal comes before the compiler's."""
    problem, on = dataclasses.replace(kernels.PROBLEMS["Llama 3 8B"], length=4096), kernels.device(chip)
    room = blocks.vmem_room(on.device_kind)
    of_one = dataclasses.replace(problem.shape, group=1)
    block = max(n for n in range(128, 4097, 128) if blocks.vmem_bytes(of_one, n, n, backward=True) <= room)
    assert set(kernels.vmem_used(kernels.compiled(problem, on, block).as_text()))
