"""What bodies in blocks promise beyond the formula: linear memory, one small loop, and no block read in vain."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.ops.attention import Call, Where, blocks, blockwise, splash
from transformer.ops.mask import visible
from transformer.spec import Mask

CAUSAL, WINDOW, BAND = Mask(causal=True), Mask(causal=True, window=5), Mask(causal=False, window=4)


def run(call, q, k, v, where, attend=blockwise.attend):
    """The output and the gradients of q, k and v."""
    out, pull = jax.vjp(lambda q, k, v: attend(call, q, k, v, where), q, k, v)
    return out, *pull(jnp.ones_like(out))


def compiled(call: Call, length: int):
    x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
    positions = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return jax.jit(run, static_argnums=0).lower(call, x, x, x, Where(positions, positions)).compile()


@pytest.mark.parametrize(("aligned", "lengths"), [(True, (2048, 4096, 8192, 16384)), (False, (8192, 16384))])
def test_memory_grows_linearly(aligned, lengths):
    call = Call(mask=CAUSAL, scale=1.0, aligned=aligned, block=256)
    sizes = [compiled(call, length).memory_analysis().temp_size_in_bytes for length in lengths]
    assert all(longer < 2.3 * shorter for shorter, longer in itertools.pairwise(sizes)), sizes


def test_work_grows_as_length_times_window():
    trips = {}
    for mask, length in itertools.product((WINDOW, CAUSAL), (128, 256)):
        call = Call(mask=mask, scale=1.0, aligned=True, block=8)
        trips[mask, length] = blocks.aligned_blocks(mask, length, call.block, call.block).sum()
        found = re.findall(r'known_trip_count":\{"n":"(\d+)"', compiled(call, length).as_text())
        assert [int(n) for n in found] == [trips[mask, length]] * 2  # forward and backward
    assert trips[WINDOW, 256] < 2.1 * trips[WINDOW, 128]
    assert trips[CAUSAL, 256] > 3.5 * trips[CAUSAL, 128]


def test_program_does_not_grow_with_blocks():
    call = Call(mask=CAUSAL, scale=1.0, aligned=True, block=8)
    few, many = (compiled(call, length).as_text().count(" = ") for length in (64, 256))
    assert many < 1.1 * few


def test_accumulators_are_updated_in_place():
    text = compiled(Call(mask=CAUSAL, scale=1.0, aligned=True, block=8), 512).as_text()
    assert "f32[64," in text
    assert not re.findall(r"f32\[64,\S* copy\(%(?:get-tuple-element|copy)", text)


@pytest.mark.parametrize("mask", [Mask(causal=False), CAUSAL, WINDOW, BAND, Mask(causal=True, window=1)], ids=str)
@pytest.mark.parametrize(("length", "q_size", "k_size"), [(1, 1, 1), (16, 4, 4), (21, 4, 4), (22, 8, 3), (9, 2, 9)])
def test_aligned_blocks_are_those_in_which_the_mask_shows_something(mask, length, q_size, k_size):
    seen = np.asarray(visible(mask, np.arange(length), np.arange(length)))
    seen = np.pad(seen, [(0, -length % size) for size in (q_size, k_size)])
    seen = seen.reshape(-1, q_size, seen.shape[1] // k_size, k_size).any((1, 3))
    np.testing.assert_array_equal(blocks.aligned_blocks(mask, length, q_size, k_size), seen)


@pytest.mark.parametrize(
    ("length", "block", "unit", "size"), [(9, 16, 1, 9), (21, 8, 1, 7), (22, 8, 4, 8), (600, 512, 128, 384)]
)
def test_blocks_pad_as_little_as_their_number_and_unit_allow(length, block, unit, size):
    assert blocks.block_size(length, block, unit) == size


# Blocks of 7, one of which asks: what rules out the unread keys is the mask's direction, its window behind or ahead,
# or the segment, and nothing else.
UNREAD = {
    "causal": (CAUSAL, False, np.arange(28), np.zeros(28), slice(0, 7), slice(7, None)),
    "window": (WINDOW, False, np.arange(28), np.zeros(28), slice(21, 28), slice(0, 14)),
    "band": (BAND, False, np.arange(28), np.zeros(28), slice(0, 7), slice(14, None)),
    "segment": (CAUSAL, True, np.tile(np.arange(14), 2), np.repeat([0, 1], 14), slice(21, 28), slice(0, 14)),
}


def walks():
    for why in UNREAD:
        yield why, blockwise.attend
        yield pytest.param(why, splash.attend, marks=[] if why == "segment" else [pytest.mark.slow])


@pytest.mark.parametrize(("why", "attend"), walks())
def test_blocks_that_bounds_rule_out_are_not_read(why, attend):
    mask, aligned, positions, segments, queries, unread = UNREAD[why]
    positions, segments = (jnp.asarray(x[None], jnp.int32) for x in (positions, segments))
    asking = jnp.full_like(positions, -1).at[:, queries].set(positions[:, queries])
    where = Where(asking, positions, segments, segments)
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 28, 1, 8), np.float32)
    # A block that is read spreads its NaN, as 0 · NaN is NaN.
    k[:, unread] = v[:, unread] = np.nan
    call = Call(mask=mask, scale=0.4, aligned=aligned, block=7)
    out, dq, dk, dv = jax.jit(run, static_argnums=(0, 5))(call, q, k, v, where, attend)
    assert all(np.all(np.isfinite(x)) for x in (out, dq, dk, dv))
    assert np.all(dk[:, unread] == 0) and np.all(dv[:, unread] == 0) and np.any(dk != 0)


def test_aligned_lengths_must_agree():
    x, positions = jnp.zeros((1, 4, 1, 8)), jnp.arange(4)[None]
    with pytest.raises(ValueError, match="T, S = "):
        blockwise.attend(Call(mask=CAUSAL, scale=1.0, aligned=True), x[:, :3], x, x, Where(positions[:, :3], positions))
