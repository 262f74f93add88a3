"""The attention layer: projections around the one attention door, and its cache."""

import flax.linen as nn
from jaxtyping import Array, Float

from transformer import axes as ax
from transformer import spec
from transformer.nn.context import Context
from transformer.nn.parameter import parameter
from transformer.nn.projection import Norm, Projection, capture, capturing
from transformer.ops import attention, rope
from transformer.ops.attention import reference
from transformer.ops.cache import KVCache, extend
from transformer.settings import Compute
from transformer.sharding import constrain

HEADS = (ax.BATCH, ax.LENGTH, ax.ACT_HEADS, None)


class Attention(nn.Module):
    """Self-attention of [B, T, D]; `gain` scales the initial output projection."""

    spec: spec.Attention
    compute: Compute
    gain: float

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: KVCache | None
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        s, rules = self.spec, self.compute.rules
        q = self._heads(x, "query", s.num_heads, ax.HEADS)
        k = self._heads(x, "key", s.num_kv_heads, ax.KV_HEADS)
        v = self._heads(x, "value", s.num_kv_heads, ax.KV_HEADS)
        if s.qk_norm is not None:
            q, k = self._norm(q, "query_norm"), self._norm(k, "key_norm")
        if not s.mask.sinks:  # else by their place in the cache, once that is known
            q, k = context.rotate(s.rope, q), context.rotate(s.rope, k)
        q, k, v = (constrain(a, HEADS, rules) for a in (q, k, v))
        sinks = None
        if s.sinks:
            sinks = parameter(self, "sinks", nn.initializers.zeros_init(), (s.num_heads,), (ax.HEADS,))
        y, cache = self._attend(q, k, v, context, cache, sinks)
        for name, value in (("q", q), ("k", k), ("v", v)):
            capture(self, name, value)
        y = constrain(y, HEADS, rules)
        out = (s.num_heads, s.head_dim), (x.shape[-1],), (ax.HEADS, ax.HEAD_DIM, ax.EMBED)
        y = Projection(*out, bias=s.out_bias, gain=self.gain, name="out")(y)
        return constrain(y, (ax.BATCH, ax.LENGTH, ax.ACT_EMBED), rules), cache

    def _heads(self, x: Float[Array, "B T D"], name: str, heads: int, axis: str) -> Float[Array, "B T N H"]:
        names = (ax.EMBED, axis, ax.HEAD_DIM)
        return Projection(x.shape[-1:], (heads, self.spec.head_dim), names, self.spec.qkv_bias, name=name)(x)

    def _norm(self, heads: Float[Array, "B T N H"], name: str) -> Float[Array, "B T N H"]:
        """Each head normed by itself, or the features of all heads as one vector."""
        joint = self.spec.qk_norm_joint
        flat = heads.reshape(*heads.shape[:2], -1) if joint else heads
        return Norm(self.spec.qk_norm, name=name)(flat).reshape(heads.shape)

    def _attend(self, q, k, v, context: Context, cache: KVCache | None, sinks):
        """Attention over this call's keys and what the cache holds; returns the written cache."""
        s = self.spec
        positions, segments = context.positions, context.segments
        keys, values, key_positions, aligned = k, v, positions, True
        if cache is not None and context.fresh:
            cache = cache.write(k, v, positions)
        elif cache is not None:
            cache, (keys, values, key_positions) = extend(cache, s.mask, k, v, positions)
            aligned = False
        if s.mask.sinks and s.rope is not None:
            q, keys = rope.rotate_in_cache(s.rope, s.mask, q, keys, positions, key_positions)
        where = attention.Where(positions, key_positions, segments, segments)
        call = attention.Call(s.mask, s.scale, s.softcap, aligned, self.compute.attention_block)
        y = attention.attend(self.compute.attention, call, q, keys, values, where, sinks)
        if capturing(self):
            capture(self, "probabilities", reference.probabilities(call, q, keys, where, sinks))
        return y, cache
