"""Key/value caches: frozen pytrees whose slots remember absolute positions.

A token at position p lies in slot p mod capacity. A full cache has a slot for every position; a ring has `window`
slots, exactly what a window layer can see. Nothing else distinguishes them: no cursor, no padding side, no row
length. An empty slot has position -1 and padding tokens (negative positions) are never written.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer import spec


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of one layer, or of all repeats of a stack's body (leading axis, one `layer` in view).

    Attributes:
      keys, values: [*L, B, S, K, H] and [*L, B, S, K, Hv]; S is the capacity in tokens. A latent layer keeps its
        latent and rotary key as one key and has no values (Hv = 0).
      positions: [*L, B, S] absolute positions, -1 where empty.
      layer: the repeat that reads and writes address; None where there is no leading axis.
    """

    keys: Float[Array, "*L B S K H"]
    values: Float[Array, "*L B S K Hv"]
    positions: Int[Array, "*L B S"]
    layer: Int[Array, ""] | None = None

    @property
    def capacity(self) -> int:
        """Number of slots S."""
        return self.positions.shape[-1]

    def view(self, layer: Int[Array, ""] | None) -> "KVCache":
        """The same buffers addressed at one repeat. Writes stay in place: no layer is sliced out and put back."""
        return dataclasses.replace(self, layer=layer)

    def read(self) -> tuple[Array, Array, Array]:
        """(keys [B, S, K, H], values, positions [B, S]) of the layer in view."""
        buffers = (self.keys, self.values, self.positions)
        if self.layer is None:
            return buffers
        return tuple(jax.lax.dynamic_index_in_dim(b, self.layer, keepdims=False) for b in buffers)

    def write(
        self, keys: Float[Array, "B T K H"], values: Float[Array, "B T K Hv"], positions: Int[Array, "B T"]
    ) -> "KVCache":
        """Stores new tokens; of more tokens than slots, the last ones of each row stay."""
        last = jnp.max(positions, axis=1, keepdims=True)
        kept = (positions >= 0) & (positions > last - self.capacity)
        # A slot beyond the end is out of bounds, and an out-of-bounds update is dropped.
        slots = jnp.where(kept, positions % self.capacity, self.capacity)
        rows = jnp.arange(positions.shape[0])[:, None]
        index = (rows, slots) if self.layer is None else (self.layer, rows, slots)
        return dataclasses.replace(
            self,
            keys=self.keys.at[index].set(keys.astype(self.keys.dtype), mode="drop"),
            values=self.values.at[index].set(values.astype(self.values.dtype), mode="drop"),
            positions=self.positions.at[index].set(positions, mode="drop"),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StackCache:
    """The caches of a stack, laid out like its parameters: `body` entries are stacked over the repeats."""

    head: tuple[KVCache, ...]
    body: tuple[KVCache, ...]
    tail: tuple[KVCache, ...]


def capacity(mask: spec.Mask, max_length: int) -> int:
    """Slots that a layer needs: min(max_length, window)."""
    return min(max_length, mask.window or max_length)


def is_ring(mask: spec.Mask, cache: KVCache) -> bool:
    """True where old tokens leave the cache to make room for new ones."""
    return mask.window == cache.capacity


def extend(
    cache: KVCache, mask: spec.Mask, keys: Array, values: Array, positions: Int[Array, "B T"]
) -> tuple[KVCache, tuple[Array, Array, Array]]:
    """Writes new tokens, and gives (keys, values, positions) of all that they may look at, themselves included.

    A full cache is written first and then read. A ring can't be when several tokens come at once: the new ones would
    push out keys that the first of them still see, so old and new are joined for this call.
    """
    old, new = cache.read(), (keys, values, positions)
    cache = cache.write(*new)
    if positions.shape[1] > 1 and is_ring(mask, cache):
        return cache, tuple(jnp.concatenate([a, b.astype(a.dtype)], 1) for a, b in zip(old, new, strict=True))
    return cache, cache.read()


def init(stack: spec.Stack, batch: int, max_length: int, dtype: jnp.dtype) -> StackCache:
    """An empty cache for `batch` rows of up to `max_length` tokens."""

    def empty(block: spec.Block, *lead: int) -> KVCache:
        dims = block.mixer.cache_dims
        slots = (*lead, batch, capacity(block.mixer.mask, max_length))
        return KVCache(
            keys=jnp.zeros((*slots, dims.heads, dims.key), dtype),
            values=jnp.zeros((*slots, dims.heads, dims.value), dtype),
            positions=jnp.full(slots, -1, jnp.int32),
        )

    return StackCache(
        head=tuple(empty(b) for b in stack.head),
        body=tuple(empty(b, stack.repeats) for b in stack.body),
        tail=tuple(empty(b) for b in stack.tail),
    )
