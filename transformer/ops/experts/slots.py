"""Who sits where: a two-way map between (token, expert) assignments and the rows of a buffer grouped by expert.

Rows are filled and emptied by gathers, forwards and backwards: the map knows both directions, so that no scatter of
features is ever needed.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Slots(NamedTuple):
    """S rows in tiles of one expert each. Assignment j·N + n is choice j of token n; there are M = N·k.

    Attributes:
      source: the assignment in each row; M in an empty one.
      row: the row of each assignment; S where it has none: padding, or dropped.
      expert: of each tile.
      used: how many tiles come before those that hold nothing; of rooms, all.
      sizes: assignments of each expert, dropped ones included.
    """

    source: Int[Array, " S"]
    row: Int[Array, "N k"]
    expert: Int[Array, " tiles"]
    used: Int[Array, ""]
    sizes: Int[Array, " E"]

    @property
    def tile(self) -> int:
        """Rows of a tile."""
        return self.source.shape[0] // self.expert.shape[0]


def grouped(index: Int[Array, "N k"], num_experts: int, tile: int, most: int | None = None, room: int = 0) -> Slots:
    """Rows sorted by expert, each expert's filled up to whole tiles; nothing is dropped.

    Args:
      index: expert of each assignment; `num_experts` and above: none, it gets no row.
      most: an upper bound of the assignments that have an expert, where one below N·k is known.
      room: of every expert's rows, so many lie in front of all others', E · room in all, in use or not: whole tiles.
    """
    most = index.size if most is None else min(most, index.size)
    beyond = max(most - room, 0)
    # With rooms, one last tile is counted: each further expert that has one filled a room, which holds more rows than
    # the tile may leave empty.
    tiles = -(-beyond // tile) if room else (most + min(num_experts, most) * (tile - 1)) // tile
    order, starts = _sort(index, num_experts)
    counts = -(-jnp.maximum(jnp.diff(starts) - room, 0) // tile)
    ends = jnp.cumsum(counts)
    inside, number = jnp.divmod(jnp.arange(num_experts * room // tile, dtype=jnp.int32), max(room // tile, 1))
    outside = jnp.minimum(jnp.searchsorted(ends, jnp.arange(tiles), side="right"), num_experts - 1).astype(jnp.int32)
    rank = jnp.concatenate([tile * number, room + tile * (jnp.arange(tiles) - (ends - counts)[outside])])

    def place(expert: Array, rank: Array) -> Array:
        row = num_experts * room + tile * (ends - counts)[expert] + rank - room
        return jnp.where(rank < room, expert * room + rank, row) if room else row

    used = num_experts * room // tile + ends[-1]
    return _fill(index, order, starts, jnp.concatenate([inside, outside]), rank, place, tile, used, limit=index.size)


def capacity(index: Int[Array, "N k"], num_experts: int, room: int) -> Slots:
    """`room` rows an expert, one tile each: first choices sit first, then earlier tokens; who comes late is dropped."""
    order, starts = _sort(index, num_experts)
    expert = jnp.arange(num_experts, dtype=jnp.int32)

    def place(expert: Array, rank: Array) -> Array:
        return expert * room + rank

    return _fill(index, order, starts, expert, 0 * expert, place, room, jnp.int32(num_experts), limit=room)


def _sort(index: Int[Array, "N k"], num_experts: int) -> tuple[Int[Array, " M"], Int[Array, " E+1"]]:
    """Assignments in the order of their experts, and where each expert's begin."""
    flat = index.T.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    starts = jnp.searchsorted(flat[order], jnp.arange(num_experts + 1)).astype(jnp.int32)
    return order, starts


def _fill(index, order, starts, expert, rank, place: Callable, tile: int, used, *, limit: int) -> Slots:
    """The map.

    Args:
      expert, rank: of every tile, its expert and the place of its first row among the expert's assignments.
      place: the row, given the expert and the place among its assignments.
      limit: how many rows an expert may take.
    """
    assignments, rows, num_experts = index.size, expert.shape[0] * tile, starts.shape[0] - 1
    sizes = jnp.diff(starts)
    owner = jnp.repeat(expert, tile)
    nth = jnp.repeat(rank, tile) + jnp.arange(rows, dtype=jnp.int32) % tile
    held = nth < jnp.minimum(sizes[owner], limit)
    source = jnp.where(held, order[jnp.where(held, starts[owner] + nth, 0)], assignments)
    nth = jnp.zeros_like(order).at[order].set(jnp.arange(assignments, dtype=jnp.int32), unique_indices=True)
    nth = nth.reshape(index.shape[::-1]).T
    routed = index < num_experts
    chosen = jnp.where(routed, index, 0)
    nth = nth - starts[chosen]
    row = jnp.where(routed & (nth < limit), place(chosen, nth), rows)
    return Slots(source, row.astype(jnp.int32), expert, used, sizes)


@jax.custom_vjp
def spread(x: Float[Array, "N D"], slots: Slots) -> Float[Array, "S D"]:
    """Each row's token; zeros in empty rows."""
    tokens = x.shape[0]
    empty = slots.source == slots.row.size
    return jnp.take(x, jnp.where(empty, tokens, slots.source % tokens), axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def collect(rows: Float[Array, "S D"], slots: Slots) -> Float[Array, "N k D"]:
    """The row of each assignment; zeros where it has none."""
    return jnp.take(rows, slots.row, axis=0, mode="fill", fill_value=0)


def _spread_backward(slots: Slots, g):
    return jnp.sum(collect(g, slots).astype(jnp.float32), axis=1).astype(g.dtype), None


def _collect_backward(slots: Slots, g):
    tokens, choices, width = g.shape
    empty = slots.source == slots.row.size
    where = jnp.where(empty, slots.source, slots.source % tokens * choices + slots.source // tokens)
    return jnp.take(g.reshape(-1, width), where, axis=0, mode="fill", fill_value=0), None


spread.defvjp(lambda x, slots: (spread(x, slots), slots), _spread_backward)
collect.defvjp(lambda rows, slots: (collect(rows, slots), slots), _collect_backward)
