"""Products of experts through the TPU compiler: a dense lowering would cost as many times as there are experts."""

import importlib.util
import math

import pytest

from benchmarks import expert_products as benchmark

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='needs libtpu: pip install "jax[tpu]"'),
]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("chip", benchmark.CHIPS)
@pytest.mark.parametrize("name", benchmark.SHAPES)
def test_experts_run_the_rows_that_there_are(name, chip, backward):
    shape = benchmark.SHAPES[name]
    needed = (3 if backward else 1) * 3 * 2 * math.prod((shape.rows, shape.d_model, shape.d_ff))
    program = benchmark.compiled(benchmark.layer, chip, benchmark.layer_arrays(shape), None, backward)
    assert 1 <= program.cost_analysis()["flops"] / needed <= 1.1
