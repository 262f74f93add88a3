"""Multi-head latent attention (MLA): keys and values of all heads from one latent vector a token."""

import math

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer import axes as ax
from transformer import spec
from transformer.nn.context import Context
from transformer.nn.parameter import parameter
from transformer.nn.projection import Norm, Projection, capture, capturing, point
from transformer.ops import attention, cached_attention, rope
from transformer.ops.attention import Where, reference
from transformer.ops.cache import KVCache, extend
from transformer.ops.products import product
from transformer.ops.sums import Sums
from transformer.settings import Compute
from transformer.sharding import constrain, into_branch, into_stream

HEADS = (ax.BATCH, ax.LENGTH, ax.ACT_HEADS, None)


class LatentAttention(nn.Module):
    """Self-attention of [B, T, D] through latents (DeepSeek-V2, section 2.1); `gain` as in `Attention`.

    Training expands the latent into keys and values of every head. Over a cache, queries go to the latent space
    instead and values are expanded after attention: the cache is never expanded.
    """

    spec: spec.LatentAttention
    compute: Compute
    gain: float

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: KVCache | None
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        s, width = self.spec, x.shape[-1]
        x = into_branch(x, self.compute.rules)
        q_nope, q_rope = self._queries(x, context)
        inward = (width,), (s.kv_rank + s.rope_dim,), (ax.EMBED, ax.LATENT_OUT), s.bias, self.compute
        down = Projection(*inward, name="kv_down")(x)
        latent, k_rope = jnp.split(down, [s.kv_rank], axis=-1)
        latent = Norm(s.latent_norm, name="kv_norm")(latent)
        k_rope = k_rope[:, :, None, :]
        if not s.mask.sinks:  # else by their place in the cache, once that is known
            q_rope, k_rope = context.rotate(s.rope, q_rope), context.rotate(s.rope, k_rope)
        key_up, value_up = self._up("key_up", s.nope_dim), self._up("value_up", s.v_dim)
        if cache is not None:
            kept = jnp.concatenate([latent[:, :, None, :], k_rope], axis=-1)
            nothing = kept[..., :0]
            if context.fresh:
                cache = cache.write(kept, nothing, context.positions)
            else:
                cache, seen = extend(cache, s.mask, kept, nothing, context.positions)
        if cache is None or context.fresh:
            y = self._expanded(q_nope, q_rope, latent, k_rope, key_up, value_up, context)
        else:
            y = self._absorbed(q_nope, q_rope, seen, key_up, value_up, context)
        y = constrain(y, HEADS, self.compute.rules)
        out = (s.num_heads, s.v_dim), (width,), (ax.HEADS, ax.HEAD_DIM, ax.EMBED)
        y = Projection(*out, s.bias, self.compute, self.gain, name="out")(y)
        return into_stream(y, self.compute.rules), cache

    def _queries(self, x: Float[Array, "B T D"], context: Context):
        s, name, axis, bias = self.spec, "query", ax.EMBED, False
        if s.q_rank is not None:
            inward = x.shape[-1:], (s.q_rank,), (ax.EMBED, ax.LATENT_OUT), s.bias, self.compute
            down = Projection(*inward, name="query_down")
            x, name, axis = Norm(s.latent_norm, name="query_norm")(down(x)), "query_up", ax.LATENT
        heads = (s.num_heads, s.nope_dim + s.rope_dim)
        q = Projection(x.shape[-1:], heads, (axis, ax.HEADS, ax.HEAD_DIM), bias, self.compute, name=name)(x)
        q_nope, q_rope = jnp.split(constrain(q, HEADS, self.compute.rules), [s.nope_dim], axis=-1)
        return q_nope, q_rope

    def _up(self, name: str, dim: int) -> Float[Array, "R N H"]:
        shape = (self.spec.kv_rank, self.spec.num_heads, dim)
        init = nn.initializers.truncated_normal(1 / math.sqrt(self.spec.kv_rank))
        # Summed over the latent or over the head's features, as it is absorbed or not: a scale for each other axis.
        return parameter(self, name, init, shape, (ax.LATENT, ax.HEADS, ax.HEAD_DIM), (-3,))

    def _expanded(self, q_nope, q_rope, latent, k_rope, key_up, value_up, context: Context):
        q_rope, k_rope = self._place(q_rope, k_rope, context.positions, context)
        sums = Sums((ax.LATENT, ax.HEADS, ax.HEAD_DIM), self.compute.rules, self.compute.reduce_dtype)
        k_nope, v = (product(latent, up, 1, sums) for up in (key_up, value_up))
        k = jnp.concatenate([k_nope, jnp.broadcast_to(k_rope, (*k_nope.shape[:3], k_rope.shape[-1]))], axis=-1)
        q = jnp.concatenate([q_nope, q_rope], axis=-1)
        q, k, v = (point(self, name, value) for name, value in (("q", q), ("k", k), ("v", v)))
        where, call = context.where(context.positions), self._call(aligned=True)
        if capturing(self):
            self._capture(call, q, k, where)
        return attention.attend(self.compute.attention, call, q, k, v, where)

    def _absorbed(self, q_nope, q_rope, seen: KVCache, key_up, value_up, context: Context):
        """One key head for all queries: [latent | rotary key]; its latent part is the value, too."""
        q = jnp.einsum("btnh,rnh->btnr", q_nope, key_up.astype(q_nope.dtype))
        if self.spec.mask.sinks:
            kept, _, positions = seen.read(q.dtype)
            latent, k_rope = jnp.split(kept, [self.spec.kv_rank], axis=-1)
            q_rope, k_rope = self._place(q_rope, k_rope, positions, context)
            kept = jnp.concatenate([latent, k_rope], axis=-1)
            seen = KVCache.of(kept, kept[..., :0], positions)
        q = jnp.concatenate([q, q_rope], axis=-1)
        where, call = context.where(seen.held), self._call(aligned=False)
        if capturing(self):
            self._capture(call, q, seen.read(q.dtype)[0], where)
        how = self.compute.decode_attention, self.compute.attention
        options = dict(value_dim=self.spec.kv_rank, rules=self.compute.rules)
        y = cached_attention.attend(*how, call, q, seen, where, **options)
        return jnp.einsum("btnr,rnh->btnh", y, value_up.astype(y.dtype))

    def _place(self, q_rope, k_rope, positions, context: Context):
        if not self.spec.mask.sinks:
            return q_rope, k_rope
        return rope.rotate_in_cache(self.spec.rope, self.spec.mask, q_rope, k_rope, context.positions, positions)

    def _call(self, aligned: bool) -> attention.Call:
        compute, s = self.compute, self.spec
        how = compute.attention_block, compute.rules, compute.context_attention
        return attention.Call(s.mask, s.scale, None, aligned, None, *how)

    def _capture(self, call: attention.Call, q, k, where: Where) -> None:
        capture(self, "probabilities", reference.probabilities(call, q, k, where))
