"""The blocks of a cache that a decode kernel loads: how large they are, which of them a row needs, what they cost."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from transformer.ops.mask import visible
from transformer.spec import Mask

LANES = 128
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

    def cache_bytes(self) -> int:
        """Bytes of the keys, values, scales and positions of all rows: what a call reads at most, lanes unpadded."""
        slot = sum(self.features) * self.kept.itemsize + 4 * len(self.features) * self.scaled
        return self.batch * self.slots * (self.heads * slot + 4)


class Blocks(NamedTuple):
    """Key heads and slots of a block, and how many blocks of slots there are."""

    heads: int
    slots: int
    count: int


def vmem_bytes(sizes: Sizes, heads: int, slots: int) -> int:
    """Bytes of VMEM that a kernel with such blocks takes: two of every block in flight, and one head's arithmetic."""
    rows, wide = sizes.rows, pl.cdiv(slots, LANES) * LANES
    loaded = sum(heads * wide * _padded(width) * sizes.kept.itemsize for width in sizes.features)
    loaded += 8 * wide * 4 + len(sizes.features) * sizes.scaled * max(heads, 8) * wide * 4
    loaded += sizes.biased * heads * rows * wide * 4
    ends = heads * rows * (_padded(sizes.key) + _padded(sizes.value)) * sizes.computed.itemsize
    scratch = heads * rows * (_padded(sizes.value) + 4 * LANES) * 4
    # Scores, weights, what is seen, and the weights as they are multiplied; keys and values as they are multiplied.
    arithmetic = 4 * rows * wide * 4 + (sizes.kept != sizes.computed) * wide * sizes.computed.itemsize * sum(
        _padded(width) for width in sizes.features
    )
    return 2 * (loaded + ends) + scratch + arithmetic


def choose(sizes: Sizes, slots: int | None = None) -> Blocks | None:
    """The blocks of a call, None where not even the smallest fit `VMEM_BYTES`; `slots` of a block, if given, as told."""
    heads = _head_block(sizes)
    if slots is not None:
        return Blocks(heads, min(slots, sizes.slots), pl.cdiv(sizes.slots, slots))
    a_slot = heads * sum(_padded(width) for width in sizes.features) * sizes.kept.itemsize
    most = max(STEP_BYTES // a_slot // LANES * LANES, LANES)
    while most > LANES and vmem_bytes(sizes, heads, most) > VMEM_BYTES:
        most -= LANES
    if vmem_bytes(sizes, heads, min(most, sizes.slots)) > VMEM_BYTES:
        return None
    # As few blocks as that, and as even as tiles allow.
    count = pl.cdiv(sizes.slots, most)
    even = pl.cdiv(pl.cdiv(sizes.slots, count), LANES) * LANES
    return Blocks(heads, sizes.slots, 1) if count == 1 else Blocks(heads, even, pl.cdiv(sizes.slots, even))


def cost(sizes: Sizes) -> pl.CostEstimate:
    """What analyses count: every row sees its whole cache."""
    scores = sizes.batch * sizes.heads * sizes.rows * sizes.slots
    ends = sizes.batch * sizes.heads * sizes.rows * (sizes.key + sizes.value) * sizes.computed.itemsize
    return pl.CostEstimate(
        flops=2 * scores * (sizes.key + sizes.value),
        bytes_accessed=sizes.cache_bytes() + ends + 4 * scores * sizes.biased,
        transcendentals=scores,
    )


def _head_block(sizes: Sizes) -> int:
    # Scales are [heads, slots]: part of the heads must fill whole tiles of 8 rows.
    if sizes.scaled:
        return MOST_HEADS if sizes.heads % MOST_HEADS == 0 else sizes.heads
    return max(n for n in range(1, MOST_HEADS + 1) if sizes.heads % n == 0)


def _padded(width: int) -> int:
    return pl.cdiv(width, LANES) * LANES


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
