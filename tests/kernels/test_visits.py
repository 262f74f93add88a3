"""Lists of visits against the blocks that they were made from."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer.kernels import visits
from transformer.kernels.visits import FIRST, LAST, WORK


def drawn(outer, inner, lists):
    """Blocks shown at trace time, and subsets of them."""
    bits = st.lists(st.booleans(), min_size=outer * inner, max_size=outer * inner)
    array = bits.map(lambda row: np.array(row).reshape(outer, inner))
    return st.tuples(array, st.lists(array, min_size=lists, max_size=lists).map(np.stack))


def walked(codes, steps):
    """(outer, inner, flags) of the visits, one after the other."""
    return [
        (int(visits.outer(c)), int(visits.inner(c)), int(c) & (FIRST | LAST | WORK)) for c in np.asarray(codes[:steps])
    ]


def check(shown, codes, steps):
    walk = walked(codes, steps)
    work = [(i, j) for i, j, flags in walk if flags & WORK]
    assert work == [(i, j) for i, j in np.argwhere(shown).tolist()], "each pair once, outer-major"
    used = [(i, flags) for i, _, flags in walk if flags]
    for i in range(len(shown)):
        flags = [f for row, f in used if row == i]
        assert flags[0] & FIRST and flags[-1] & LAST, "every outer block begins and ends, those without pairs, too"
        assert sum(bool(f & FIRST) for f in flags) == sum(bool(f & LAST) for f in flags) == 1
        assert len(flags) == max(shown[i].sum(), 1)
    assert [i for i, _ in used] == sorted(i for i, _ in used)
    idle = [(i, j) for i, j, flags in walk if not flags]
    assert all(pair == walk[len(used) - 1][:2] for pair in idle), "steps beyond the visits fetch nothing new"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(drawn(3, 4, 2))
def test_visits_are_the_pairs_that_are_shown(blocks):
    shown, bounded = blocks
    static = visits.visits(shown, None)
    assert static.codes.shape == (1, static.steps)
    check(shown, static.codes[0], static.steps)
    bounded = shown & bounded
    each = visits.visits(shown, jnp.asarray(bounded))
    assert each.codes.shape[1] == static.steps >= int(each.steps)
    for own, codes in zip(bounded, each.codes, strict=True):
        check(own, codes, int(each.steps))


def test_the_last_of_many_blocks_has_its_number():
    shown = np.zeros((visits.MOST_BLOCKS, 2), bool)
    shown[-1, 1] = True
    walk = visits.visits(shown, None)
    assert walked(walk.codes[0, -1:], 1) == [(visits.MOST_BLOCKS - 1, 1, FIRST | LAST | WORK)]


@pytest.mark.parametrize("shape", [(visits.MOST_BLOCKS + 1, 1), (1024, 1024)])
def test_more_than_can_be_listed_is_refused(shape):
    with pytest.raises(ValueError, match="use larger blocks"):
        visits.visits(np.ones(shape, bool), None)
