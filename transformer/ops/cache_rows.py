"""How the tokens of a cache lie in rows of lanes.

A TPU keeps an array in tiles of 128 lanes. Rows whose features don't fill whole tiles are as large as if they did, in
HBM and on the way from it: 576 features take the room of 640, 64 of 128. So tokens share rows where that leaves no
lane empty, and [S, H] is kept as [S / p, p · H]. The p tokens of a row are `GROUP` slots apart:

          lanes    0 … H-1      H … 2H-1
    row 0        | slot 0     | slot 32     |   p = 2
    row 1        | slot 1     | slot 33     |
    …
    row 31       | slot 31    | slot 63     |
    row 32       | slot 64    | slot 96     |   the next group of 64 slots

A kernel that cuts the lanes of 32 rows into p pieces so has 32 · p tokens in a row, and moves none of them from one
sublane to another (32 rows are the largest tile, that of int8). Everyone else takes the numbers as they lie, which is
[S, H] again, only in the order that `as_kept` brings positions into.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

LANES, GROUP = 128, 32
# More tokens a row are more pieces to cut: 8 for heads of 80 features, 4 for 96.
MOST = 8


def together(slots: int, *widths: int) -> int:
    """Tokens p that share a row of such vectors: 1 where lanes are full anyway, or slots aren't whole groups."""
    count = LANES // math.gcd(LANES, *widths)
    return count if count <= MOST and slots % (GROUP * count) == 0 else 1


def shape(slots: int, width: int, count: int) -> tuple[int, int]:
    """Rows and lanes of so many slots, `count` to a row."""
    return slots // count, width * count


def as_kept(by_slot: Shaped[Array, "*B S"], count: int) -> Shaped[Array, "*B S"]:
    """What belongs to the slots, in the order in which rows have them."""
    if count == 1:
        return by_slot
    groups = by_slot.reshape(*by_slot.shape[:-1], -1, count, GROUP)
    return jnp.swapaxes(groups, -1, -2).reshape(by_slot.shape)


def cut(rows: Shaped[Array, "R W"], count: int) -> Shaped[Array, "S H"]:
    """The tokens of whole groups of rows, slot by slot; for kernels: no row changes its sublane."""
    if count == 1:
        return rows
    width = rows.shape[1] // count
    pieces = [rows[:, i * width : (i + 1) * width].reshape(-1, 1, GROUP, width) for i in range(count)]
    return jnp.concatenate(pieces, axis=1).reshape(-1, width)


def put(
    buffer: Shaped[Array, "..."], new: Shaped[Array, "B T ..."], at: Int[Array, "B T"], layer: Int[Array, ""] | None
):
    """Writes rows, of every head if there are heads, to the layer in view; a row beyond the end is left out.

    Args:
      buffer: [*L, B, R], or [*L, B, K, R], or [*L, B, K, R, W], as `new` is [B, T], [B, T, K] or [B, T, K, W].
    """
    return buffer.at[_index(at, layer, *new.shape[2:3])].set(new.astype(buffer.dtype), mode="drop")


def put_tokens(
    buffer: Shaped[Array, "*L B K R W"],
    new: Float[Array, "B T K H"],
    slots: Int[Array, "B T"],
    layer: Int[Array, ""] | None,
    count: int,
) -> Shaped[Array, "*L B K R W"]:
    """Writes tokens to their slots, in place; a slot beyond the end is left out.

    A row that tokens share is read, changed and written back: XLA:TPU scatters whole rows in place, and copies the
    buffer to scatter parts of them. New tokens of one row would overwrite each other, so those of each place in a row
    are written by themselves.
    """
    if count == 1:
        return put(buffer, new, slots, layer)
    group, place = slots // (GROUP * count), slots % (GROUP * count)
    rows, places = group * GROUP + place % GROUP, place // GROUP
    own = jnp.arange(buffer.shape[-1]) // new.shape[-1] == places[..., None, None]
    new = jnp.tile(new.astype(buffer.dtype), count)

    def write(rows: Array, buffer: Array) -> Array:
        old = buffer.at[_index(rows, layer, new.shape[2])].get(mode="clip")
        return put(buffer, jnp.where(own, new, old), rows, layer)

    if slots.shape[1] == 1:
        return write(rows, buffer)
    beyond = buffer.shape[-2]
    # Not a loop of the program's: XLA:TPU would take a buffer that fits VMEM there and back.
    for place in range(count):
        buffer = write(jnp.where(places == place, rows, beyond), buffer)
    return buffer


def _index(rows: Int[Array, "B T"], layer: Int[Array, ""] | None, *heads: int) -> tuple:
    """Of rows, in each of so many heads; every head by its number.

    With a slice for them XLA:TPU scatters all heads' rows of a token as one piece, for which it lays heads beside
    features: it turns the whole buffer before a kernel that reads it head by head, and back again.
    """
    batch = jnp.arange(rows.shape[0])[:, None]
    index = (batch[..., None], jnp.arange(*heads), rows[..., None]) if heads else (batch, rows)
    return index if layer is None else (layer, *index)
