"""How fast the links of a slice carry what goes along mesh axes: a roofline, which no collective beats."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformer.planning.chips import Chip
from transformer.planning.report import Exchange

ALL_TO_ALL = ("all-to-all", "ragged-all-to-all")


@dataclass(frozen=True)
class Dimension:
    """A dimension of the torus: its size, and whether its links go around."""

    size: int
    wraps: bool


def dimensions(chip: Chip, shape: Sequence[int]) -> tuple[Dimension, ...]:
    """Those of a slice of that shape; a slice of a whole row goes around, as do cubes of four."""
    return tuple(Dimension(size, size % chip.row == 0) for size in shape)


def lanes(chip: Chip, shape: Sequence[int], mesh: Mapping[str, int]) -> dict[str, tuple[Dimension, ...]] | None:
    """The dimensions along which each mesh axis lies, or None where they can't be dealt out.

    The last axes, which send most, choose first, and take as many dimensions as they can: as
    `jax.experimental.mesh_utils` deals them out. The axis `slice` lies along none, and those of size 1 neither. Devices
    that share a chip are one more dimension.
    """
    left = list(dimensions(chip, shape)) + ([Dimension(chip.devices, False)] if chip.devices > 1 else [])
    dealt: dict[str, tuple[Dimension, ...]] = {}
    for axis, size in reversed(mesh.items()):
        if axis == "slice" or size == 1:
            continue
        for count in range(len(left), 0, -1):
            fitting = [c for c in itertools.combinations(left, count) if math.prod(d.size for d in c) == size]
            if fitting:
                dealt[axis] = fitting[0]
                for dimension in fitting[0]:
                    left.remove(dimension)
                break
        else:
            return None
    return dealt


def seconds(chip: Chip, dealt: Mapping[str, tuple[Dimension, ...]], mesh: Mapping[str, int], exchange: Exchange) -> float:
    """How long the links of a device take for what it sends, by the best algorithm of a torus.

    A ring goes both ways round where links do, and along all dimensions at once. In an all-to-all, bytes pass a quarter
    of a ring's devices on average, or a third of a line's.
    """
    if exchange.axes is not None and "slice" in exchange.axes:
        return exchange.sent / chip.device_network if chip.device_network else math.inf
    axes = [axis for axis in mesh if mesh[axis] > 1] if exchange.axes is None else exchange.axes
    along = [d for axis in axes for d in dealt.get(axis, (Dimension(mesh[axis], False),)) if d.size > 1]
    if not along:
        return 0.0
    link = chip.link / chip.devices
    rate = link * sum(2 if d.wraps and d.size > 2 else 1 for d in along)
    ring = exchange.sent / rate
    if exchange.kind in ALL_TO_ALL:
        group = math.prod(d.size for d in along)
        whole = exchange.sent * group / (group - 1)
        return max(ring, *(whole * d.size / (8 if d.wraps else 4) / link for d in along))
    return ring
