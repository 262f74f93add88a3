"""What a compiled program sends between devices, by mesh axis: read from its text (`hlo`).

Bytes are those that a device sends when each collective runs as a ring, the least that is possible: of an operand of n
bytes on each of g devices, n (g - 1) for an all-gather, n (g - 1) / g for a reduce-scatter or an all-to-all, twice that
for an all-reduce (which is both), n for a permutation. Loops multiply what is in them.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from transformer.planning.hlo import Instruction, Program, Run, parse, walk

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
# Part of the name of a TPU fusion that reduces and keeps a part: there is no other trace of a reduce-scatter.
SCATTERS = "all-reduce-scatter"


@dataclass(frozen=True)
class Collective:
    """One instruction.

    Attributes:
      kind: one of `KINDS`.
      axes: the mesh axes along which the devices that it joins lie, all of them or some of one axis; None elsewhere.
      dtype: of the operand that is largest.
      operand: bytes of all its operands on a device.
      sent: bytes that a device sends in one run.
      times: how often it runs.
      origin: what of the traced program it stands for.
      overlapped: other work runs while it travels.
    """

    kind: str
    axes: tuple[str, ...] | None
    dtype: str
    operand: int
    sent: float
    times: int
    origin: str
    overlapped: bool = False

    @property
    def total(self) -> float:
        """Bytes that a device sends in all runs."""
        return self.sent * self.times


def collectives(text: str | Program, mesh: Mapping[str, int], trips: int | None = None) -> list[Collective]:
    """All collectives of a compiled program, in the order of its text but for those taken along in several steps.

    Of the branches of a conditional the `ordinary` one is counted.

    Args:
      mesh: sizes of the axes, in their order (`Mesh.shape`); devices are numbered along it, the last axis fastest.
      trips: as of `hlo.walk`.

    Raises:
      ValueError: as of `hlo.walk`.
    """
    program, sizes = parse(text) if isinstance(text, str) else text, {n: size for n, size in mesh.items() if size > 1}
    found = _travelling(walk(program, lambda within: ordinary(within, program, math.prod(sizes.values())), trips))
    return [_collective(run, program, sizes) for run in found]


def ordinary(within: list[list[Run]], program: Program, devices: int) -> list[Run]:
    """The branch, among the runs of all, that a program takes when nothing is out of the ordinary.

    It is one that has a ragged exchange, of whose buffer the others are the way out when it would overflow
    (`ops.experts.exchange`); else that whose collectives send least on that many devices.
    """

    def order(runs: list[Run]) -> tuple[bool, float]:
        ragged = any(run.instruction.opcode.startswith("ragged-all-to-all") for run in runs)
        return not ragged, sum(run.times * _sizes(run, program, devices)[1] for run in _travelling(runs))

    return min(within, key=order)


def sent(kind: str, operand: float, group: int) -> float:
    """Bytes that each device of a group sends of an operand of so many bytes, by the least that a ring needs."""
    factor = {
        "all-gather": group - 1,
        "all-reduce": 2 * (group - 1) / group,
        "collective-permute": 1,
        "collective-broadcast": 1,
    }.get(kind, (group - 1) / group)
    return operand * factor


def by_axes(found: list[Collective]) -> dict[tuple[tuple[str, ...] | None, str], float]:
    """Bytes sent, by the axes and the kind of the collectives."""
    totals: dict = {}
    for c in found:
        totals[c.axes, c.kind] = totals.get((c.axes, c.kind), 0.0) + c.total
    return totals


def _travelling(runs: Iterable[Run]) -> Iterator[Run]:
    """Those that are collectives, once each.

    A TPU may take one along through several fusions, in steps that have its channel and the number of a chain.
    """
    steps: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if _kind(run) is None:
            continue
        chain = re.search(r'channel_id=(\d+).*chain_id="(\d+)"', run.instruction.rest)
        if chain is None:
            yield run
        else:
            steps.setdefault(chain.groups(), []).append(run)
    for first, *others in steps.values():
        yield replace(first, beside=first.beside or len(others) > 1)  # between its start and its end


def _kind(run: Run) -> str | None:
    kind = run.instruction.opcode.removesuffix("-start")
    if kind == "all-reduce" and SCATTERS in run.computation:
        return "reduce-scatter"
    return kind if kind in KINDS else None


def _operands(i: Instruction, program: Program, computation: str) -> list:
    table = program.table(computation)
    return [array for name in i.operands if name in table for array in table[name].arrays]


def _sizes(run: Run, program: Program, devices: int) -> tuple[int, float]:
    """Bytes of the operands, and bytes that a device sends in one run."""
    i = run.instruction
    size = sum(array.bytes for array in _operands(i, program, run.computation))
    # A permutation has pairs in place of groups.
    group = len(_replica_groups(i.rest, devices)[0]) if "source_target_pairs" not in i.rest else 2
    return size, sent(_kind(run), size, group)


def _collective(run: Run, program: Program, mesh: Mapping[str, int]) -> Collective:
    i = run.instruction
    size, travels = _sizes(run, program, math.prod(mesh.values()))
    arrays = _operands(i, program, run.computation)
    dtype = max(arrays, key=lambda array: array.bytes).dtype if arrays else ""
    return Collective(_kind(run), _axes(i.rest, mesh), dtype, size, travels, run.times, i.origin, run.beside)


def _axes(attributes: str, mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """The mesh axes that a collective goes along."""
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    if pairs:
        moved = [_places(pair, mesh) for pair in _groups(pairs[1])]
        return tuple(name for name in mesh if any(a[name] != b[name] for a, b in moved))
    groups = _replica_groups(attributes, math.prod(mesh.values()))
    for count in range(len(mesh) + 1):
        for axes in itertools.combinations(mesh, count):
            if {frozenset(g) for g in groups} == {frozenset(g) for g in _along(mesh, axes)}:
                return axes
    # Part of an axis, as where a sum over it goes by stages.
    differ = {frozenset(_differ(_places(group, mesh))) for group in groups}
    return tuple(*differ) if len(differ) == 1 and len(*differ) == 1 else None


def _along(mesh: Mapping[str, int], axes: Sequence[str]) -> list[list[int]]:
    """The devices in groups that differ in their place on `axes` alone."""
    inside = [list(mesh).index(axis) for axis in axes]
    devices = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    return np.moveaxis(devices, inside, range(-len(axes), 0)).reshape(-1, math.prod(mesh[a] for a in axes)).tolist()


def _differ(places: list[dict[str, int]]) -> set[str]:
    """The mesh axes on which not all have the same place."""
    return {axis for axis in places[0] if len({place[axis] for place in places}) > 1}


def _places(ids: list[int], mesh: Mapping[str, int]) -> list[dict[str, int]]:
    return [dict(zip(mesh, map(int, np.unravel_index(i, tuple(mesh.values()))), strict=True)) for i in ids]


def _groups(text: str) -> list[list[int]]:
    return [[int(i) for i in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", text)]


def _replica_groups(attributes: str, devices: int) -> list[list[int]]:
    """Written out, by axes of a mesh, as a transposed and reshaped range, or, where empty, all devices."""
    listed = re.search(r"replica_groups=\{((?:\{[\d,]+\},?)*)\}", attributes)
    if listed:
        return _groups(listed[1]) or [list(range(devices))]
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([\w',]*)\}", attributes)
    if named:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        return _along(sizes, re.findall(r"'(\w+)'", named[2]))
    ranged = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if not ranged:
        raise ValueError(f"replica groups in an unknown form: {attributes[:200]}")
    shape, dims, order = ([int(n) for n in part.split(",")] if part else None for part in ranged.groups())
    return np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape).tolist()
