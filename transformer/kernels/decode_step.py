"""What a decode kernel does at a step of its grid: one block of a cache into the running softmax of a row's queries."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from transformer.kernels.decode_blocks import Blocks, Sizes
from transformer.ops import cache_rows
from transformer.ops.attention.call import Call
from transformer.ops.mask import sees

# A masked score lies so far below the lowest running maximum that it weighs exactly 0, in rows that see nothing too.
MASKED, LOWEST = -1e30, -1e29


class Scalars(NamedTuple):
    """What is known before a block is: which blocks to load, and where the queries are."""

    layer: Int[Array, " 1"]
    steps: Int[Array, " 1"]  # of each split
    counts: Int[Array, " B"]
    numbers: Int[Array, " B_blocks"]
    q_positions: Int[Array, " B_T"]


class Arrays(NamedTuple):
    """What is loaded by the block; absent parts are None."""

    q: Float[Array, "B K R H"]
    positions: Int[Array, "B 1 S2"]
    keys: Array
    values: Array | None
    key_scales: Array | None
    value_scales: Array | None
    sinks: Float[Array, "K R 1"] | None
    bias: Float[Array, "B K R S"] | None


class State(NamedTuple):
    """The online softmax of the heads of a block."""

    acc: Float[Array, "heads R Hv"]
    top: Float[Array, "heads R 1"]
    total: Float[Array, "heads R 1"]


def kernel(call: Call, sizes: Sizes, blocks: Blocks, length: int, s: Scalars, x: Arrays, out, *rest):
    (*log_total, state), row, split, step = rest, pl.program_id(0), pl.program_id(2), pl.program_id(3)
    steps = s.steps[0]
    at = split * steps + step

    @pl.when(step == 0)
    def _():
        state.acc[...] = jnp.zeros_like(state.acc)
        if x.sinks is None:
            state.top[...] = jnp.full_like(state.top, LOWEST)
            state.total[...] = jnp.zeros_like(state.total)
        else:  # a key of value 0, in one of the parts
            state.top[...] = jnp.where(split == 0, x.sinks[...], LOWEST)
            state.total[...] = jnp.full_like(state.total, jnp.where(split == 0, 1.0, 0.0))

    @pl.when(at < s.counts[row])
    def _():
        seen = sees(call.mask, _row_positions(sizes.rows, length, row, s), x.positions[...])
        rest = sizes.slots - s.numbers[row * blocks.count + at] * blocks.slots
        for head in range(blocks.heads):
            _add(call, sizes, blocks, head, seen, rest, x, state)

    @pl.when(step == steps - 1)
    def _():
        total = state.total[...]
        blind = total == 0
        total = jnp.where(blind, 1.0, total)
        out[...] = (state.acc[...] / total).astype(out.dtype)
        if log_total:
            log_total[0][...] = jnp.where(blind, MASKED, state.top[...] + jnp.log(total))


def _row_positions(rows: int, length: int, row: Int[Array, ""], s: Scalars) -> Int[Array, "R 1"]:
    """Position of the query of each row; -1 in no row of theirs (what it gives is cut off)."""
    token = jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0) % length
    at = jnp.full((rows, 1), s.q_positions[row * length], jnp.int32)
    for t in range(1, length):
        at = jnp.where(token == t, s.q_positions[row * length + t], at)
    return at


def _add(call: Call, sizes: Sizes, blocks: Blocks, head: int, seen, rest, x: Arrays, state: State) -> None:
    """One block of one key head into the running softmax; `rest` slots are left in the cache from its first on."""
    q, keys = x.q[head], cache_rows.cut(x.keys[head].astype(sizes.computed), sizes.together)
    scores = _dot(q, keys, 1) * call.scale
    if x.key_scales is not None:
        scores *= x.key_scales[head : head + 1]
    if x.bias is not None:
        scores += x.bias[head]
    if call.softcap is not None:
        scores = call.softcap * jnp.tanh(scores / call.softcap)
    scores = jnp.where(seen, scores, MASKED)
    old = state.top[head]
    top = jnp.maximum(old, jnp.max(scores, axis=-1, keepdims=True))
    weights, fade = jnp.exp(scores - top), jnp.exp(old - top)
    state.top[head] = top
    state.total[head] = state.total[head] * fade + jnp.sum(weights, axis=-1, keepdims=True)
    if sizes.shares:
        values, scales = keys[:, : sizes.value], x.key_scales
    else:
        values = cache_rows.cut(x.values[head].astype(sizes.computed), sizes.together)
        scales = x.value_scales
    if scales is not None:  # where nothing is seen there may be no number
        weights = jnp.where(seen, weights * scales[head : head + 1], 0.0)
    if sizes.slots % blocks.slots:  # beyond the end there may be no number either, and 0 times that is none
        slot = jax.lax.broadcasted_iota(jnp.int32, (blocks.slots, 1), 0)
        values = jnp.where(slot < rest, values, jnp.zeros_like(values))
    state.acc[head] = state.acc[head] * fade + _dot(weights.astype(values.dtype), values, 0)


def _dot(a: Array, b: Array, axis: int) -> Array:
    return jax.lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)
