"""The reference attention body: the formula as written, with the whole T×S matrix."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from transformer.ops import relative_bias
from transformer.ops.attention.call import NOTHING, Call, Extra, Where
from transformer.ops.mask import BLIND
from transformer.spec import RelativeBias

# Finite, so that a row without any visible key has no inf - inf in it.
MASKED = -1e30

# Whether `shard_map` can tell on which devices its results differ.
TYPED = True


def refuse(call: Call) -> str | None:
    """Serves every call."""
    return None


def probabilities(
    call: Call,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    where: Where,
    extra: Extra = NOTHING,
) -> Float[Array, "B N T S"]:
    """Attention probabilities in float32; rows sum to 1, to less with sinks, to 0 where nothing is visible."""
    weights, total, _ = _weigh(call, q, k, where, extra)
    out = weights / jnp.where(total == 0, 1, total)
    return out.reshape(*_shape(q, k))


def _shape(q: Array, k: Array) -> tuple[int, int, int, int]:
    """(B, N, T, S)."""
    return q.shape[0], q.shape[2], q.shape[1], k.shape[1]


def _weigh(call: Call, q: Array, k: Array, where: Where, extra: Extra) -> tuple[Array, Array, Array]:
    """Weights [B, K, G, T, S] of the keys, and their sum and the log of their unit [B, K, G, T, 1], sinks included."""
    kv_heads, scores = k.shape[2], _capped_scores(call, q, k, _bias(call, where, extra))
    seen = where.visible(call.mask)[:, None, None]
    # Softmax does not depend on what is subtracted, so nothing need flow back through the maximum.
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, where=seen, initial=MASKED))
    if extra.sinks is not None:
        sink = extra.sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1)
        top = jnp.maximum(top, jax.lax.stop_gradient(sink))
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores, MASKED) - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if extra.sinks is not None:
        total = total + jnp.exp(sink - top)
    return weights, total, top


def _bias(call: Call, where: Where, extra: Extra) -> Float[Array, "B N T S"] | None:
    return None if call.relative is None else relative_bias.bias(extra.bias, _buckets(call.relative, where))


def _buckets(relative: RelativeBias, where: Where) -> Int[Array, "B T S"]:
    return relative_bias.buckets(relative, where.q_positions, where.k_positions)


def _capped_scores(call: Call, q: Array, k: Array, bias: Float[Array, "B N T S"] | None) -> Float[Array, "B K G T S"]:
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    q = jnp.transpose(q.reshape(batch, length, kv_heads, heads // kv_heads, dim), (0, 2, 3, 1, 4))
    scores = _scores(q, jnp.transpose(k, (0, 2, 1, 3))) * call.scale
    if bias is not None:
        scores = scores + bias.reshape(scores.shape)
    return scores if call.softcap is None else call.softcap * jnp.tanh(scores / call.softcap)


def _scores(q: Float[Array, "B K G T H"], k: Float[Array, "B K S H"]) -> Float[Array, "B K G T S"]:
    """q·k in float32. Heads lead: a CPU is two to three times as fast as with the heads between."""
    if q.shape[2] * q.shape[3] > q.shape[4]:
        return jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32)
    # Few queries, many keys: XLA:CPU would transpose all the keys, which for one query costs more than the product.
    scores = jnp.einsum("bksh,bkgth->bksgt", k, q, preferred_element_type=jnp.float32)
    return jnp.moveaxis(scores, 2, -1)


def attend(
    call: Call,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    where: Where,
    extra: Extra = NOTHING,
) -> Float[Array, "B T N Hv"]:
    """Attention by the formula; memory grows with T·S."""
    out = _of_values(probabilities(call, q, k, where, extra).astype(v.dtype), v).astype(q.dtype)
    return checkpoint_name(out, "attended")


def _of_values(weights: Float[Array, "B N T S"], v: Float[Array, "B S K H"]) -> Float[Array, "B T N H"]:
    batch, heads, length, keys = weights.shape
    weights = weights.reshape(batch, v.shape[2], heads // v.shape[2], length, keys)
    out = jnp.einsum("bkgts,bksh->bkgth", weights, jnp.transpose(v, (0, 2, 1, 3)))
    return jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(batch, length, heads, v.shape[-1])


def forward(
    call: Call, q: Array, k: Array, v: Array, where: Where, extra: Extra
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """The output, and every query's log of the softmax denominator, `BLIND` where it sees nothing."""
    weights, total, top = _weigh(call, q, k, where, extra)
    blind = total == 0
    total = jnp.where(blind, 1, total)
    out = _of_values((weights / total).reshape(*_shape(q, k)).astype(v.dtype), v).astype(q.dtype)
    return out, jnp.where(blind, BLIND, top + jnp.log(total)).reshape(*_shape(q, k)[:-1])


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
    seen = where.visible(call.mask)[:, None]

    def weigh(q, k, v, bias):
        scores = _capped_scores(call, q, k, bias).reshape(*_shape(q, k))
        weights = jnp.exp(jnp.where(seen, scores - log_total[..., None], MASKED))
        return _of_values(weights.astype(v.dtype), v), jnp.sum(weights, axis=-1)

    # With the softmax's denominator given, what it takes from each score is the gradient of the weights' plain sum.
    (out, _), pull = jax.vjp(weigh, q, k, v, _bias(call, where, extra))
    dq, dk, dv, d_bias = pull((d_out.astype(out.dtype), -delta))
    if d_bias is None:
        return dq, dk, dv, None
    buckets, count = _buckets(call.relative, where), call.relative.num_buckets
    return dq, dk, dv, relative_bias.bias_gradient(d_bias, buckets, count)
