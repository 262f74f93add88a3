"""Laws of caches: the slots hold the last tokens of each row, however they came."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer import spec
from transformer.ops import cache as caches

ROWS, WIDTH = 2, 12
# Equal shapes at every write, so that nothing is traced anew.
CAPACITIES = (1, 3, 8, 40)


def empty(capacity: int, *lead: int) -> caches.KVCache:
    shape = (*lead, ROWS, capacity, 1, 1)
    return caches.KVCache(jnp.zeros(shape), jnp.zeros(shape), jnp.full(shape[:-2], -1, jnp.int32))


def payload(positions: np.ndarray, sign: int) -> jnp.ndarray:
    """Keys and values that tell their row and position."""
    return jnp.asarray(sign * (1000 * (1 + np.arange(ROWS)[:, None]) + positions), jnp.float32)[..., None, None]


@st.composite
def writes(draw) -> list[np.ndarray]:
    """Calls of WIDTH tokens: each row goes on from where it is, in any order, with padding anywhere.

    Order tells whether two tokens are written to one slot, where the last would happen to win.
    """
    calls, next_position = [], np.zeros(ROWS, int)
    for _ in range(draw(st.integers(1, 4))):
        call = np.full((ROWS, WIDTH), -1)
        for row in range(ROWS):
            slots = sorted(draw(st.sets(st.integers(0, WIDTH - 1))))
            call[row, slots] = next_position[row] + np.array(draw(st.permutations(range(len(slots)))), int)
            next_position[row] += len(slots)
        calls.append(call)
    return calls


@settings(max_examples=60, deadline=None)
@given(calls=writes(), capacity=st.sampled_from(CAPACITIES), layer=st.sampled_from([None, 0, 2]))
def test_slots_hold_the_last_tokens(calls, capacity, layer):
    cache = empty(capacity) if layer is None else empty(capacity, 3).view(jnp.int32(layer))
    for positions in calls:
        cache = cache.write(payload(positions, 1), payload(positions, -1), jnp.asarray(positions, jnp.int32))
    keys, values, kept = map(np.asarray, cache.read())
    for row in range(ROWS):
        written = max(call[row].max() for call in calls) + 1
        full = sorted(p for p in kept[row] if p >= 0)
        assert full == list(range(max(0, written - capacity), written))
        for slot, position in enumerate(kept[row]):
            told = 0 if position < 0 else 1000 * (1 + row) + position
            assert position < 0 or slot == position % capacity
            assert keys[row, slot, 0, 0] == told
            assert values[row, slot, 0, 0] == -told
    if layer is not None:
        others = np.delete(np.asarray(cache.positions), layer, axis=0)
        assert (others == -1).all(), "a write reached another layer"


def test_values_are_stored_in_the_dtype_of_the_cache():
    cache = empty(4)
    cache = caches.KVCache(cache.keys.astype(jnp.bfloat16), cache.values.astype(jnp.bfloat16), cache.positions)
    positions = np.zeros((ROWS, 1), int)
    written = cache.write(payload(positions, 1), payload(positions, -1), jnp.asarray(positions))
    assert written.keys.dtype == written.values.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("window", "length", "slots", "ring"), [(8, 40, 8, True), (None, 40, 40, False), (8, 5, 5, False)]
)
def test_capacity_is_what_the_layer_can_see(window, length, slots, ring):
    mask = spec.Mask(causal=True, window=window)
    assert caches.capacity(mask, length) == slots
    assert caches.is_ring(mask, empty(slots)) is ring


def test_init_lays_the_caches_out_like_the_stack():
    norm = spec.Norm(kind="rms", eps=1e-6, offset=0.0, bias=False, scale_in_float32=True)
    ffn = spec.FeedForward(d_ff=8, activation="silu", gated=True, bias=False)

    def block(window):
        mask = spec.Mask(causal=True, window=window)
        mixer = spec.Attention(
            num_heads=2, num_kv_heads=1, head_dim=4, mask=mask, scale=0.5, rope=None, qkv_bias=False, out_bias=False
        )
        return spec.Block(mixer=mixer, ffn=ffn, norm=norm, placement="pre")

    stack = spec.Stack(
        head=(block(None),), body=(block(4), block(None)), repeats=3, tail=(block(4), block(4)), final_norm=None
    )
    cache = caches.init(stack, batch=2, max_length=16, dtype=jnp.bfloat16)
    shapes = [[layer.keys.shape for layer in getattr(cache, part)] for part in ("head", "body", "tail")]
    assert shapes == [[(2, 16, 1, 4)], [(3, 2, 4, 1, 4), (3, 2, 16, 1, 4)], [(2, 4, 1, 4)] * 2]
    assert all(
        layer.keys.dtype == jnp.bfloat16 and (np.asarray(layer.positions) == -1).all()
        for layer in (*cache.head, *cache.body, *cache.tail)
    )
