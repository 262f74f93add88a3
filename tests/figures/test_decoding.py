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
