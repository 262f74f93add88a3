"""What every layer of a call shares: where the tokens are, and what an encoder made of another text."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer import spec
from transformer.ops import rope, zigzag
from transformer.ops.attention import Where


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Source:
    """A text for an encoder to read.

    Attributes:
      positions: absolute, negative in padding; by default 0, 1, 2 … restarting at each segment.
      segments: ids of packed documents, 0 in padding; what follows document i in the decoder sees document i.
    """

    tokens: Int[Array, "B S"]
    positions: Int[Array, "B S"] | None = None
    segments: Int[Array, "B S"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Memory:
    """What an encoder made of a text: what cross-attention looks at."""

    features: Float[Array, "B S D"]
    positions: Int[Array, "B S"]
    segments: Int[Array, "B S"] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """Positions, segments and the rotations they imply, computed once for all layers.

    Attributes:
      positions: [B, T] absolute positions; negative marks padding.
      segments: [B, T] ids of packed documents, or None where a row is one document.
      tables: (cos, sin), each [B, T, P], of every rope in `ropes`.
      orders: [B, T] what replaces positions in the question of what comes later (`ops.mask.visible`), or None.
      memory: for cross-attention; None where there is none, or where the cache has it.
      bias: the stack's table of relative biases, or None.
      fresh: the cache is empty, so that keys of this call are all there is to see (whole-prompt prefill).
      zigzag: tokens lie in the order of `ops.zigzag`, with all that belongs to them.
    """

    positions: Int[Array, "B T"]
    segments: Int[Array, "B T"] | None
    tables: tuple[tuple[Float[Array, "B T P"], Float[Array, "B T P"]], ...]
    ropes: tuple[spec.Rope, ...] = field(metadata={"static": True})
    orders: Int[Array, "B T"] | None = None
    memory: Memory | None = None
    bias: Float[Array, "R N"] | None = None
    fresh: bool = field(metadata={"static": True}, default=False)
    zigzag: bool = field(metadata={"static": True}, default=False)

    @property
    def real(self) -> Bool[Array, "B T"]:
        """False in padding: negative positions and segment 0."""
        real = self.positions >= 0
        return real if self.segments is None else real & (self.segments != 0)

    def where(self, k_positions: Int[Array, "B S"]) -> Where:
        """This call's queries and keys of the same text: this call's own, or what a cache holds."""
        segments, orders = (self.segments,) * 2, (self.orders,) * 2
        return Where(self.positions, k_positions, *segments, *orders, zigzag=self.zigzag)

    def rotate(self, which: spec.Rope | None, x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        """Applies a layer's rotary embedding; the identity where it has none."""
        return x if which is None else rope.rotate(which, x, *self.tables[self.ropes.index(which)])


@dataclass(frozen=True)
class Order:
    """The order in which the tokens of rows go through a stack: their own, or that of `ops.zigzag`."""

    zigzag: bool = False
    rules: str = "default"

    def out[T](self, rows: T) -> T:
        """Arrays [B, T, …], from the rows' own order to this one."""
        return jax.tree.map(lambda x: zigzag.spread(x, self.rules), rows) if self.zigzag else rows

    def back[T](self, rows: T) -> T:
        """The inverse of `out`."""
        return jax.tree.map(lambda x: zigzag.collect(x, self.rules), rows) if self.zigzag else rows


def make_context(
    ropes: tuple[spec.Rope, ...],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"] | None = None,
    fresh: bool = False,
    orders: Int[Array, "B T"] | None = None,
    memory: Memory | None = None,
    zigzag: bool = False,
) -> Context:
    """The context of a call, with the rotation tables of every distinct rope of the model."""
    tables = tuple(rope.rotations(r, positions) for r in ropes)
    return Context(positions, segments, tables, ropes, orders, memory, fresh=fresh, zigzag=zigzag)


def default_positions(segments: Int[Array, "B T"] | None, shape: tuple[int, int]) -> Int[Array, "B T"]:
    """0, 1, 2 … along each row, from 0 again where a new segment starts; -1 in segment 0, which is padding."""
    index = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    if segments is None:
        return index
    before = jnp.pad(segments, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    start = jax.lax.cummax(jnp.where(segments != before, index, 0), axis=1)
    return jnp.where(segments == 0, -1, index - start)
