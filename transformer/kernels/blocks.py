"""Sizes of the blocks in which splash attention works, for each chip: as large as pays and as VMEM holds.

Nothing here was timed on a TPU. `vmem_bytes` is held against the compiler (`benchmarks/attention_kernels.py`,
docs/kernels.md); `seconds` ranks the sizes that fit, by published peak rates, the length of schedules that the compiler
made, and a fixed price of a step.
"""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from transformer.spec import Mask

MiB = 2**20
SIZES = (128, 256, 512, 1024)
MOST_PAIRS = 512 * 1024  # of a block: scores of more don't pay for their room
MOST_HEADS = 16
LEAST = 14 * MiB  # allowed to any kernel, so that small ones need no exact sum
# Assumptions: what a step of a grid costs beside its work, and by what factor times have to differ to count.
STEP_SECONDS, SLACK = 0.35e-6, 1.1
# What a score costs the vector units, and a row that keeps a running softmax: from the compiler's schedules for v5e.
PAIR_SECONDS, ROW_SECONDS = 1.6e-12, 0.3e-9


@dataclass(frozen=True)
class Chip:
    """What a TensorCore has: VMEM in bytes, bfloat16 FLOPs a second, and bytes a second from HBM."""

    vmem: int
    flops: float
    bandwidth: float


CHIPS = {
    "TPU v4": Chip(16 * MiB, 137e12, 0.6e12),
    "TPU v5 lite": Chip(128 * MiB, 197e12, 0.82e12),
    "TPU v5": Chip(64 * MiB, 459e12, 2.77e12),
    "TPU v6 lite": Chip(128 * MiB, 920e12, 1.64e12),
    "TPU7x": Chip(64 * MiB, 1150e12, 3.69e12),
}
# Where there is no TPU, or one that the table doesn't know: what fits the least.
UNKNOWN = CHIPS["TPU v4"]


@dataclass(frozen=True)
class Shape:
    """What the sizes depend on: of one device."""

    group: int
    q_length: int
    k_length: int
    dim: int
    v_dim: int
    itemsize: int
    buckets: int = 0


class Blocks(NamedTuple):
    """Rows of a query block and of a key block, heads of a group that share a load, and bytes of VMEM to be allowed."""

    q: int
    k: int
    heads: int
    vmem: int


def vmem_room(kind: str) -> int:
    """Bytes of a chip's VMEM that a kernel may use: what is left is the compiler's own."""
    return CHIPS.get(kind, UNKNOWN).vmem * 7 // 8


def choose(kind: str, shape: Shape, mask: Mask, backward: bool, block: int | None = None) -> Blocks:
    """The sizes that `seconds` puts first of those that fit; `block` rows of either side where a setting says so.

    Raises:
      ValueError: blocks of that many rows don't fit the chip's VMEM.
    """
    room = vmem_room(kind)
    q, k, heads = _best(kind, shape, mask, backward, block)
    needed = vmem_bytes(replace(shape, group=heads), q, k, backward)
    if needed > room and kind in CHIPS:
        raise ValueError(
            f"compute.attention_block={block}: needs {needed / MiB:.1f} MiB of VMEM, and {kind} has "
            f"{room / MiB:.1f} for a kernel; use a smaller multiple of 128, or None"
        )
    # What a kernel may use and doesn't is lost to what the compiler keeps in VMEM around it.
    return Blocks(q, k, heads, min(max(needed, LEAST), room))


@functools.cache
def _best(kind: str, shape: Shape, mask: Mask, backward: bool, block: int | None) -> tuple[int, int, int]:
    """About the quickest sizes that fit, or the least where none do."""
    chip, room = CHIPS.get(kind, UNKNOWN), vmem_room(kind)
    sizes = [(q, k) for q in SIZES for k in SIZES if q * k <= MOST_PAIRS] if block is None else [(block, block)]
    heads = [n for n in range(1, min(shape.group, MOST_HEADS) + 1) if shape.group % n == 0]
    choices = [(*size, n) for n in heads for size in sizes]
    fitting = [c for c in choices if vmem_bytes(replace(shape, group=c[2]), *c[:2], backward) <= room]
    times = {c: seconds(chip, shape, mask, *c, backward) for c in fitting or choices[:1]}
    # Of times that the model can't tell apart, the one with the least work.
    near = [c for c, time in times.items() if time <= SLACK * min(times.values())]
    return min(near, key=lambda c: (visited(mask, shape.q_length, shape.k_length, *c[:2]) * c[0] * c[1], times[c]))


def seconds(
    chip: Chip, shape: Shape, mask: Mask, q_block: int, k_block: int, heads: int, backward: bool = False
) -> float:
    """A pass's time for one row and one key head, as far as sizes change it.

    A visit is bound by products, by the softmax or by loads of keys and values, whichever takes longest.
    """
    visits = visited(mask, shape.q_length, shape.k_length, q_block, k_block) * (shape.group // heads)
    rows, dims = heads * q_block, shape.dim + shape.v_dim
    rate = chip.flops / (1 if shape.itemsize == 2 else 3)
    softmax = rows * k_block * PAIR_SECONDS
    loads = k_block * dims * shape.itemsize / chip.bandwidth

    def visit(products: int, of_rows: float) -> float:
        return STEP_SECONDS + max(2 * rows * k_block * products / rate, softmax + of_rows, loads)

    if not backward:
        return visits * visit(dims, rows * ROW_SECONDS)
    return visits * (visit(dims + shape.dim, 0) + visit(2 * dims, 0))


def visited(mask: Mask, q_length: int, k_length: int, q_block: int, k_block: int) -> int:
    """Block pairs in which a mask over positions that end together shows something."""
    q = np.arange(k_length - q_length, k_length, q_block)[:, None]
    k = np.arange(0, k_length, k_block)
    q_last, k_last = q + q_block - 1, k + k_block - 1
    shown = np.ones((q.shape[0], k.shape[0]), bool)
    if mask.causal:
        shown &= k <= q_last
    if mask.window is not None:
        shown &= (np.maximum(q - k_last, k - q_last) < mask.window) | (k < mask.sinks)
    return int(shown.sum())


def vmem_bytes(shape: Shape, q_block: int, k_block: int, backward: bool) -> int:
    """An upper bound of the VMEM of a kernel, of the larger one where there are two."""
    if not backward:
        return _forward_bytes(shape, q_block, k_block)
    return max(_queries_bytes(shape, q_block, k_block), _keys_bytes(shape, q_block, k_block))


def _forward_bytes(s: Shape, q_block: int, k_block: int) -> int:
    dims = _lanes(s.dim) + _lanes(s.v_dim)
    moving = s.group * q_block * (dims * s.itemsize + _row(1)) + k_block * dims * s.itemsize
    kept = s.group * q_block * (_lanes(s.v_dim) + 2 * 128) * 4
    return 2 * (moving + _fields(q_block, k_block)) + kept + _columns(q_block) + _scores(s, q_block, k_block, 4)


def _queries_bytes(s: Shape, q_block: int, k_block: int) -> int:
    dims = _lanes(s.dim) + _lanes(s.v_dim)
    moving = s.group * q_block * ((dims + _lanes(s.dim)) * s.itemsize + _row(2)) + k_block * dims * s.itemsize
    moving += s.group * s.buckets * k_block * _row(1)
    kept = s.group * q_block * _lanes(s.dim) * 4
    return 2 * (moving + _fields(q_block, k_block)) + kept + _scores(s, q_block, k_block, 5)


def _keys_bytes(s: Shape, q_block: int, k_block: int) -> int:
    dims = _lanes(s.dim) + _lanes(s.v_dim)
    moving = s.group * q_block * (dims * s.itemsize + _row(2)) + 2 * k_block * dims * s.itemsize
    return 2 * (moving + _fields(q_block, k_block)) + k_block * dims * 4 + _scores(s, q_block, k_block, 5)


def _scores(s: Shape, q_block: int, k_block: int, arrays: int) -> int:
    """Arrays of one head's pairs that are alive at once."""
    return (arrays + 2 * (s.buckets > 0)) * q_block * k_block * 4


def _fields(q_block: int, k_block: int) -> int:
    return (q_block + k_block) * _row(3)


def _columns(block: int) -> int:
    """Positions, segments and orders of the outer block's tokens, each in all lanes of a register."""
    return block * 3 * 128 * 4


def _row(count: int) -> int:
    """Bytes a token of arrays [1, block], of which a register of eight sublanes holds one."""
    return 8 * 4 * count


def _lanes(dim: int) -> int:
    return -(-dim // 128) * 128
