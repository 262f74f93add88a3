"""What every layer of a call shares: where the tokens are."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer import spec
from transformer.ops import rope


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """Positions, segments and the rotations they imply, computed once for all layers.

    Attributes:
      positions: [B, T] absolute positions; negative marks padding.
      segments: [B, T] ids of packed documents, or None where a row is one document.
      tables: (cos, sin), each [B, T, P], of every rope in `ropes`.
      fresh: the cache is empty, so that keys of this call are all there is to see (whole-prompt prefill).
    """

    positions: Int[Array, "B T"]
    segments: Int[Array, "B T"] | None
    tables: tuple[tuple[Float[Array, "B T P"], Float[Array, "B T P"]], ...]
    ropes: tuple[spec.Rope, ...] = field(metadata={"static": True})
    fresh: bool = field(metadata={"static": True}, default=False)

    @property
    def real(self) -> Bool[Array, "B T"]:
        """False in padding: negative positions and segment 0."""
        real = self.positions >= 0
        return real if self.segments is None else real & (self.segments != 0)

    def rotate(self, which: spec.Rope | None, x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        """Applies a layer's rotary embedding; the identity where it has none."""
        return x if which is None else rope.rotate(which, x, *self.tables[self.ropes.index(which)])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Source:
    """What an encoder reads, [B, S] each; segment k of it belongs to segment k of the decoder's row."""

    tokens: Int[Array, "B S"]
    positions: Int[Array, "B S"]
    segment_ids: Int[Array, "B S"]


def make_context(
    ropes: tuple[spec.Rope, ...],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"] | None = None,
    fresh: bool = False,
) -> Context:
    """The context of a call, with the rotation tables of every distinct rope of the model."""
    tables = tuple(rope.rotations(r, positions) for r in ropes)
    return Context(positions=positions, segments=segments, tables=tables, ropes=ropes, fresh=fresh)


def default_positions(segments: Int[Array, "B T"] | None, shape: tuple[int, int]) -> Int[Array, "B T"]:
    """0, 1, 2 … along each row, from 0 again where a new segment starts; -1 in segment 0, which is padding."""
    index = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    if segments is None:
        return index
    before = jnp.pad(segments, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    start = jax.lax.cummax(jnp.where(segments != before, index, 0), axis=1)
    return jnp.where(segments == 0, -1, index - start)
