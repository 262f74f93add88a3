"""The decode kernel, interpreted: the formula in float64, over everything that a cache may hold."""

from dataclasses import dataclass, replace
from functools import cache as remembered
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from tests.ops.attention_formula import dense_buckets
from tests.ops.shared_rows import shared
from transformer.kernels import decode, decode_blocks
from transformer.ops.attention import Call, Extra, Where
from transformer.ops.cache import KVCache, quantize
from transformer.spec import Mask, RelativeBias

ROWS, BLOCK = 3, 16
CAUSAL, WINDOW = Mask(causal=True), Mask(causal=True, window=9)
STREAM = Mask(causal=True, window=20, sinks=3)
BIAS = RelativeBias(num_buckets=6, max_distance=12, bidirectional=False)


@dataclass(frozen=True)
class Case:
    """Shapes and terms; a cache of `slots` in blocks, of which the last is not full, `together` of them to a row."""

    mask: Mask = CAUSAL
    queries: int = 1
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (8, 8)
    slots: int = 40
    kept: str = "float32"
    layer: int | None = None
    shares: int | None = None  # values are so many first features of the keys
    softcap: float | None = None
    sinks: bool = False
    relative: RelativeBias | None = None
    splits: int = 1
    block: int = BLOCK
    together: int = 1

    @property
    def call(self) -> Call:
        return Call(self.mask, 0.3, self.softcap, relative=self.relative)


CASES = {
    "grouped": Case(),
    "one block": Case(slots=13, heads=(3, 3), dims=(8, 5)),
    "window": Case(mask=WINDOW, queries=3, layer=1, softcap=1.5),
    "sinks before a ring": Case(mask=STREAM, queries=2, slots=26, kept="bfloat16", splits=2),
    "both directions": Case(mask=Mask(causal=False), heads=(4, 1), dims=(12, 4)),
    "eight bits": Case(kept="int8", layer=2, sinks=True, heads=(6, 3), queries=2),
    "bias": Case(relative=BIAS, queries=2, splits=2, softcap=2.0, sinks=True),
    "latent": Case(heads=(5, 1), dims=(24, 0), shares=16, queries=2, layer=0),
    "latent, eight bits": Case(heads=(5, 1), dims=(24, 0), shares=16, kept="int8", splits=3),
    "shared rows": Case(dims=(64, 64), slots=192, block=128, together=2, layer=1, queries=2, kept="bfloat16"),
    "latent, shared rows of eight bits": Case(
        heads=(5, 1), dims=(192, 0), shares=128, slots=192, block=64, together=2, kept="int8", splits=2, mask=WINDOW
    ),
    "many heads": Case(heads=(16, 16), dims=(4, 4), kept="int8", slots=33),
}
by_case = pytest.mark.parametrize("name", CASES)


@st.composite
def rows_of(draw, case: Case):
    """(query positions [B, T], slot positions [B, S]): rows of any length, with holes, padding and empty rows."""
    slots = np.full((ROWS, case.slots), -1, np.int32)
    queries = np.full((ROWS, case.queries), -1, np.int32)
    for row in range(ROWS):
        length = draw(st.integers(0, 2 * case.slots))
        sinks = case.mask.sinks
        for p in range(length):
            slots[row, p if p < sinks else sinks + (p - sinks) % (case.slots - sinks)] = p
        slots[row, draw(st.lists(st.integers(0, case.slots - 1), max_size=20))] = -1
        last = np.arange(length - case.queries, length)
        queries[row] = np.where(last < draw(st.sampled_from([0, 0, length])), -1, last)
    return queries, slots


def make(case: Case, queries, slots, seed: int):
    """q, cache, where and learned terms, with noise in every slot, empty ones too."""
    rng = np.random.default_rng(seed)
    (n, k), (key, value), lead = case.heads, case.dims, () if case.layer is None else (3,)

    def noise(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    keys, values = noise(*lead, ROWS, k, case.slots, key), noise(*lead, ROWS, k, case.slots, value)
    scales = None, None
    if case.kept == "int8":
        (keys, key_scales), (values, value_scales) = quantize(keys), quantize(values)
        scales = key_scales, value_scales if value else None
    else:
        keys, values = keys.astype(case.kept), values.astype(case.kept)
    if case.together > 1:
        keys, values = shared(keys, case.together), shared(values, case.together)
    positions = jnp.broadcast_to(jnp.asarray(slots), (*lead, ROWS, case.slots))
    cache = KVCache(keys, values, positions, *scales, None if case.layer is None else jnp.int32(case.layer))
    table = noise(case.relative.num_buckets, n) if case.relative else None
    extra = Extra(noise(n) if case.sinks else None, table)
    q = noise(ROWS, case.queries, n, key) * min(1, (24 / key) ** 0.5)  # scores of a few units, however many features
    return q, cache, Where(jnp.asarray(queries), cache.held), extra


def formula(case: Case, q, cache: KVCache, where: Where, extra: Extra):
    """softmax(cap(scale · q kᵀ + bias) + mask) v in float64 NumPy, pair by pair of positions."""
    keys, values, _ = (np.asarray(x, np.float64) for x in cache.read(jnp.float32))
    values = values if case.shares is None else keys[..., : case.shares]
    keys, values = (np.repeat(x, case.heads[0] // case.heads[1], axis=2) for x in (keys, values))
    scores = 0.3 * np.einsum("btnh,bsnh->bnts", np.asarray(q, np.float64), keys)
    if case.relative:
        scores += np.moveaxis(np.asarray(extra.bias, np.float64)[dense_buckets(case.relative, where)], -1, 1)
    if case.softcap:
        scores = case.softcap * np.tanh(scores / case.softcap)
    weights = np.exp(scores) * shown(case.mask, where)[:, None]
    total = weights.sum(-1, keepdims=True)
    if extra.sinks is not None:
        total += np.exp(np.asarray(extra.sinks, np.float64))[:, None, None]
    return np.einsum("bnts,bsnh->btnh", weights / np.where(total == 0, 1, total), values)


def shown(mask: Mask, where: Where):
    """What a query sees, told once more and otherwise."""

    @np.vectorize
    def pair(q, k):
        if q < 0 or k < 0 or (mask.causal and k > q):
            return False
        return mask.window is None or abs(q - k) <= mask.window - 1 or k in range(mask.sinks)

    return pair(np.asarray(where.q_positions)[:, :, None], np.asarray(where.k_positions)[:, None, :])


@remembered
def run(name: str, interpret=True):
    case = CASES[name]
    slots = min(case.block, case.slots)
    options = dict(value_dim=case.shares, slots=slots, splits=case.splits, interpret=interpret)
    return jax.jit(partial(decode.attend, case.call, **options))


def blocks_of(case: Case) -> decode_blocks.Blocks:
    return decode_blocks.Blocks(case.heads[1], min(case.block, case.slots), -(-case.slots // case.block))


@by_case
@settings(max_examples=12, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99))
def test_kernel_is_the_formula(name, data, seed):
    case = CASES[name]
    arguments = make(case, *data.draw(rows_of(case)), seed)
    got, want = np.asarray(run(name)(*arguments), np.float64), formula(case, *arguments)
    # Sums over slots, whose rounding grows as the root of their number.
    rounding = 5e-7 * max(np.sqrt(case.slots / 24), 1)
    assert np.abs(got - want).max() <= rounding * max(np.abs(want).max(), 1)
    blind = np.asarray(arguments[2].q_positions) < 0
    assert not got[blind].any()


@by_case
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_blocks_are_those_that_show_something(name, data):
    case = CASES[name]
    q_positions, k_positions = map(jnp.asarray, data.draw(rows_of(case)))
    blocks = blocks_of(case)
    padded = decode_blocks.padded_positions(k_positions, blocks)
    counts, numbers = decode_blocks.needed(case.mask, q_positions, padded, blocks)
    seen = shown(case.mask, Where(q_positions, k_positions)).any(1)
    numbers = np.asarray(numbers).reshape(ROWS, -1)
    for row in range(ROWS):
        want = sorted({slot // blocks.slots for slot in np.flatnonzero(seen[row])})
        assert numbers[row, : counts[row]].tolist() == want


@by_case
def test_no_other_block_is_computed_with(name):
    """Keys, values and scales of blocks that show nothing are no numbers, and it does not matter."""
    case = CASES[name]
    slots = np.tile(np.arange(case.slots, dtype=np.int32), (ROWS, 1))
    slots[0, 10:], slots[1, :20] = -1, -1
    queries = np.tile(np.arange(case.slots - case.queries, case.slots, dtype=np.int32), (ROWS, 1))
    q, cache, where, extra = make(case, queries, slots, 0)
    want = run(name)(q, cache, where, extra)
    blocks = blocks_of(case)
    used = shown(case.mask, Where(queries, slots)).any(1)
    used = np.pad(used, ((0, 0), (0, blocks.count * blocks.slots - case.slots)))
    used = used.reshape(ROWS, blocks.count, -1).any(2).repeat(blocks.slots, 1)[:, : case.slots]
    assert case.slots <= case.block or not used.all()

    def spoil(x, *after):
        rows = used[:, :: case.slots // x.shape[2 + (case.layer is not None)]] if x is not None else None
        return x if x is None or x.dtype == jnp.int8 else jnp.where(rows[:, None, :, *after], x, jnp.nan)

    spoiled = KVCache(
        spoil(cache.keys, None), spoil(cache.values, None), cache.positions,
        spoil(cache.key_scales), spoil(cache.value_scales), cache.layer,
    )  # fmt: skip
    np.testing.assert_array_equal(run(name)(q, spoiled, where, extra), want)


def closely(cores: int) -> list:
    """All cases; of two cores three of them by default."""
    few = ("window", "eight bits", "latent") if cores == 2 else ()
    return [pytest.param(name, cores, marks=() if name in few else pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize(("name", "cores"), closely(1) + closely(2))
def test_no_races_under_tpu_semantics(name, cores):
    """Asynchronous copies, semaphores, uninitialised memory and cores that share a grid as on chips; a race raises."""
    case = CASES[name]
    slots = np.tile(np.arange(case.slots, dtype=np.int32), (ROWS, 1))
    queries = np.full((ROWS, case.queries), case.slots - 1, np.int32)
    arguments = make(case, queries, slots, 0)
    params = pltpu.InterpretParams(
        detect_races=True, out_of_bounds_reads="uninitialized", num_cores_or_threads=cores, random_seed=cores
    )  # fmt: skip
    got = run(name, params)(*arguments)
    assert np.abs(np.asarray(got) - formula(case, *arguments)).max() <= 1e-6


def test_bfloat16_is_rounded_once():
    """Scores, softmax and sums are float32: what is lost is the rounding of weights, values and output."""
    case = CASES["grouped"]
    slots = np.tile(np.arange(case.slots, dtype=np.int32), (ROWS, 1))
    q, cache, where, extra = make(case, slots[:, -1:], slots, 0)
    narrow = KVCache(cache.keys.astype(jnp.bfloat16), cache.values.astype(jnp.bfloat16), cache.positions)
    q = q.astype(jnp.bfloat16)
    got = run("grouped")(q, narrow, where, extra)
    assert got.dtype == jnp.bfloat16
    want = formula(case, q, narrow, where, extra)
    assert np.abs(np.asarray(got, np.float64) - want).max() <= 2**-8 * np.abs(want).max()


def test_lanes_that_features_leave_empty_are_counted():
    """Five of four and a half times 128, unless two tokens share nine."""
    bfloat16 = jnp.dtype("bfloat16")
    sizes = decode_blocks.Sizes(3, 1, 100, 1, 16, 576, 512, True, bfloat16, bfloat16, False, False)
    assert sizes.cache_bytes() == 3 * 100 * (2 * 576 + 4)
    assert sizes.cache_bytes(padded=True) == 3 * 100 * (2 * 640 + 4)
    assert replace(sizes, together=2).cache_bytes(padded=True) == sizes.cache_bytes()
    ends = 3 * 16 * (576 + 512) * 2
    assert decode_blocks.cost(sizes).bytes_accessed == sizes.cache_bytes(padded=True) + ends


@settings(max_examples=200, deadline=None)
@given(
    batch=st.integers(1, 64), heads=st.sampled_from([1, 2, 8, 12, 16, 25, 32]), slots=st.integers(1, 200_000),
    rows=st.sampled_from([8, 16, 128, 256]), dim=st.sampled_from([64, 80, 128, 256, 576]),
    kept=st.sampled_from(["int8", "bfloat16", "float32"]), shares=st.booleans(), biased=st.booleans(),
    together=st.sampled_from([1, 2, 8]),
)  # fmt: skip
def test_chosen_blocks_fit_and_cover_the_cache(batch, heads, slots, rows, dim, kept, shares, biased, together):
    kept = jnp.dtype(kept)
    slots += -slots % (32 * together) if together > 1 else 0
    scaled = kept == jnp.int8
    sizes = decode_blocks.Sizes(
        batch, heads, slots, together, rows, dim, dim, shares, kept, jnp.dtype("bfloat16"), scaled, biased
    )  # fmt: skip
    blocks, least = decode_blocks.choose(sizes), max(128, 32 * together)
    if blocks is None:
        heads = decode_blocks._head_block(sizes)
        assert decode_blocks.vmem_bytes(sizes, heads, min(least, slots)) > decode_blocks.VMEM_BYTES
        return
    assert decode_blocks.vmem_bytes(sizes, blocks.heads, blocks.slots) <= decode_blocks.VMEM_BYTES
    assert blocks.slots == slots if blocks.count == 1 else blocks.slots % least == 0
    assert 0 <= blocks.slots * blocks.count - slots < blocks.slots
    assert heads % blocks.heads == 0
    assert not scaled or blocks.heads in (heads, 8)
