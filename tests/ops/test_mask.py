"""`visible` against the sentence that defines it, said as a double loop."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer.ops.mask import visible
from transformer.spec import Mask

BATCH, QUERIES, KEYS = 2, 5, 7


def numbers(low, high, length):
    row = st.lists(st.integers(low, high), min_size=length, max_size=length)
    return st.lists(row, min_size=BATCH, max_size=BATCH).map(np.array)


def may_look(mask, q, k, q_segment, k_segment, q_order, k_order) -> bool:
    if q < 0 or k < 0 or q_segment != k_segment:
        return False
    if mask.causal and k_order > q_order:
        return False
    return mask.window is None or k in range(q - mask.window + 1, q + mask.window)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.builds(Mask, causal=st.booleans(), window=st.none() | st.integers(1, 5)),
    numbers(-2, 8, QUERIES),
    numbers(-2, 8, KEYS),
    st.none() | st.tuples(numbers(0, 2, QUERIES), numbers(0, 2, KEYS)),
    st.none() | st.tuples(numbers(0, 8, QUERIES), numbers(0, 8, KEYS)),
)
def test_visible_is_the_sentence(mask, q, k, segments, orders):
    """What comes later is a question of orders, by default of positions."""
    q_orders, k_orders = orders or (q, k)
    q_segments, k_segments = segments or (np.zeros_like(q), np.zeros_like(k))
    expected = np.empty((BATCH, QUERIES, KEYS), bool)
    for b, t, s in np.ndindex(expected.shape):
        sides = zip((q, q_segments, q_orders), (k, k_segments, k_orders), strict=True)
        expected[b, t, s] = may_look(mask, *(side for mine, other in sides for side in (mine[b, t], other[b, s])))
    got = visible(mask, q, k, *(segments or (None, None)), *(orders or (None, None)))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("causal", "seen"), [(True, 3), (False, 5)])
def test_window_counts_the_own_position(causal, seen):
    positions = np.arange(9)
    assert visible(Mask(causal=causal, window=3), positions, positions)[4].sum() == seen


def test_leading_axes_are_free():
    q, k = np.arange(4), np.arange(6)
    mask = Mask(causal=True)
    plain = visible(mask, q, k)
    stacked = visible(mask, np.broadcast_to(q, (2, 3, 4)), np.broadcast_to(k, (2, 3, 6)))
    assert plain.shape == (4, 6) and stacked.shape == (2, 3, 4, 6)
    np.testing.assert_array_equal(stacked, np.broadcast_to(plain, stacked.shape))
