"""Receptive fields by gradient against the sum of the windows, and the published patterns."""

import numpy as np
import pytest

from transformer.figures.data import windows


def reached(windows_of: tuple, length: int) -> np.ndarray:
    """[L, T, T] by the formula: layer l sees as far back as the windows so far add up to."""
    behind = np.subtract.outer(np.arange(length), np.arange(length))
    reaches = [windows.reach(windows_of[: depth + 1]) for depth in range(len(windows_of))]
    return np.stack([(behind >= 0) & (behind < (reach or length)) for reach in reaches])


@pytest.mark.parametrize("pattern", [(3, 3, 3), (2, None, 2)])
def test_the_field_grows_by_window_minus_one_a_layer(pattern):
    got = windows.influence(pattern, 9)
    np.testing.assert_array_equal(got, reached(pattern, 9))
    if len(set(pattern)) == 1:
        grown = [int(layer[-1].sum()) for layer in got]
        assert grown == [depth * (pattern[0] - 1) + 1 for depth in range(1, len(pattern) + 1)]


def test_sinks_stay_in_sight():
    got = windows.influence((3, 3), 12, sinks=2)
    assert got[0, -1].nonzero()[0].tolist() == [0, 1, 9, 10, 11]
    reached = [windows.reach((3,) * depth, sinks=2) for depth in (1, 2)]
    assert [int(layer[-1].sum()) for layer in got] == reached == [5, 7], "what lies between stays out of reach"
    assert windows.reach((3, None), sinks=2) is None


def test_patterns_are_the_published_ones():
    assert windows.pattern("gemma3:27b")[:6] == (1024,) * 5 + (None,)
    assert windows.pattern("gpt_oss:120b")[:4] == (128, None, 128, None)
    assert set(windows.pattern("mistral:7b-v0.1")) == {4096}
    assert windows.reach(windows.pattern("mistral:7b-v0.1")) == 32 * 4095 + 1
    assert windows.reach(windows.pattern("llama3:8b")) is None
