"""Several sources in one endless order: whose turn it is follows from the place in that order alone."""

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from transformer.training.documents import Documents

TOTAL = 2**32  # in which the shares of a mixture are counted
LOOKED_AT = 10_000  # pairs by which it is told how long they are


@dataclass(frozen=True)
class Part:
    """What is read of one source: documents or pairs, their share of the bytes, and how often (None: for ever)."""

    items: Sequence[Any]
    weight: float = 1.0
    epochs: int | None = None

    @property
    def length(self) -> int | None:
        """How many documents or pairs it gives in all."""
        return None if self.epochs is None else self.epochs * len(self.items)


class Turns(grain.transforms.DatasetSelectionMap):
    """Which part's turn it is at a place, and the how-manieth of its own that is.

    The first n turns hold each part's share of n, rounded, whatever n is. A part that has given all that it has is out,
    and the others go on in their proportion.

    Attributes:
      ends: (place, part) of those that end: the place from which they give nothing more.
    """

    def __init__(self, shares: Sequence[float], lengths: Sequence[int | None]):
        self.ends: list[tuple[int, int]] = []
        self._starts, self._phases = [], []  # a phase: the parts that take turns, their shares, and their turns before
        place, before, left = 0, [0] * len(shares), list(range(len(shares)))
        while left:
            weights = [_counted(shares[part], [shares[other] for other in left]) for part in left]
            rest = [None if lengths[part] is None else lengths[part] - before[part] for part in left]
            self._starts.append(place)
            self._phases.append((left, weights, list(before)))
            if all(count is None for count in rest):
                place = sys.maxsize
                break
            turns = _longest(weights, rest)
            for part, count in zip(left, _counts(turns, weights), strict=True):
                before[part] += count
            place += turns
            out = [part for part in left if before[part] == lengths[part]]
            self.ends += [(place, part) for part in out]
            left = [part for part in left if part not in out]
        self._length = place

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> tuple[int, int]:
        phase = bisect_right(self._starts, place) - 1
        parts, weights, before = self._phases[phase]
        turn = place - self._starts[phase]
        counts, behind = _counts(turn, weights), _counts(turn + 1, weights)
        chosen = next(i for i, (a, b) in enumerate(zip(counts, behind, strict=True)) if b > a)
        return parts[chosen], before[parts[chosen]] + counts[chosen]


def in_order(parts: Sequence[Part], seeds: Sequence[int]) -> grain.MapDataset[Any]:
    """All that the parts give, each reshuffled each epoch; endless where one of them is.

    Args:
      seeds: of each part's order.
    """
    each = [
        grain.MapDataset.source(part.items).shuffle(seed=seed).repeat(part.epochs)
        for part, seed in zip(parts, seeds, strict=True)
    ]
    return each[0] if len(each) == 1 else grain.MapDataset.select_from_datasets(each, turns_of(parts))


def turns_of(parts: Sequence[Part]) -> Turns:
    """The turns that give each part its weight's share of the bytes."""
    return Turns([part.weight / mean_bytes(part.items) for part in parts], [part.length for part in parts])


def told(parts: Sequence[Part], names: Sequence[str]) -> list[str]:
    """A line a part: its share of bytes and documents, and where it ends."""
    total, ends = sum(part.weight for part in parts), {part: place for place, part in turns_of(parts).ends}
    lines = []
    for number, (part, name) in enumerate(zip(parts, names, strict=True)):
        line = f"{name}: {part.weight / total:.1%} of the bytes, {len(part.items):,} items to train on"
        if number in ends:
            times = "once" if part.epochs == 1 else f"{part.epochs} times"
            line += f", {times}: ends after {ends[number]:,} items of the mixture"
        lines.append(line)
    return lines


def mean_bytes(items: Sequence[Any]) -> float:
    """UTF-8 bytes of a document, or of both texts of a pair; of many pairs, as some evenly spaced ones tell."""
    if isinstance(items, Documents):
        return float(items.sizes.mean())
    some = range(0, len(items), -(-len(items) // LOOKED_AT))
    return float(np.mean([sum(len(text.encode()) for text in items[i]) for i in some]))


def _counted(share: float, shares: Sequence[float]) -> int:
    return max(1, round(share / sum(shares) * TOTAL))


def _counts(turns: int, weights: Sequence[int]) -> list[int]:
    """How many of the first turns each part has: whole numbers that add up to them, and that no further turn lowers.

    The first part's share of the turns is rounded up; of what is left the second's, and so on.
    """
    counts, rest = [], sum(weights)
    for weight in weights:
        kept = turns * (rest - weight) // rest
        counts.append(turns - kept)
        turns, rest = kept, rest - weight
    return counts


def _longest(weights: Sequence[int], rest: Sequence[int | None]) -> int:
    """The largest number of turns in which no part gives more than it has left."""

    def fits(turns: int) -> bool:
        return all(left is None or count <= left for count, left in zip(_counts(turns, weights), rest, strict=True))

    high = 1
    while fits(high):
        high *= 2
    return bisect_right(range(high), False, key=lambda turns: not fits(turns)) - 1
