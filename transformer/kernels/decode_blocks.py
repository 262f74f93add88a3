"""The blocks of a cache that a decode kernel loads: how large they are, which of them a row needs, what they cost."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from transformer.ops.cache_rows import GROUP, LANES
from transformer.ops.mask import visible
from transformer.spec import Mask

SUBLANES = 32  # bytes of a register's column: 8 rows of float32, 16 of bfloat16, 32 of int8
# A step of the grid costs some 0.35 us whatever it does. The fastest chip reads a megabyte of keys and as much of
# values in about as long, and a row reads half a block too much on average: so blocks are no larger than that.
STEP_BYTES = 2 * 2**20
# What XLA gives a kernel unasked is 16 MiB on every generation; the compiler wants some of it for itself.
VMEM_BYTES = 12 * 2**20
MOST_HEADS = 8


@dataclass(frozen=True)
class Sizes:
    """What a call reads, on one device.

    Attributes:
      together: tokens that share a row of the cache (`ops.cache_rows`).
      rows: query rows of a key head, G·T, rounded up to the rows of a register.
      key, value: features of a key and of a value.
      shares: values are the first features of keys, which are loaded once.
      kept, computed: dtypes of the cache and of the arithmetic.
      scaled: the cache has a scale a token and head.
      biased: every row and slot has a bias.
    """

    batch: int
    heads: int
    slots: int
    together: int
    rows: int
    key: int
    value: int
    shares: bool
    kept: jnp.dtype
    computed: jnp.dtype
    scaled: bool
    biased: bool

    @property
    def features(self) -> tuple[int, ...]:
        """Widths of the arrays that hold keys and values."""
        return (self.key,) if self.shares else (self.key, self.value)

    def cache_bytes(self, padded: bool = False) -> int:
        """Bytes of the keys, values, scales and positions of all rows: what a call reads at most.

        `padded`: with the lanes that features leave empty, which lie in HBM and are loaded like any other.
        """
        width = self.kept_width if padded else sum(self.features)
        slot = width * self.kept.itemsize + 4 * len(self.features) * self.scaled
        return self.batch * self.slots * (self.heads * slot + 4)

    @property
    def kept_width(self) -> int:
        """Lanes of a token of one head in the cache."""
        return sum(_up(width * self.together, LANES) for width in self.features) // self.together


class Blocks(NamedTuple):
    """Key heads and slots of a block, and how many blocks of slots there are."""

    heads: int
    slots: int
    count: int


def vmem_bytes(sizes: Sizes, heads: int, slots: int) -> int:
    """Bytes of VMEM that a kernel with such blocks takes: two of every block in flight, and one head's arithmetic."""
    rows, wide = sizes.rows, _up(slots, LANES)
    loaded = heads * wide * sizes.kept_width * sizes.kept.itemsize
    loaded += 8 * wide * 4 + len(sizes.features) * sizes.scaled * _up(heads, 8) * wide * 4
    loaded += sizes.biased * heads * rows * wide * 4
    ends = heads * rows * (_up(sizes.key, LANES) + _up(sizes.value, LANES)) * 4
    scratch = heads * rows * (_up(sizes.value, LANES) + 4 * LANES) * 4
    # Scores, weights, what is seen, and the weights as they are multiplied.
    arithmetic = 4 * rows * wide * 4
    if sizes.kept != sizes.computed or sizes.together > 1:  # keys and values as they are multiplied
        arithmetic += wide * sum(_up(width, LANES) for width in sizes.features) * sizes.computed.itemsize
    return 2 * (loaded + ends) + scratch + arithmetic


def choose(sizes: Sizes, slots: int | None = None) -> Blocks | None:
    """The blocks of a call, None where not even the smallest fit `VMEM_BYTES`; of so many `slots`, if told."""
    heads = _head_block(sizes)
    if slots is not None:
        return Blocks(heads, min(slots, sizes.slots), pl.cdiv(sizes.slots, slots))
    step = math.lcm(LANES, GROUP * sizes.together)  # whole tiles of scores, and whole groups of rows
    most = max(STEP_BYTES // (heads * sizes.kept_width * sizes.kept.itemsize) // step * step, step)
    while most > step and vmem_bytes(sizes, heads, most) > VMEM_BYTES:
        most -= step
    if vmem_bytes(sizes, heads, min(most, sizes.slots)) > VMEM_BYTES:
        return None
    count = pl.cdiv(sizes.slots, most)
    if count == 1:
        return Blocks(heads, sizes.slots, 1)
    # Blocks that end with the cache, if not much smaller, else as few and as even as tiles allow.
    whole = [size for size in range(step, most + 1, step) if sizes.slots % size == 0 and 2 * size >= most]
    even = whole[-1] if whole else _up(pl.cdiv(sizes.slots, count), step)
    return Blocks(heads, even, pl.cdiv(sizes.slots, even))


def cost(sizes: Sizes) -> pl.CostEstimate:
    """What analyses count: every row sees its whole cache."""
    scores = sizes.batch * sizes.heads * sizes.rows * sizes.slots
    ends = sizes.batch * sizes.heads * sizes.rows * (sizes.key + sizes.value) * sizes.computed.itemsize
    return pl.CostEstimate(
        flops=2 * scores * (sizes.key + sizes.value),
        bytes_accessed=sizes.cache_bytes(padded=True) + ends + 4 * scores * sizes.biased,
        transcendentals=scores,
    )


def _head_block(sizes: Sizes) -> int:
    # Scales are [heads, slots]: part of the heads must fill whole tiles of 8 rows.
    if sizes.scaled:
        return MOST_HEADS if sizes.heads % MOST_HEADS == 0 else sizes.heads
    return max(n for n in range(1, MOST_HEADS + 1) if sizes.heads % n == 0)


def _up(size: int, multiple: int) -> int:
    return pl.cdiv(size, multiple) * multiple


def padded_positions(k_positions: Int[Array, "B S"], blocks: Blocks) -> Int[Array, "B S2"]:
    """Positions of whole blocks: slots beyond the cache's end are empty."""
    rest = blocks.count * blocks.slots - k_positions.shape[1]
    return jnp.pad(k_positions, ((0, 0), (0, rest)), constant_values=-1)


def needed(
    mask: Mask, q_positions: Int[Array, "B T"], k_positions: Int[Array, "B S2"], blocks: Blocks
) -> tuple[Int[Array, " B"], Int[Array, " B_blocks"]]:
    """How many blocks each row needs, and their numbers in turn, flat; what is beyond a row's count means nothing.

    A block is needed where `ops.mask.visible` shows a query of the row a slot of it.
    """
    shown = jnp.any(visible(mask, q_positions, k_positions), axis=1)
    shown = jnp.any(shown.reshape(-1, blocks.count, blocks.slots), axis=-1)
    place = jnp.cumsum(shown, axis=1) - 1
    at = shown[:, None, :] & (place[:, None, :] == jnp.arange(blocks.count)[:, None])
    numbers = jnp.sum(jnp.where(at, jnp.arange(blocks.count), 0), axis=-1)
    return jnp.sum(shown, axis=1, dtype=jnp.int32), numbers.astype(jnp.int32).reshape(-1)
