"""Laws of caches: the slots hold the last tokens of each row, however they came."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer import spec
from transformer.ops import cache as caches
from transformer.ops import cache_rows
from transformer.ops.mask import visible

ROWS, WIDTH = 2, 12
# Equal shapes at every write, so that nothing is traced anew.
CAPACITIES = (1, 3, 8, 40)


def empty(capacity: int, *lead: int, sinks: int = 0) -> caches.KVCache:
    shape = (*lead, ROWS, 1, capacity, 1)
    positions = jnp.full((*lead, ROWS, capacity), -1, jnp.int32)
    return caches.KVCache(jnp.zeros(shape), jnp.zeros(shape), positions, sinks=sinks)


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
@given(
    calls=writes(), ring=st.sampled_from(CAPACITIES), sinks=st.sampled_from([0, 2]), layer=st.sampled_from([None, 2])
)
def test_slots_hold_the_first_and_the_last_tokens(calls, ring, sinks, layer):
    capacity, lead = sinks + ring, () if layer is None else (3,)
    cache = empty(capacity, *lead, sinks=sinks).view(None if layer is None else jnp.int32(layer))
    for positions in calls:
        cache = cache.write(payload(positions, 1), payload(positions, -1), jnp.asarray(positions, jnp.int32))
    keys, values, kept = map(np.asarray, cache.read(jnp.float32))
    for row in range(ROWS):
        written = max(call[row].max() for call in calls) + 1
        full = sorted(p for p in kept[row] if p >= 0)
        assert full == [p for p in range(written) if p < sinks or p >= written - ring]
        for slot, position in enumerate(kept[row]):
            told = 0 if position < 0 else 1000 * (1 + row) + position
            place = position if position < sinks else sinks + (position - sinks) % ring
            assert position < 0 or slot == place
            assert keys[row, slot, 0, 0] == told
            assert values[row, slot, 0, 0] == -told
    if layer is not None:
        others = np.delete(np.asarray(cache.positions), layer, axis=0)
        assert (others == -1).all(), "a write reached another layer"


@settings(max_examples=8, deadline=None)
@given(data=st.data(), start=st.sampled_from([0, 50, 100]), sinks=st.sampled_from([0, 2]), seed=st.integers(0, 99))
@pytest.mark.parametrize(("width", "capacity", "layer"), [(64, 128, None), (48, 256, 1)])
def test_tokens_that_share_rows_are_those_that_do_not(width, capacity, layer, data, start, sinks, seed):
    """Whatever is written in whatever order: 40 tokens at once, some of one row, or one at a time."""
    count, rng = cache_rows.together(capacity, width, width), np.random.default_rng(seed)
    lead, int8 = () if layer is None else (2,), layer is not None
    kept, scales = jnp.int8 if int8 else jnp.float32, (jnp.zeros((*lead, ROWS, 3, capacity)),) * 2 if int8 else ()

    def empty(count: int) -> caches.KVCache:
        rows = jnp.zeros((*lead, ROWS, 3, capacity // count, width * count), kept)
        positions = jnp.full((*lead, ROWS, capacity), -1, jnp.int32)
        cache = caches.KVCache(rows, rows, positions, *scales, sinks=sinks)
        return cache.view(None if layer is None else jnp.int32(layer))

    plain, shared = empty(1), empty(count)
    assert count == shared.together > 1 and shared.keys.shape[-1] % cache_rows.LANES == 0
    for length in data.draw(st.lists(st.sampled_from([1, 40]), min_size=1, max_size=5)):
        at = np.stack([rng.permutation(np.arange(start, start + length)) for _ in range(ROWS)])
        at = jnp.asarray(np.where(rng.random(at.shape) < 0.1, -1, at), jnp.int32)
        new = [jnp.asarray(rng.normal(size=(ROWS, length, 3, width)), jnp.float32) for _ in range(2)]
        plain, shared, start = plain.write(*new, at), shared.write(*new, at), start + length
    want, got = ([np.asarray(x) for x in cache.read(jnp.float32)] for cache in (plain, shared))
    np.testing.assert_array_equal(shared.by_slot, want[2])
    for row in range(ROWS):
        order = [np.argsort(held[row], kind="stable") for *_, held in (want, got)]
        for a, b in zip(want, got, strict=True):
            a, b = a[row][order[0]], b[row][order[1]]
            np.testing.assert_array_equal(a[want[2][row][order[0]] >= 0], b[got[2][row][order[1]] >= 0])


def test_rows_are_shared_where_that_leaves_no_lane_empty():
    assert [cache_rows.together(512, width) for width in (64, 80, 96, 128, 192, 576, 256)] == [2, 8, 4, 1, 2, 2, 1]
    assert cache_rows.together(512, 192, 128) == 2
    assert cache_rows.together(500, 64) == cache_rows.together(64, 80) == cache_rows.together(512, 8) == 1


def test_values_are_stored_in_the_dtype_of_the_cache():
    cache = empty(4)
    cache = dataclasses.replace(cache, keys=cache.keys.astype("bfloat16"), values=cache.values.astype("bfloat16"))
    positions = np.zeros((ROWS, 1), int)
    written = cache.write(payload(positions, 1), payload(positions, -1), jnp.asarray(positions))
    assert written.keys.dtype == written.values.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("window", "sinks", "length", "slack", "slots"),
    [(8, 0, 40, 0, 8), (None, 0, 40, 0, 40), (8, 0, 5, 0, 5), (8, 3, 40, 0, 11), (8, 3, 10, 0, 10), (8, 3, 40, 4, 15)],
)
def test_capacity_is_what_the_layer_can_see(window, sinks, length, slack, slots):
    mask = spec.Mask(causal=True, window=window, sinks=sinks)
    assert caches.capacity(mask, length, slack) == slots


@settings(max_examples=60, deadline=None)
@given(
    window=st.integers(1, 6),
    sinks=st.integers(0, 3),
    slack=st.integers(0, 5),
    length=st.integers(1, 8),
    max_length=st.sampled_from([4, 9, 60]),
)
def test_new_tokens_find_every_key_that_they_see(window, sinks, slack, length, max_length):
    """Whatever the ring's length and the call's: what `extend` gives holds all visible keys, each once."""
    mask = spec.Mask(causal=True, window=window, sinks=sinks)
    slots = caches.capacity(mask, max_length, slack)
    cache = empty(slots, sinks=sinks if slots > sinks else 0)
    for start in range(0, max_length - length + 1, length):
        positions = np.tile(np.arange(start, start + length), (ROWS, 1))
        new = payload(positions, 1), payload(positions, -1), jnp.asarray(positions, jnp.int32)
        cache, kept = caches.extend(cache, mask, *new)
        keys, _, held = kept.read(new[0].dtype)
        seen = np.asarray(visible(mask, new[2], held))
        for row in range(ROWS):
            for i, query in enumerate(positions[row]):
                found = sorted(np.asarray(held)[row, seen[row, i]].tolist())
                assert found == [p for p in range(query + 1) if query - p < window or p < sinks]
        told = np.where(np.asarray(held) >= 0, np.asarray(payload(np.asarray(held), 1))[..., 0, 0], 0)
        np.testing.assert_array_equal(np.asarray(keys)[..., 0, 0], told)


@pytest.mark.parametrize("layers", [(), (3,)])
def test_dropped_tokens_are_forgotten_and_slack_keeps_what_they_covered(layers):
    window, slack = 4, 3
    cache = empty(window + slack, *layers).view(jnp.int32(1) if layers else None)
    for start, count in ((0, 9), (9, 1 + slack)):  # a token and a draft of `slack` more
        positions = np.tile(np.arange(start, start + count), (ROWS, 1))
        cache = cache.write(payload(positions, 1), payload(positions, -1), jnp.asarray(positions, jnp.int32))
    cache = cache.drop(jnp.array([10, 12]))
    _, _, held = cache.read(jnp.float32)
    assert sorted(p for p in np.asarray(held)[0].tolist() if p >= 0)[-window:] == [6, 7, 8, 9]
    assert sorted(p for p in np.asarray(held)[1].tolist() if p >= 0)[-window:] == [8, 9, 10, 11]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=4, max_size=4))
def test_eight_bits_are_within_half_a_step(numbers):
    x = np.array(numbers, np.float32)
    values, scale = caches.quantize(jnp.asarray(x))
    assert values.dtype == jnp.int8 and np.abs(np.asarray(values)).max() <= 127
    assert (np.abs(np.asarray(values) * np.asarray(scale) - x) <= 0.501 * np.asarray(scale)).all()


def test_eight_bit_keys_and_values_come_back_with_a_scale_a_token_and_head():
    mask, dims = spec.Mask(causal=True), (ROWS, 2, 6)
    rng = np.random.default_rng(0)
    cache = caches.KVCache(
        jnp.zeros((*dims, 8), jnp.int8),
        jnp.zeros((*dims, 8), jnp.int8),
        jnp.full((ROWS, 6), -1),
        *[jnp.zeros(dims)] * 2,
    )
    new = [rng.normal(size=(ROWS, 3, 2, 8)) * 10.0 ** rng.integers(-3, 3, (ROWS, 3, 2, 1)) for _ in range(2)]
    positions = np.tile(np.arange(3), (ROWS, 1))
    cache, kept = caches.extend(cache, mask, *(jnp.asarray(x, jnp.float32) for x in new), positions)
    keys, values, _ = kept.read(jnp.float32)
    for got, want in zip((keys, values), new, strict=True):
        step = np.abs(want).max(-1, keepdims=True) / 127
        assert (np.abs(np.asarray(got)[:, :3] - want) <= 0.51 * step).all()


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
    cache = caches.init(stack, batch=2, max_length=16, dtype="bfloat16")
    shapes = [[layer.mixer.keys.shape for layer in getattr(cache, part)] for part in ("head", "body", "tail")]
    assert shapes == [[(2, 1, 16, 4)], [(3, 2, 1, 4, 4), (3, 2, 1, 16, 4)], [(2, 1, 4, 4)] * 2]
    assert all(
        layer.mixer.keys.dtype == jnp.bfloat16 and (np.asarray(layer.mixer.positions) == -1).all()
        for layer in (*cache.head, *cache.body, *cache.tail)
    )
