"""Work of a step by the formula, and FLOPs of compiled steps."""

import numpy as np
import pytest

from transformer import spec
from transformer.figures.data import decoding


def test_work_is_the_lesson_s_formula():
    """Without a cache t keys, t values and t(t + 1) / 2 scores; with one 1, 1 and t."""
    runs, t = decoding.work(9), np.arange(1, 10)
    np.testing.assert_array_equal(runs["without"].keys, t)
    np.testing.assert_array_equal(runs["without"].scores, t * (t + 1) // 2)
    np.testing.assert_array_equal(runs["with"].keys, 1)
    np.testing.assert_array_equal(runs["with"].scores, t)
    assert runs["with"].total[-1] == 2 * 9 + 45 and runs["without"].total[0] == runs["with"].total[0] == 3


def test_a_window_bounds_what_a_step_sees():
    assert decoding.work(8, spec.Mask(causal=True, window=3))["with"].scores.tolist() == [1, 2, 3, 3, 3, 3, 3, 3]


def test_compiled_steps_cost_the_same_for_one_token_and_less_for_more():
    counted = decoding.compiled("llama3:tiny", (1, 24)).flops
    assert counted["without"][0] == pytest.approx(counted["with"][0], rel=0.2)
    assert counted["without"][1] > 20 * counted["without"][0], "projections and FFN of all the prefix"
    assert counted["with"][1] < 1.5 * counted["with"][0], "one token, and a row of scores"


def test_limits_are_of_what_a_step_adds():
    """One more token: two FLOPs a weight but the embedding's, and q·k and p·v over all before it; bytes of both."""
    found = decoding.limits("llama3:8b", 1000, rows=(1, 32), chip="v5p")
    table, layers, width = 128256 * 4096, 32, 4096
    weights = 8_030_261_248 - table  # but one row of it
    products = 2 * (weights - (2 * layers + 1) * width) + layers * 4 * width * 1000
    assert found.flops == pytest.approx((products, 32 * products), rel=1e-6)
    assert found.weights == pytest.approx((2 * weights, 2 * weights), rel=1e-4)
    assert found.cache == (2 * layers * 8 * 128 * 1000 * 2, 32 * 2 * layers * 8 * 128 * 1000 * 2)
    rates = [(w + c) / t for w, c, t in zip(found.weights, found.cache, found.memory, strict=True)]
    assert rates == pytest.approx([2765e9] * 2, rel=0.01)
    assert [f / t for f, t in zip(found.flops, found.compute, strict=True)] == pytest.approx([459e12] * 2)
    assert (found.peak, found.bandwidth) == (pytest.approx(459e12), pytest.approx(2765e9, rel=0.01))
    assert found.context == 8192
    with pytest.raises(ValueError, match="chip='abacus'"):
        decoding.limits(chip="abacus")
