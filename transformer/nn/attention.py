"""The attention layer: projections around the one attention door, and its cache."""

import math

import flax.linen as nn
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from transformer import axes as ax
from transformer import spec
from transformer.nn.context import Context
from transformer.nn.parameter import parameter
from transformer.nn.projection import Norm, Projection, capture, capturing, point
from transformer.ops import attention, cached_attention, relative_bias, rope
from transformer.ops.attention import Extra, Where, reference
from transformer.ops.cache import KVCache, extend
from transformer.settings import Compute
from transformer.sharding import constrain, into_branch, into_stream

HEADS = (ax.BATCH, ax.LENGTH, ax.ACT_HEADS, None)


class Attention(nn.Module):
    """Attention of [B, T, D] to itself, or to what an encoder made; `gain` scales the initial output projection.

    Attributes:
      crosses: keys and values come from `Context.memory`. A cache keeps them, so that later calls need no memory.
    """

    spec: spec.Attention
    compute: Compute
    gain: float
    crosses: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: KVCache | None
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        s, rules = self.spec, self.compute.rules
        x = into_branch(x, rules)
        # Scores start of unit variance, whatever they are multiplied by.
        q = self._heads(x, "query", s.num_heads, ax.HEADS, 1 / (s.scale * math.sqrt(s.head_dim)))
        if s.qk_norm is not None:
            q = self._norm(q, "query_norm")
        if self.crosses:
            y, cache = self._look_across(q, context, cache)
        else:
            y, cache = self._look_back(x, q, context, cache)
        y = constrain(y, HEADS, rules)
        out = (s.num_heads, s.head_dim), (x.shape[-1],), (ax.HEADS, ax.HEAD_DIM, ax.EMBED)
        y = Projection(*out, s.out_bias, self.compute, self.gain, name="out")(y)
        return into_stream(y, rules), cache

    def _heads(
        self, x: Float[Array, "B T D"], name: str, heads: int, axis: str, gain: float = 1.0
    ) -> Float[Array, "B T N H"]:
        names = (ax.EMBED, axis, ax.HEAD_DIM)
        sizes = x.shape[-1:], (heads, self.spec.head_dim)
        return Projection(*sizes, names, self.spec.qkv_bias, self.compute, gain, name=name)(x)

    def _norm(self, heads: Float[Array, "B T N H"], name: str) -> Float[Array, "B T N H"]:
        """Each head normed by itself, or the features of all heads as one vector."""
        joint = self.spec.qk_norm_joint
        flat = heads.reshape(*heads.shape[:2], -1) if joint else heads
        return Norm(self.spec.qk_norm, name=name)(flat).reshape(heads.shape)

    def _keys_and_values(self, x: Float[Array, "B S D"]) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        s = self.spec
        k = self._heads(x, "key", s.num_kv_heads, ax.KV_HEADS)
        v = self._heads(x, "value", s.num_kv_heads, ax.KV_HEADS)
        return self._norm(k, "key_norm") if s.qk_norm is not None else k, v

    def _look_back(self, x, q, context: Context, cache: KVCache | None):
        """Attention over this call's keys and what the cache holds; returns the written cache."""
        s, positions = self.spec, context.positions
        k, v = self._keys_and_values(x)
        if not s.mask.sinks:  # else by their place in the cache, once that is known
            q, k = context.rotate(s.rope, q), context.rotate(s.rope, k)
        q, k, v = (constrain(a, HEADS, self.compute.rules) for a in (q, k, v))
        q, k, v = checkpoint_name(q, "q"), point(self, "k", k), point(self, "v", v)
        kept = None
        if cache is not None and context.fresh:
            cache = cache.write(k, v, positions)
        elif cache is not None:
            cache, kept = extend(cache, s.mask, k, v, positions)
        placed = bool(s.mask.sinks) and s.rope is not None
        relative = isinstance(s.relative, spec.RelativeKeys)
        if placed or relative:
            k, v, k_positions = (k, v, positions) if kept is None else kept.read(k.dtype)
            if placed:
                q, k = rope.rotate_in_cache(s.rope, s.mask, q, k, positions, k_positions)
            if relative:
                q, k = self._with_distances(q, k, positions, k_positions, x.shape[-1])
            kept = None if kept is None else KVCache.of(k, v, k_positions)
        if kept is None:
            return self._attend(q, k, v, context.where(positions), context.bias, aligned=True), cache
        return self._attend_kept(q, kept, context.where(kept.held), context.bias), cache

    def _look_across(self, q, context: Context, cache: KVCache | None):
        """Attention over the memory's keys, which the cache keeps from the first call on."""
        memory = context.memory
        if memory is None:
            if cache is None:
                raise ValueError(
                    "cross-attention needs the text that the encoder read: give `source`, or a cache of it"
                )
            where = Where(context.positions, cache.held, context.segments)
            return self._attend_kept(q, cache, where, None), cache
        k, v = (constrain(a, HEADS, self.compute.rules) for a in self._keys_and_values(memory.features))
        q, k, v = checkpoint_name(q, "q"), point(self, "k", k), point(self, "v", v)
        cache = None if cache is None else cache.write(k, v, memory.positions)
        where = Where(context.positions, memory.positions, context.segments, memory.segments)
        return self._attend(q, k, v, where, None, aligned=False), cache

    def _with_distances(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        q_positions: Int[Array, "B T"],
        k_positions: Int[Array, "B S"],
        width: int,
    ):
        """Queries and keys with features whose product is the score of their distance (Transformer-XL)."""
        s, heads = self.spec, (ax.HEADS, ax.HEAD_DIM)
        init, shape = nn.initializers.truncated_normal(width**-0.5), (s.num_heads, s.head_dim)
        kernel = parameter(self, "distance_kernel", init, (width, *shape), (ax.EMBED, *heads))
        content = parameter(self, "content_bias", nn.initializers.zeros_init(), shape, heads).astype(q.dtype)
        distance = parameter(self, "distance_bias", nn.initializers.zeros_init(), shape, heads).astype(q.dtype)
        further = relative_bias.distance_queries(s.relative, kernel, q + distance, q_positions)
        waves = relative_bias.distance_keys(s.relative, k_positions, width).astype(k.dtype)
        waves = jnp.broadcast_to(waves[:, :, None], (*k.shape[:3], width))
        return jnp.concatenate([q + content, further], axis=-1), jnp.concatenate([k, waves], axis=-1)

    def _attend(self, q, k, v, where: Where, table: Float[Array, "R N"] | None, aligned: bool):
        call, extra = self._terms(table, aligned)
        self._capture(call, q, k, where, extra)
        return attention.attend(self.compute.attention, call, q, k, v, where, extra)

    def _attend_kept(self, q, kept: KVCache, where: Where, table: Float[Array, "R N"] | None):
        call, extra = self._terms(table, aligned=False)
        self._capture(call, q, kept.read(q.dtype)[0] if capturing(self) else None, where, extra)
        how = self.compute.decode_attention, self.compute.attention
        return cached_attention.attend(*how, call, q, kept, where, extra, rules=self.compute.rules)

    def _terms(self, table: Float[Array, "R N"] | None, aligned: bool) -> tuple[attention.Call, Extra]:
        s, sinks = self.spec, None
        if s.sinks:
            sinks = parameter(self, "sinks", nn.initializers.zeros_init(), (s.num_heads,), (ax.HEADS,))
        biased = isinstance(s.relative, spec.RelativeBias)
        relative, block = s.relative if biased else None, self.compute.attention_block
        how = self.compute.rules, self.compute.context_attention
        call = attention.Call(s.mask, s.scale, s.softcap, aligned, relative, block, *how)
        return call, Extra(sinks, table if biased else None)

    def _capture(self, call: attention.Call, q, k, where: Where, extra: Extra) -> None:
        capture(self, "q", q)
        if capturing(self):
            capture(self, "probabilities", reference.probabilities(call, q, k, where, extra))
