"""Tiles against the mask itself, the online softmax against attention, bytes against sums."""

import jax.numpy as jnp
import numpy as np
import pytest

from transformer import spec
from transformer.figures.data import tiles
from transformer.ops import attention

CAUSAL = spec.Mask(causal=True)
MASKS = {
    "causal": (CAUSAL, None),
    "window": (spec.Mask(causal=True, window=5), None),
    "both ways": (spec.Mask(causal=False), None),
    "sinks": (spec.Mask(causal=True, window=4, sinks=2), None),
    "documents": (CAUSAL, [1] * 9 + [2] * 15),
}


@pytest.mark.parametrize("name", MASKS)
def test_tiles_are_skipped_exactly_where_nothing_is_seen(name):
    mask, segments = MASKS[name]
    cut = tiles.tiles(mask, 24, 8, 4, segments)
    seen = cut.visible.reshape(3, 8, 6, 4).any(axis=(1, 3))
    np.testing.assert_array_equal(cut.order != tiles.SKIPPED, seen)
    steps = cut.order[seen]
    np.testing.assert_array_equal(steps, np.arange(len(steps)))  # each once, query by query


def test_a_causal_mask_skips_its_upper_right():
    cut = tiles.tiles(CAUSAL, 64, 8, 8)
    assert (cut.visited, cut.order.size) == (36, 64)
    np.testing.assert_array_equal(cut.whole, np.tri(8, k=-1, dtype=bool))


@pytest.mark.parametrize("mask", [CAUSAL, spec.Mask(causal=True, window=5)])
def test_every_step_is_attention_over_the_keys_so_far(mask):
    q, k, v = np.random.default_rng(1).standard_normal((3, 16, 4)).astype(np.float32)
    row = 13
    run = tiles.online(mask, q, k, v, 0.5, row, 4)
    call, at = attention.Call(mask, 0.5), jnp.array([[row]])
    for step, block in enumerate(run.blocks):
        seen = run.scores[: step + 1]
        np.testing.assert_allclose(run.total[step], np.exp(seen - run.top[step]).sum(), rtol=1e-5)
        if step not in (0, len(run.blocks) - 1):
            continue
        keys = np.arange(run.blocks[0] * 4, (block + 1) * 4)
        where = attention.Where(at, jnp.asarray(keys)[None])
        features = q[None, [row], None], k[None, keys, None], v[None, keys, None]
        expected = attention.attend("reference", call, *map(jnp.asarray, features), where)[0, 0, 0]
        np.testing.assert_allclose(run.output[step], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("row", [-1, 6])
def test_the_last_step_is_the_ordinary_softmax(row):
    """And none before it is, where keys are left."""
    q, k, v = np.random.default_rng(2).standard_normal((3, 16, 4))
    run = tiles.online(CAUSAL, q, k, v, 0.5, range(16)[row], 4)
    scores = k[: range(16)[row] + 1] @ q[row] * 0.5
    weights = np.exp(scores) / np.exp(scores).sum()
    np.testing.assert_allclose(run.ordinary, weights @ v[: len(scores)], rtol=1e-5, atol=1e-6)
    assert run.error[-1] < 1e-6 < 1e-2 < run.error[:-1].min()


def test_tiles_move_fewer_bytes():
    moved = tiles.traffic(CAUSAL, 64, 16, 8, itemsize=2)
    assert moved.standard == {"q, k, v": 3 * 64 * 16 * 2, "S": 2 * 64 * 64 * 2, "P": 2 * 64 * 64 * 2, "o": 64 * 16 * 2}
    assert moved.unskipped == {"q, k, v": 64 * 16 * 2 + 64 * 2 * 8 * 16 * 2, "S": 0, "P": 0, "o": 64 * 16 * 2}
    whole = 2 * 2 * 64 * 64 * 16  # a product and a sum each of q·k and p·v
    assert moved.flops == {"standard": whole, "unskipped": whole, "tiled": whole * 36 // 64}
    assert moved.tiled == {"q, k, v": 64 * 16 * 2 + 36 * 2 * 8 * 16 * 2, "S": 0, "P": 0, "o": 64 * 16 * 2}


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="length=20: use a multiple of q_block=8"):
        tiles.tiles(CAUSAL, 20, 8, 4)
    with pytest.raises(ValueError, match="segments: 3 for length=8"):
        tiles.tiles(CAUSAL, 8, 8, 4, [1, 1, 2])
