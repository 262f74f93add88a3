"""Products of experts through the TPU compiler: a dense lowering would cost as many times as there are experts."""

import importlib.util
import math

import pytest

from benchmarks import expert_products as benchmark

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='needs libtpu: pip install "jax[tpu]"'),
]


def flops_ratio(shape: benchmark.Shape, chip: str, backward: bool) -> float:
    """FLOPs of a gated layer over those of its three products."""
    needed = (3 if backward else 1) * 3 * 2 * math.prod((shape.rows, shape.d_model, shape.d_ff))
    program = benchmark.compiled(benchmark.layer, chip, benchmark.layer_arrays(shape), backward)
    return program.cost_analysis()["flops"] / needed


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("chip", benchmark.CHIPS)
@pytest.mark.parametrize("name", benchmark.SHAPES)
def test_experts_run_the_rows_that_there_are(name, chip, backward):
    assert 1 <= flops_ratio(benchmark.SHAPES[name], chip, backward) <= 1.1


@pytest.mark.parametrize("chip", benchmark.CHIPS)
def test_a_few_tokens_go_through_the_experts_that_they_picked(chip):
    """Eight tokens with eight of 128 experts each."""
    assert 1 <= flops_ratio(benchmark.FEW, chip, backward=False) <= 1.1
