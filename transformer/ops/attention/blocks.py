"""Which pairs of a query block and a key block can show anything: what bodies that work in blocks leave out.

`ops.mask.visible` alone decides inside a block. Where row indices bound what it shows, blocks are left out at trace
time, else at run time, from the bounds of each block's positions, segments and orders.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from transformer.ops.attention.call import Call, Where
from transformer.spec import Mask


def block_size(length: int, block: int, unit: int = 1) -> int:
    """Rows of a block: the least multiple of `unit` that needs no more blocks than `block` would."""
    return -(-length // (-(-length // block) * unit)) * unit


def cut(x: Array, size: int, fill: int = 0) -> Array:
    """[B, T, ...] -> [blocks, B, rows, ...], padded with `fill`."""
    x = pad(x, size, fill)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def pad(x: Array, size: int, fill: int = 0) -> Array:
    """[B, T, ...] with T made a multiple of `size`."""
    rest = [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % size), *rest], constant_values=fill)


class Rows(NamedTuple):
    """Positions, segments and orders of one side's rows, in blocks."""

    positions: Int[Array, "blocks B rows"]
    segments: Int[Array, "blocks B rows"] | None
    orders: Int[Array, "blocks B rows"] | None


def cut_rows(where: Where, q_size: int, k_size: int) -> tuple[Rows, Rows]:
    """Both sides in blocks; rows added to fill the last one see nothing and are not seen."""

    def side(positions, segments, orders, size):
        return Rows(cut(positions, size, -1), *(None if x is None else cut(x, size) for x in (segments, orders)))

    return (
        side(where.q_positions, where.q_segments, where.q_orders, q_size),
        side(where.k_positions, where.k_segments, where.k_orders, k_size),
    )


def shown_blocks(
    call: Call, q: Rows, k: Rows, lengths: tuple[int, int]
) -> tuple[Bool[np.ndarray, "q_blocks k_blocks"], Bool[Array, "B q_blocks k_blocks"] | None]:
    """What may show something: at trace time in any row of a batch, and, where more is to be known then, at run time.

    Raises:
      ValueError: an aligned call whose lengths differ.
    """
    if call.aligned and lengths[0] != lengths[1]:
        raise ValueError(f"call.aligned=True: T, S = {lengths} differ, so query i and key i are not one token")
    # Row indices don't bound who comes later where orders say it.
    aligned = call.aligned and q.orders is None
    if not aligned:
        return np.ones((len(q.positions), len(k.positions)), bool), _bounded_blocks(call.mask, q, k)
    shown = aligned_blocks(call.mask, lengths[0], q.positions.shape[-1], k.positions.shape[-1])
    if q.segments is None and not call.mask.sinks:
        return shown, None
    return shown, shown & _bounded_blocks(call.mask, q, k)


def aligned_blocks(mask: Mask, length: int, q_size: int, k_size: int) -> Bool[np.ndarray, "q_blocks k_blocks"]:
    """True at the (query block, key block) in which an aligned call may show something, from row indices alone."""
    (q_first, q_last), (k_first, k_last) = _ends(length, q_size), _ends(length, k_size)
    # Least distance of rows, to earlier and to later keys.
    before, after = q_first[:, None] - k_last, k_first - q_last[:, None]
    # Where the sinks lie, only positions tell.
    bounded = mask.window is not None and not mask.sinks
    shown = np.maximum(before, after) < (mask.window if bounded else length)
    return shown & (after <= 0) if mask.causal else shown


def _ends(length: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    first = np.arange(0, length, size)
    return first, np.minimum(first + size, length) - 1


def _bounded_blocks(mask: Mask, q: Rows, k: Rows) -> Bool[Array, "B q_blocks k_blocks"]:
    """True where the bounds of positions and segments don't rule out that something is seen."""
    q_low, q_high = (x[:, None] for x in _bounds(q.positions, q.positions >= 0))
    k_low, k_high = _bounds(k.positions, k.positions >= 0)
    shown = (q_low <= q_high) & (k_low <= k_high)
    if mask.causal and q.orders is not None and k.orders is not None:
        low, _ = _bounds(k.orders, k.positions >= 0)
        _, high = _bounds(q.orders, q.positions >= 0)
        shown &= low <= high[:, None]
    elif mask.causal:
        shown &= k_low <= q_high
    if mask.window is not None:
        near = (q_low - k_high < mask.window) & (k_low - q_high < mask.window)
        shown &= near | (k_low < mask.sinks)
    if q.segments is not None and k.segments is not None:
        q_low, q_high = (x[:, None] for x in _bounds(q.segments, q.positions >= 0))
        k_low, k_high = _bounds(k.segments, k.positions >= 0)
        shown &= (k_low <= q_high) & (q_low <= k_high)
    return jnp.moveaxis(shown, -1, 0)


def _bounds(x: Int[Array, "blocks B rows"], used: Bool[Array, "blocks B rows"]) -> tuple[Array, Array]:
    """Lowest and highest of a block's used rows, crossed where there is none."""
    ends = jnp.iinfo(x.dtype)
    return jnp.min(x, axis=-1, where=used, initial=ends.max), jnp.max(x, axis=-1, where=used, initial=ends.min)
