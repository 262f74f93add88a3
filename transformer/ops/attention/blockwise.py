"""Attention over blocks of keys with an online softmax: memory grows with T + S, not with T·S.

Milakov & Gimelshein 2018 (arXiv:1805.02867) for the running softmax, Rabe & Staats 2021 (arXiv:2112.05682) for
attention in linear memory, Dao et al. 2022 (FlashAttention, arXiv:2205.14135) for the backward pass.

One loop walks a list of (query block, key block) pairs, so the program is as small for many blocks as for few.
`ops.mask.visible` alone decides inside a block; the list only leaves out blocks in which it shows nothing: at
trace time where row indices bound the mask, else at run time from the bounds of each block's positions.

Shapes inside: an array cut into blocks is [blocks, B, K, G, rows, H]; in einsums q and s are a block's rows.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from transformer.ops import relative_bias
from transformer.ops.attention.blocks import Rows, block_size, cut, cut_rows, shown_blocks
from transformer.ops.attention.call import NOTHING, Call, Extra, Where, deltas, gradients_of_extra
from transformer.ops.mask import BLIND
from transformer.spec import Mask

# A masked score lies so far below the lowest running maximum that it weighs exactly 0, in rows that see nothing too.
MASKED = -1e30
LOWEST = -1e29

# Rows of a block where the call names none.
BLOCK = 128

# Whether `shard_map` can tell on which devices its results differ.
TYPED = True


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
    extra: Extra = NOTHING,
) -> Float[Array, "B T N Hv"]:
    """Attention in memory that grows with T + S, forward and backward (Dao et al. 2022, algorithms 1 and 4).

    Raises:
      ValueError: an aligned call with T != S.
    """
    return forward(call, q, k, v, where, extra)[0]


def _pairs(call: Call, q: Rows, k: Rows, lengths: tuple[int, int]) -> tuple[Int[Array, "pairs 2"], int | Array]:
    """Block pairs to visit, query-major, and how many of them; that number is known at trace time where it can be."""
    shown, bounded = shown_blocks(call, q, k, lengths)
    if bounded is None:
        pairs = np.argwhere(shown).astype(np.int32)
        return jnp.asarray(pairs), len(pairs)
    shown = jnp.any(bounded, axis=0)
    pairs = jnp.stack(jnp.nonzero(shown, size=shown.size, fill_value=0), axis=-1)
    return pairs.astype(jnp.int32), jnp.sum(shown, dtype=jnp.int32)


def _cut_heads(x: Float[Array, "B T N H"], block: int, kv_heads: int) -> Float[Array, "blocks B K G rows H"]:
    x = cut(x, block_size(x.shape[1], block))
    x = x.reshape(*x.shape[:3], kv_heads, -1, x.shape[-1])
    return jnp.transpose(x, (0, 1, 3, 4, 2, 5))


def _join_heads(x: Float[Array, "blocks B K G rows H"], length: int) -> Float[Array, "B T N H"]:
    blocks, batch, kv_heads, group, size, dim = x.shape
    x = jnp.transpose(x, (1, 0, 4, 2, 3, 5)).reshape(batch, blocks * size, kv_heads * group, dim)
    return x[:, :length]


def _turned(x: Float[Array, "blocks B K G rows H"]) -> Float[Array, "blocks B K H G rows"]:
    return jnp.moveaxis(x, -1, 3)


def _take[T](tree: T, i: Array) -> T:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def _put(x: Array, i: Array, value: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(x, value, i, axis=0)


def _dot(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _capped_scores(
    call: Call, q: Float[Array, "B K G q H"], k: Float[Array, "B K s H"], bias: Float[Array, "B N q s"] | None
) -> Float[Array, "B K G q s"]:
    scores = _dot("bkgqh,bksh->bkgqs", q, k) * call.scale
    if bias is not None:
        scores += bias.reshape(scores.shape)
    return scores if call.softcap is None else call.softcap * jnp.tanh(scores / call.softcap)


def _hide(mask: Mask, scores: Float[Array, "B K G q s"], q: Rows, k: Rows) -> Float[Array, "B K G q s"]:
    seen = Where(q.positions, k.positions, q.segments, k.segments, q.orders, k.orders).visible(mask)
    return jnp.where(seen[:, None, None], scores, MASKED)


class _Blocks(NamedTuple):
    """What both passes read, cut into blocks, and the pairs of blocks that they visit."""

    q: Float[Array, "q_blocks B K G q H"]
    k: Float[Array, "k_blocks B K s H"]
    v: Float[Array, "k_blocks B K s Hv"]
    q_rows: Rows
    k_rows: Rows
    pairs: Int[Array, "pairs 2"]
    count: int | Array


def _buckets(call: Call, q: Rows, k: Rows) -> Int[Array, "B q s"] | None:
    return None if call.relative is None else relative_bias.buckets(call.relative, q.positions, k.positions)


def _bias(table: Float[Array, "R N"] | None, bucket: Int[Array, "B q s"] | None) -> Float[Array, "B N q s"] | None:
    return None if bucket is None else relative_bias.bias(table, bucket)


def _blocks(call: Call, q: Array, k: Array, v: Array, where: Where) -> _Blocks:
    kv_heads = k.shape[2]
    block = call.block or BLOCK
    q_rows, k_rows = cut_rows(where, block_size(q.shape[1], block), block_size(k.shape[1], block))
    pairs, count = _pairs(call, q_rows, k_rows, (q.shape[1], k.shape[1]))
    k, v = (_cut_heads(x, block, kv_heads)[:, :, :, 0] for x in (k, v))
    return _Blocks(_cut_heads(q, block, kv_heads), k, v, q_rows, k_rows, pairs, count)


def forward(
    call: Call, q: Array, k: Array, v: Array, where: Where, extra: Extra
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """The output, and every query's log of the softmax denominator, `BLIND` where it sees nothing."""
    x = _blocks(call, q, k, v, where)

    def step(n, carry):
        i, j = x.pairs[n]
        # Without the barrier XLA reads the old maximum after it wrote the new one, and so copies all of it each step.
        acc, top, total = jax.lax.optimization_barrier(_take(carry, i))
        q_rows, k_rows = _take(x.q_rows, i), _take(x.k_rows, j)
        bias = _bias(extra.bias, _buckets(call, q_rows, k_rows))
        scores = _hide(call.mask, _capped_scores(call, _take(x.q, i), _take(x.k, j), bias), q_rows, k_rows)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights, fade = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
        total = total * fade + jnp.sum(weights, axis=-1)
        acc = acc * fade[..., None] + _dot("bkgqs,bksh->bkgqh", weights.astype(v.dtype), _take(x.v, j))
        return tuple(_put(old, i, new) for old, new in zip(carry, (acc, new_top, total), strict=True))

    # Like the queries, so that under `shard_map` they are known to differ where those do.
    acc = jnp.zeros_like(x.q, jnp.float32, shape=(*x.q.shape[:-1], v.shape[-1]))
    total = jnp.zeros_like(acc, shape=acc.shape[:-1])
    top = total + LOWEST
    if extra.sinks is not None:  # a key of value 0
        top, total = total + _by_group(extra.sinks, k.shape[2]), total + 1
    acc, top, total = jax.lax.fori_loop(0, x.count, step, (acc, top, total))
    blind = total == 0
    total = jnp.where(blind, 1, total)
    out = _join_heads((acc / total[..., None]).astype(q.dtype), q.shape[1])
    log_total = jnp.where(blind, BLIND, top + jnp.log(total))
    return out, jnp.swapaxes(_join_heads(log_total[..., None], q.shape[1])[..., 0], 1, 2)


def _by_group(sinks: Float[Array, " N"], kv_heads: int) -> Float[Array, "K G 1"]:
    return sinks.astype(jnp.float32).reshape(kv_heads, -1, 1)


def _save(call: Call, q: Array, k: Array, v: Array, where: Where, extra: Extra):
    out, log_total = (checkpoint_name(x, "attended") for x in forward(call, q, k, v, where, extra))
    return out, (q, k, v, where, extra, out, log_total)


def _backward(call: Call, saved, d_out: Array):
    q, k, v, where, extra, out, log_total = saved
    delta = deltas(out, d_out)
    dq, dk, dv, d_table = gradients(call, q, k, v, where, extra, d_out, log_total, delta)
    return dq, dk, dv, None, gradients_of_extra(extra, log_total, delta, d_table)


def gradients(
    call: Call,
    q: Array,
    k: Array,
    v: Array,
    where: Where,
    extra: Extra,
    d_out: Float[Array, "B T N Hv"],
    log_total: Float[Array, "B N T"],
    delta: Float[Array, "B N T"],
) -> tuple[Array, Array, Array, Float[Array, "B N R"] | None]:
    """Of q, k and v, and of the table of biases in each row of the batch.

    Args:
      log_total, delta: of each query's whole softmax, of which these keys may be a part.
    """
    x = _blocks(call, q, k, v, where)
    kv_heads, block, float32 = k.shape[2], call.block or BLOCK, jnp.float32
    d_outs = _cut_heads(d_out, block, kv_heads)
    log_total, delta = (_cut_heads(jnp.swapaxes(a, 1, 2)[..., None], block, kv_heads) for a in (log_total, delta))

    # Turned once, so that what keys sum over queries needs no turned scores, which are larger.
    turned = _turned(x.q), _turned(d_outs)

    def step(n, carry):
        i, j = x.pairs[n]
        q, d_out, turned_q, turned_d = _take((x.q, d_outs, *turned), i)
        k, v = _take((x.k, x.v), j)
        q_rows, k_rows = _take(x.q_rows, i), _take(x.k_rows, j)
        bucket = _buckets(call, q_rows, k_rows)
        capped = _capped_scores(call, q, k, _bias(extra.bias, bucket))
        scores = _hide(call.mask, capped, q_rows, k_rows)
        weights = jnp.exp(scores - _take(log_total, i))
        d_scores = weights * (_dot("bkgqh,bksh->bkgqs", d_out, v) - _take(delta, i))
        if call.softcap is not None:
            d_scores *= 1 - jnp.square(capped / call.softcap)
        d_bias = None if bucket is None else _bias_gradient(call, d_scores, bucket)
        d_scores = d_scores.astype(q.dtype)
        dq = _dot("bkgqs,bksh->bkgqh", d_scores, k)
        dk = _dot("bkhgq,bkgqs->bkhs", turned_q, d_scores)
        dv = _dot("bkhgq,bkgqs->bkhs", turned_d, weights.astype(d_out.dtype))
        sums, d_table = carry
        sums = tuple(_put(a, at, _take(a, at) + d) for a, at, d in zip(sums, (i, j, j), (dq, dk, dv), strict=True))
        return sums, None if bucket is None else d_table + d_bias

    zeros = tuple(jnp.zeros_like(a, float32) for a in (x.q, jnp.swapaxes(x.k, -1, -2), jnp.swapaxes(x.v, -1, -2)))
    d_table = None
    if extra.bias is not None:
        d_table = jnp.zeros_like(x.q, float32, shape=(q.shape[0], q.shape[2], call.relative.num_buckets))
    (dq, dk, dv), d_table = jax.lax.fori_loop(0, x.count, step, (zeros, d_table))
    dq = _join_heads(dq * call.scale, q.shape[1]).astype(q.dtype)
    dk, dv = (jnp.swapaxes(a, -1, -2)[:, :, :, None] for a in (dk * call.scale, dv))
    dk, dv = _join_heads(dk, k.shape[1]).astype(k.dtype), _join_heads(dv, k.shape[1]).astype(v.dtype)
    return dq, dk, dv, d_table


def _bias_gradient(
    call: Call, d_scores: Float[Array, "B K G q s"], bucket: Int[Array, "B q s"]
) -> Float[Array, "B N R"]:
    batch, kv_heads, group, rows, keys = d_scores.shape
    d_scores = d_scores.reshape(batch, kv_heads * group, rows, keys)
    return relative_bias.bias_gradient(d_scores, bucket, call.relative.num_buckets)


attend.defvjp(_save, _backward)
