"""Key/value caches: frozen pytrees whose slots remember absolute positions.

A layer's mask says which slots it needs. The first `mask.sinks` positions have slots of their own; every later
position p has slot sinks + (p - sinks) mod ring. A full cache is a ring that never comes round, a window layer's ring
is as long as the window, and sinks before a ring make StreamingLLM's cache. Nothing else distinguishes them: no cursor,
no padding side, no row length. An empty slot has position -1 and padding (negative positions) is never written.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from transformer import axes as ax
from transformer import spec
from transformer.ops import cache_rows

# How keys and values are kept; int8 has one float32 scale a token and head.
CacheDType = Literal["float32", "bfloat16", "int8"]
CACHE_DTYPES = get_args(CacheDType)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of one layer, or of all repeats of a stack's body (leading axis, one `layer` in view).

    Heads come before slots, so that attention reads each head's keys in one piece and nothing is transposed.

    Attributes:
      keys, values: [*L, B, K, S / p, p · H] and [*L, B, K, S / p, p · Hv]; S is the capacity in tokens, of which p
        share a row (`ops.cache_rows`). A latent layer keeps its latent and rotary key as one key and has no values
        (Hv = 0).
      positions: [*L, B, S] absolute positions, -1 where empty.
      key_scales, value_scales: [*L, B, K, S] of int8 keys and values: what 1 stands for.
      layer: the repeat that reads and writes address; None where there is no leading axis.
      sinks: first positions that are never overwritten.
    """

    keys: Num[Array, "*L B K R W"]
    values: Num[Array, "*L B K R Wv"]
    positions: Int[Array, "*L B S"]
    key_scales: Float[Array, "*L B K S"] | None = None
    value_scales: Float[Array, "*L B K S"] | None = None
    layer: Int[Array, ""] | None = None
    sinks: int = field(metadata={"static": True}, default=0)

    @classmethod
    def of(
        cls, keys: Float[Array, "B S K H"], values: Float[Array, "B S K Hv"], positions: Int[Array, "B S"]
    ) -> "KVCache":
        """A cache that holds just these tokens."""
        return cls(jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2), positions)

    @property
    def capacity(self) -> int:
        """Number of slots S."""
        return self.positions.shape[-1]

    @property
    def axes(self) -> dict[str, tuple[str | None, ...]]:
        """The logical axes of its arrays, by field."""
        lead = (ax.LAYERS,) * (self.positions.ndim - 2)
        slots = (*lead, ax.BATCH, ax.ACT_HEADS, None)
        names = {"keys": (*slots, None), "values": (*slots, None), "positions": (*lead, ax.BATCH, None)}
        scales = {name: slots for name in ("key_scales", "value_scales") if getattr(self, name) is not None}
        return names | scales

    @property
    def ring(self) -> int:
        """Slots that later tokens use in turn."""
        return self.capacity - self.sinks

    @property
    def together(self) -> int:
        """Tokens p that share a row."""
        return self.capacity // self.keys.shape[-2]

    @property
    def by_slot(self) -> Int[Array, "B S"]:
        """Positions of the layer in view, slot by slot."""
        return self._at(self.positions)

    @property
    def held(self) -> Int[Array, "B S"]:
        """Positions of the layer in view, in the order of `read`."""
        return cache_rows.as_kept(self.by_slot, self.together)

    def view(self, layer: Int[Array, ""] | None) -> "KVCache":
        """The same buffers addressed at one repeat. Writes stay in place: no layer is sliced out and put back."""
        return dataclasses.replace(self, layer=layer)

    def read(self, dtype: jnp.dtype) -> tuple[Array, Array, Array]:
        """(keys [B, S, K, H], values, positions [B, S]) of the layer in view, in `dtype`, in the order of its rows."""

        def restore(rows: Array, scales: Array | None) -> Array:
            rows, scales = self._at(rows), self._at(scales)
            x = rows.reshape(*rows.shape[:2], self.capacity, rows.shape[-1] // self.together)
            if scales is None:
                return x.astype(dtype)
            return (x.astype(jnp.float32) * cache_rows.as_kept(scales, self.together)[..., None]).astype(dtype)

        keys, values = restore(self.keys, self.key_scales), restore(self.values, self.value_scales)
        # Attention brings heads to the front again; the two transpositions cancel.
        return jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2), self.held

    def write(
        self, keys: Float[Array, "B T K H"], values: Float[Array, "B T K Hv"], positions: Int[Array, "B T"]
    ) -> "KVCache":
        """Stores new tokens; of more tokens than slots, the sinks and the last ones of each row stay."""
        last = jnp.max(positions, axis=1, keepdims=True)
        kept = (positions >= 0) & ((positions > last - self.ring) | (positions < self.sinks))
        slots = jnp.where(positions < self.sinks, positions, self.sinks + (positions - self.sinks) % self.ring)
        # A slot beyond the end is out of bounds, and an out-of-bounds update is dropped.
        slots = jnp.where(kept, slots, self.capacity)

        written = {"positions": cache_rows.put(self.positions, positions, slots, self.layer)}
        for name, new in (("key", keys), ("value", values)):
            if (scales := getattr(self, f"{name}_scales")) is not None:
                new, scale = quantize(new)
                written[f"{name}_scales"] = cache_rows.put(scales, scale, slots, self.layer)
            rows = getattr(self, f"{name}s")
            written[f"{name}s"] = cache_rows.put_tokens(rows, new, slots, self.layer, self.together)
        return dataclasses.replace(self, **written)

    def drop(self, first: Int[Array, " B"]) -> "KVCache":
        """Forgets the tokens of each row from position `first` on, in every repeat: a draft that was refused.

        Exact where their slots held nothing that is still wanted: see `init`, `slack`.
        """
        return dataclasses.replace(self, positions=jnp.where(self.positions < first[:, None], self.positions, -1))

    def pick(self, index: Int[Array, "B N"]) -> "KVCache":
        """Of B groups of consecutive rows, N rows of each group, in every repeat: B · N rows."""
        axis = self.positions.ndim - 2
        groups, picked = index.shape

        def gather(buffer: Array) -> Array:
            before, rows, after = buffer.shape[:axis], buffer.shape[axis], buffer.shape[axis + 1 :]
            grouped = buffer.reshape(*before, groups, rows // groups, *after)
            at = index.reshape((1,) * len(before) + index.shape + (1,) * len(after))
            return jnp.take_along_axis(grouped, at, axis=axis + 1).reshape(*before, groups * picked, *after)

        return jax.tree.map(gather, self)

    def _at(self, buffer: Array | None) -> Array | None:
        if buffer is None or self.layer is None:
            return buffer
        return jax.lax.dynamic_index_in_dim(buffer, self.layer, keepdims=False)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """What a block keeps: of the tokens that it has seen, and of the other text that its cross-attention looks at."""

    mixer: KVCache
    cross: KVCache | None = None

    def view(self, layer: Int[Array, ""] | None) -> "LayerCache":
        """The same buffers addressed at one repeat."""
        return jax.tree.map(lambda cache: cache.view(layer), self, is_leaf=_is_cache)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StackCache:
    """The caches of a stack, laid out like its parameters: `body` entries are stacked over the repeats."""

    head: tuple[LayerCache, ...]
    body: tuple[LayerCache, ...]
    tail: tuple[LayerCache, ...]

    def map(self, function: Callable[[KVCache], KVCache]) -> "StackCache":
        """`function` of every cache."""
        return jax.tree.map(function, self, is_leaf=_is_cache)

    def drop(self, first: Int[Array, "*B"]) -> "StackCache":
        """`KVCache.drop` of every layer's tokens; `first` of each row, or of all."""

        def forget(cache: KVCache) -> KVCache:
            return cache.drop(jnp.broadcast_to(first, cache.positions.shape[-2]))

        return self._map_mixers(forget)

    def pick(self, index: Int[Array, "B N"], cross: bool = True) -> "StackCache":
        """`KVCache.pick` of every layer; `cross` False leaves alone what cross-attention looks at."""
        return self.map(lambda c: c.pick(index)) if cross else self._map_mixers(lambda c: c.pick(index))

    def _map_mixers(self, function: Callable[[KVCache], KVCache]) -> "StackCache":
        def change(layer: LayerCache) -> LayerCache:
            return dataclasses.replace(layer, mixer=function(layer.mixer))

        return jax.tree.map(change, self, is_leaf=lambda node: isinstance(node, LayerCache))


def _is_cache(node: Any) -> bool:
    return isinstance(node, KVCache)


def capacity(mask: spec.Mask, max_length: int, slack: int = 0) -> int:
    """Slots that a layer needs: min(max_length, sinks + window + slack)."""
    return max_length if mask.window is None else min(max_length, mask.sinks + mask.window + slack)


def overwrites(mask: spec.Mask, cache: KVCache, length: int) -> bool:
    """True where `length` new tokens may push out keys that the first of them still sees."""
    return mask.window is not None and mask.window <= cache.ring < mask.window + length - 1


def extend(
    cache: KVCache, mask: spec.Mask, keys: Array, values: Array, positions: Int[Array, "B T"]
) -> tuple[KVCache, KVCache]:
    """Writes new tokens; gives the written cache, and a cache of all that they may look at, themselves included.

    Usually that is the written one. Where the new tokens would push out keys that the first of them still sees, old
    and new are joined for this call, in the dtype of `keys`.
    """
    if not overwrites(mask, cache, positions.shape[1]):
        # Without the barrier XLA writes twice: once into the cache and once into a copy of it, to be read.
        cache = jax.lax.optimization_barrier(cache.write(keys, values, positions))
        return cache, cache
    old, new = cache.read(keys.dtype), (keys, values, positions)
    return cache.write(*new), KVCache.of(*(jnp.concatenate(pair, axis=1) for pair in zip(old, new, strict=True)))


def quantize(x: Float[Array, "*B H"]) -> tuple[Int[Array, "*B H"], Float[Array, "*B"]]:
    """(int8, float32 scale): symmetric, one scale a vector, so that its largest feature is ±127."""
    scale = jnp.max(jnp.abs(x), axis=-1, initial=0).astype(jnp.float32) / 127
    steps = x.astype(jnp.float32) / jnp.where(scale == 0, 1, scale)[..., None]
    return jnp.round(steps).astype(jnp.int8), scale


def init(
    stack: spec.Stack, batch: int, max_length: int, dtype: CacheDType, slack: int = 0, source_length: int = 0
) -> StackCache:
    """An empty cache for `batch` rows of up to `max_length` tokens.

    Args:
      slack: tokens that may be written and then dropped again without loss (speculative decoding): a ring is longer by
        as many slots.
      source_length: tokens of the text that cross-attention looks at.
    """

    def empty(mixer: spec.Attention | spec.LatentAttention, slots: int, *lead: int) -> KVCache:
        dims, mask = mixer.cache_dims, mixer.mask
        heads, count = (*lead, batch, dims.heads), cache_rows.together(slots, dims.key, dims.value)
        scales = jnp.zeros((*heads, slots), jnp.float32) if dtype == "int8" else None
        return KVCache(
            keys=jnp.zeros((*heads, *cache_rows.shape(slots, dims.key, count)), dtype),
            values=jnp.zeros((*heads, *cache_rows.shape(slots, dims.value, count)), dtype),
            positions=jnp.full((*lead, batch, slots), -1, jnp.int32),
            key_scales=scales,
            value_scales=scales if dims.value else None,
            # A cache that holds everything has no need to tell them apart.
            sinks=mask.sinks if slots > mask.sinks else 0,
        )

    def layer(block: spec.Block, *lead: int) -> LayerCache:
        own = empty(block.mixer, capacity(block.mixer.mask, max_length, slack), *lead)
        return LayerCache(own, empty(block.cross, source_length, *lead) if block.cross else None)

    return StackCache(
        head=tuple(layer(b) for b in stack.head),
        body=tuple(layer(b, stack.repeats) for b in stack.body),
        tail=tuple(layer(b) for b in stack.tail),
    )
