"""Attention over blocks of keys with an online softmax: memory grows with T, not with T·S.

Milakov & Gimelshein 2018 (arXiv:1805.02867) for the running softmax, Rabe & Staats 2021 (arXiv:2112.05682) for
attention in linear memory, Dao et al. 2022 (FlashAttention, arXiv:2205.14135) for the backward pass.

One loop walks a schedule of (query block, key block) pairs, so that the program stays the same size however many
blocks there are. Inside a block `ops.mask.visible` decides; the schedule only leaves out blocks in which it shows
nothing.

Block letters: q rows of a query block, s rows of a key block.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from transformer.ops.attention.call import Call, Where
from transformer.ops.mask import visible
from transformer.spec import Mask

# A masked score lies so far below the lowest running maximum that its exponential is 0 in rows that see nothing, too.
MASKED = -1e30
LOWEST = -1e29


class Rows(NamedTuple):
    """One side's rows cut into blocks: positions and segments, [blocks, B, rows] each."""

    positions: Int[Array, "blocks B rows"]
    segments: Int[Array, "blocks B rows"] | None


def refuse(call: Call) -> str | None:
    """Serves every call."""
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    call: Call,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    where: Where,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N Hv"]:
    """Attention with memory that grows with T + S, forward and backward (Dao et al. 2022, algorithms 1 and 4)."""
    return _forward(call, q, k, v, where, sinks)[0]


def schedule(mask: Mask, length: int, block: int) -> np.ndarray:
    """Pairs (query block, key block) in which an aligned call may show something, query-major: int32 [pairs, 2].

    Row indices bound positions from below (`Call.aligned`), so a block is left out for every input or for none.
    """
    size = block_size(length, block)
    first = np.arange(0, length, size)
    last = np.minimum(first + size, length) - 1
    behind = first[:, None] - last  # least row distance where the query block comes after the key block
    ahead = first - last[:, None]
    live = np.maximum(behind, ahead) < (mask.window or length)
    if mask.causal:
        live &= ahead <= 0
    return np.argwhere(live).astype(np.int32)


def block_size(length: int, block: int) -> int:
    """Rows of a block: the fewest that need no more blocks than `block` does, so that little is padded."""
    return -(-length // -(-length // block))


def _live(mask: Mask, q: Rows, k: Rows) -> tuple[Array, Array]:
    """The pairs that may show something at these positions, first in an int32 [pairs, 2], and their number.

    Bounds of positions and segments a block and batch row decide: nothing of size T·S is made.
    """
    q_low, q_high = _bounds(q.positions, q.positions >= 0)
    k_low, k_high = _bounds(k.positions, k.positions >= 0)
    q_low, q_high = q_low[:, None], q_high[:, None]
    live = (q_low <= q_high) & (k_low <= k_high)
    if mask.causal:
        live &= k_low <= q_high
    if mask.window is not None:
        live &= (q_low - k_high < mask.window) & (k_low - q_high < mask.window)
    if q.segments is not None and k.segments is not None:
        q_first, q_last = _bounds(q.segments, q.positions >= 0)
        k_first, k_last = _bounds(k.segments, k.positions >= 0)
        live &= (k_first <= q_last[:, None]) & (q_first[:, None] <= k_last)
    live = jnp.any(live, axis=-1)
    pairs = jnp.stack(jnp.nonzero(live, size=live.size, fill_value=0), axis=-1)
    return pairs.astype(jnp.int32), jnp.sum(live, dtype=jnp.int32)


def _bounds(x: Int[Array, "blocks B rows"], used: Array) -> tuple[Array, Array]:
    # Halves of the range, so that differences of bounds can't overflow where nothing is used.
    far = jnp.iinfo(x.dtype).max // 2
    return jnp.min(x, axis=-1, where=used, initial=far), jnp.max(x, axis=-1, where=used, initial=-far)


def _plan(call: Call, q: Rows, k: Rows, length: int) -> tuple[Array, int | Array]:
    if call.aligned and q.segments is None:
        pairs = schedule(call.mask, length, call.block)
        return jnp.asarray(pairs), len(pairs)
    return _live(call.mask, q, k)


def _cut(x: Array, block: int, fill: int = 0) -> Array:
    """[B, T, ...] -> [blocks, B, rows, ...], padded with `fill`."""
    size = block_size(x.shape[1], block)
    blocks = -(-x.shape[1] // size)
    padding = [(0, 0), (0, blocks * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, padding, constant_values=fill)
    return jnp.moveaxis(x.reshape(x.shape[0], blocks, size, *x.shape[2:]), 1, 0)


def _cut_heads(x: Float[Array, "B T N H"], block: int, kv_heads: int) -> Float[Array, "blocks B K G rows H"]:
    x = _cut(x, block)
    x = x.reshape(*x.shape[:3], kv_heads, -1, x.shape[-1])
    return jnp.transpose(x, (0, 1, 3, 4, 2, 5))


def _join_heads(x: Float[Array, "blocks B K G rows H"], length: int) -> Float[Array, "B T N H"]:
    x = jnp.transpose(x, (1, 0, 4, 2, 3, 5))
    return x.reshape(x.shape[0], -1, x.shape[3] * x.shape[4], x.shape[-1])[:, :length]


def _cut_where(where: Where, block: int) -> tuple[Rows, Rows]:
    cut = lambda positions, segments: Rows(
        _cut(positions, block, fill=-1), None if segments is None else _cut(segments, block)
    )
    return cut(where.q_positions, where.q_segments), cut(where.k_positions, where.k_segments)


def _take(tree, i):
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def _put(x, i, value):
    return jax.lax.dynamic_update_index_in_dim(x, value, i, axis=0)


def _seen(mask: Mask, q: Rows, k: Rows) -> Array:
    """[B, 1, 1, q, s]."""
    return visible(mask, q.positions, k.positions, q.segments, k.segments)[:, None, None]


def _dot(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _cap(call: Call, scores: Array) -> Array:
    scores = scores * call.scale
    return scores if call.softcap is None else call.softcap * jnp.tanh(scores / call.softcap)


def _forward(call, q, k, v, where, sinks):
    """The output [B, T, N, Hv] and each query's log-sum-exp [blocks, B, K, G, q]."""
    length, kv_heads = q.shape[1], k.shape[2]
    q_rows, k_rows = _cut_where(where, call.block)
    pairs, count = _plan(call, q_rows, k_rows, length)
    qs = _cut_heads(q, call.block, kv_heads)
    ks, vs = (_cut_heads(x, call.block, kv_heads)[:, :, :, 0] for x in (k, v))

    def step(n, carry):
        i, j = pairs[n]
        acc, top, total = _take(carry, i)
        scores = _cap(call, _dot("bkgqh,bksh->bkgqs", _take(qs, i), _take(ks, j)))
        scores = jnp.where(_seen(call.mask, _take(q_rows, i), _take(k_rows, j)), scores, MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        fade = jnp.exp(top - new_top)
        total = total * fade + jnp.sum(weights, axis=-1)
        acc = acc * fade[..., None] + _dot("bkgqs,bksh->bkgqh", weights.astype(v.dtype), _take(vs, j))
        return tuple(_put(x, i, value) for x, value in zip(carry, (acc, new_top, total)))

    # A sink is a key of value zero: the running softmax starts from it.
    top = jnp.full(qs.shape[:-1], LOWEST, jnp.float32)
    total = jnp.zeros(qs.shape[:-1], jnp.float32)
    if sinks is not None:
        top = jnp.broadcast_to(_sink_rows(sinks, kv_heads), top.shape)
        total = total + 1
    acc = jnp.zeros((*qs.shape[:-1], v.shape[-1]), jnp.float32)
    acc, top, total = jax.lax.fori_loop(0, count, step, (acc, top, total))
    empty = total == 0
    total = jnp.where(empty, 1, total)
    out = _join_heads((acc / total[..., None]).astype(q.dtype), length)
    return out, jnp.where(empty, 0, top + jnp.log(total))


def _sink_rows(sinks, kv_heads):
    return sinks.astype(jnp.float32).reshape(kv_heads, -1, 1)


def _save(call, q, k, v, where, sinks):
    out, norm = _forward(call, q, k, v, where, sinks)
    return out, (q, k, v, where, sinks, out, norm)


def _backward(call, saved, d_out):
    """Gradients of q, k, v and sinks; the scores are made again, a block at a time."""
    q, k, v, where, sinks, out, norm = saved
    length, keys, kv_heads = q.shape[1], k.shape[1], k.shape[2]
    q_rows, k_rows = _cut_where(where, call.block)
    pairs, count = _plan(call, q_rows, k_rows, length)
    qs, outs, d_outs = (_cut_heads(x, call.block, kv_heads) for x in (q, out, d_out))
    ks, vs = (_cut_heads(x, call.block, kv_heads)[:, :, :, 0] for x in (k, v))
    delta = jnp.sum(outs.astype(jnp.float32) * d_outs.astype(jnp.float32), axis=-1)

    def step(n, carry):
        i, j = pairs[n]
        q, d_out, norm_i, delta_i = _take((qs, d_outs, norm, delta), i)
        k, v = _take((ks, vs), j)
        raw = _cap(call, _dot("bkgqh,bksh->bkgqs", q, k))
        scores = jnp.where(_seen(call.mask, _take(q_rows, i), _take(k_rows, j)), raw, MASKED)
        weights = jnp.exp(scores - norm_i[..., None])
        d_weights = _dot("bkgqh,bksh->bkgqs", d_out, v)
        d_scores = weights * (d_weights - delta_i[..., None])
        if call.softcap is not None:
            d_scores *= 1 - jnp.square(raw / call.softcap)
        d_scores = d_scores.astype(q.dtype)
        dq = _dot("bkgqs,bksh->bkgqh", d_scores, k)
        dk = _dot("bkgqs,bkgqh->bksh", d_scores, q)
        dv = _dot("bkgqs,bkgqh->bksh", weights.astype(d_out.dtype), d_out)
        return tuple(_put(x, at, _take(x, at) + d) for x, at, d in zip(carry, (i, j, j), (dq, dk, dv)))

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (qs, ks, vs))
    dq, dk, dv = jax.lax.fori_loop(0, count, step, zeros)
    dq = _join_heads((dq * call.scale).astype(q.dtype), length)
    dk = _join_heads((dk * call.scale)[:, :, :, None].astype(k.dtype), keys)
    dv = _join_heads(dv[:, :, :, None].astype(v.dtype), keys)
    if sinks is None:
        return dq, dk, dv, None, None
    taken = jnp.exp(_sink_rows(sinks, kv_heads) - norm)
    d_sinks = -jnp.sum(taken * delta, axis=(0, 1, 4)).reshape(sinks.shape).astype(sinks.dtype)
    return dq, dk, dv, None, d_sinks


attend.defvjp(_save, _backward)
