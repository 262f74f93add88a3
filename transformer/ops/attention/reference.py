"""The reference attention body: the formula as written, with the whole T×S matrix."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from transformer.ops import relative_bias
from transformer.ops.attention.call import NOTHING, Call, Extra, Where

# Finite, so that a row without any visible key has no inf - inf in it.
MASKED = -1e30


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
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    q = jnp.transpose(q.reshape(batch, length, kv_heads, heads // kv_heads, dim), (0, 2, 3, 1, 4))
    k = jnp.transpose(k, (0, 2, 1, 3))
    scores = _scores(q, k) * call.scale
    if call.relative is not None:
        bias = relative_bias.bias(
            extra.bias, relative_bias.buckets(call.relative, where.q_positions, where.k_positions)
        )
        scores = scores + bias.reshape(scores.shape)
    if call.softcap is not None:
        scores = call.softcap * jnp.tanh(scores / call.softcap)
    seen = where.visible(call.mask)[:, None, None]
    # Softmax does not depend on what is subtracted, so nothing need flow back through the maximum.
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, where=seen, initial=MASKED))
    if extra.sinks is not None:
        sink = extra.sinks.astype(jnp.float32).reshape(kv_heads, heads // kv_heads, 1, 1)
        top = jnp.maximum(top, jax.lax.stop_gradient(sink))
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores, MASKED) - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if extra.sinks is not None:
        total = total + jnp.exp(sink - top)
    out = weights / jnp.where(total == 0, 1, total)
    return out.reshape(batch, heads, length, k.shape[2])


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
    batch, heads, length, keys = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    kv_heads = k.shape[2]
    weights = probabilities(call, q, k, where, extra).astype(v.dtype)
    weights = weights.reshape(batch, kv_heads, heads // kv_heads, length, keys)
    out = jnp.einsum("bkgts,bksh->bkgth", weights, jnp.transpose(v, (0, 2, 1, 3)))
    out = jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(batch, length, heads, v.shape[-1]).astype(q.dtype)
    return checkpoint_name(out, "attended")
