"""The list of block pairs that a kernel's grid walks, read ahead of the blocks themselves (scalar prefetch).

A visit is one int32: | outer block, 14 bits | inner block, 14 bits | WORK | LAST | FIRST |. Visits of an outer block
follow one another, so that its accumulators stay in VMEM from the first to the last of them.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

FIRST, LAST, WORK = 1, 2, 4
_BITS = 14
MOST_BLOCKS = 1 << _BITS  # of each side
# Scalar memory is 1 MiB on the chips of today; the list leaves half of it to the compiler.
MOST_VISITS = 128 * 1024


class Visits(NamedTuple):
    """One list for all rows of a batch (L = 1) or one each (L = B), of which `steps` visits are to be walked."""

    codes: Int[Array, "L visits"]
    steps: int | Int[Array, ""]


def visits(shown: Bool[np.ndarray, "outer inner"], bounded: Bool[Array, "B outer inner"] | None) -> Visits:
    """Visits of the pairs that are shown, outer-major.

    Args:
      shown: at trace time; bounds the length of the list.
      bounded: at run time, a subset of it, or None where there is nothing more to know.

    An outer block without any pair is visited once without work: its results are zeros that someone must write.

    Raises:
      ValueError: too many blocks or visits to be listed; larger blocks are fewer.
    """
    if max(shown.shape) > MOST_BLOCKS:
        raise ValueError(f"{shown.shape} blocks: at most {MOST_BLOCKS} a side; use larger blocks")
    most = int(np.maximum(shown.sum(-1), 1).sum())
    lists = 1 if bounded is None else len(bounded)
    if most * lists > MOST_VISITS:
        raise ValueError(f"{lists} lists of {most} block pairs: at most {MOST_VISITS} in all; use larger blocks")
    if bounded is None:
        codes, count = _coded(np, shown[None], most)
        return Visits(jnp.asarray(codes), int(count[0]))
    codes, count = _coded(jnp, bounded, most)
    return Visits(codes, jnp.max(count))


def _coded(xp, shown, most: int):
    """Codes [L, most] and how many of them are visits, in NumPy or in JAX."""
    lists, _, inner = shown.shape
    idle = ~xp.any(shown, axis=-1, keepdims=True) & (xp.arange(inner) == 0)
    listed, work = (x.reshape(lists, -1) for x in (shown | idle, shown))
    count = xp.sum(listed, axis=-1, dtype=xp.int32)
    step = xp.arange(most, dtype=xp.int32)
    used = step < count[:, None]
    # Steps beyond the visits repeat the last one's blocks, which then aren't fetched again.
    pairs = xp.argsort(~listed, axis=-1, stable=True)[:, :most]
    pairs = xp.take_along_axis(pairs, xp.minimum(step, count[:, None] - 1), axis=-1)
    row = pairs // inner
    changes = row[:, 1:] != row[:, :-1]
    edge = xp.ones((lists, 1), bool)
    first = xp.concatenate([edge, changes], axis=-1)
    last = xp.concatenate([changes, edge], axis=-1) | (step == count[:, None] - 1)
    flags = FIRST * first + LAST * last + WORK * xp.take_along_axis(work, pairs, axis=-1)
    codes = (row << (_BITS + 3)) | (pairs % inner << 3) | xp.where(used, flags, 0)
    return codes.astype(xp.int32), count


def outer(code: Int[Array, ""]) -> Int[Array, ""]:
    """The block whose results a visit adds to."""
    return (code >> (_BITS + 3)) & (MOST_BLOCKS - 1)


def inner(code: Int[Array, ""]) -> Int[Array, ""]:
    """The block that it meets."""
    return (code >> 3) & (MOST_BLOCKS - 1)
