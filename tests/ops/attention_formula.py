"""Attention as its formula is written, dense, in float64 NumPy: what every body is held to."""

import numpy as np

from transformer.ops.attention import Extra


def formula(call, q, k, v, where, extra, d_out):
    """softmax(softcap(scale · q kᵀ + bias) + mask) v and the gradients of sum(out · d_out), dense, in float64 NumPy."""
    sinks, table = extra.sinks, extra.bias
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    group = q.shape[2] // k.shape[2]
    keys, values = (np.repeat(x, group, axis=2) for x in (k, v))
    capped = call.scale * np.einsum("btnh,bsnh->bnts", q, keys)
    if table is not None:
        bucket = dense_buckets(call.relative, where)
        capped += np.moveaxis(np.asarray(table, np.float64)[bucket], -1, 1)
    if call.softcap:
        capped = call.softcap * np.tanh(capped / call.softcap)
    seen = dense_mask(call.mask, where)[:, None]
    sink = np.full(q.shape[2], -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    sink = np.broadcast_to(sink[:, None, None], (*capped.shape[:3], 1))
    weights = np.exp(np.concatenate([np.where(seen, capped, -np.inf), sink], axis=-1))
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    weights, sink_weights = weights[..., :-1], weights[..., -1:]

    d_weights = np.einsum("btnh,bsnh->bnts", d_out, values)
    mean = (weights * d_weights).sum(-1, keepdims=True)
    d_scores = weights * (d_weights - mean)
    d_sinks = -(sink_weights * mean).sum((0, 2, 3))
    if call.softcap:
        d_scores = d_scores * (1 - (capped / call.softcap) ** 2)

    d_table = None
    if table is not None:
        d_table = np.stack([(d_scores * (bucket == r)[:, None]).sum((0, 2, 3)) for r in range(len(table))])

    def by_kv_head(x):
        return x.reshape(*k.shape[:3], group, -1).sum(3)

    return np.einsum("bnts,bsnh->btnh", weights, values), (
        call.scale * np.einsum("bnts,bsnh->btnh", d_scores, keys),
        call.scale * by_kv_head(np.einsum("bnts,btnh->bsnh", d_scores, q)),
        by_kv_head(np.einsum("bnts,btnh->bsnh", weights, d_out)),
        Extra(None if sinks is None else d_sinks, d_table),
    )


def dense_buckets(relative, where):
    """T5's buckets, distance by distance in float64 (no distance here lies at an edge that rounding moves)."""
    q, k = np.asarray(where.q_positions)[:, :, None], np.asarray(where.k_positions)[:, None, :]

    @np.vectorize
    def bucket(ahead):
        count = relative.num_buckets // (1 + relative.bidirectional)
        first = count if relative.bidirectional and ahead > 0 else 0
        distance = abs(ahead) if relative.bidirectional else max(-ahead, 0)
        exact = count // 2
        if distance < exact:
            return first + distance
        steps = np.log(distance / exact) / np.log(relative.max_distance / exact) * (count - exact)
        return first + min(exact + int(steps), count - 1)

    return bucket(k - q)


def dense_mask(mask, where):
    q, k = np.asarray(where.q_positions)[:, :, None], np.asarray(where.k_positions)[:, None, :]
    ahead = k - q
    reach = np.inf if mask.window is None else mask.window - 1
    later = ahead > 0
    if where.q_orders is not None:
        later = np.asarray(where.k_orders)[:, None, :] > np.asarray(where.q_orders)[:, :, None]
    near = (abs(ahead) <= reach) | (k < mask.sinks)
    seen = (q >= 0) & (k >= 0) & near & ~(mask.causal & later)
    if where.q_segments is not None:
        seen &= np.asarray(where.q_segments)[:, :, None] == np.asarray(where.k_segments)[:, None, :]
    return seen
