"""What a compiled program sends between devices, by mesh axis: read from its text (`compiled.as_text()`).

Bytes are those that a device sends when each collective runs as a ring, the least that is possible: of an operand of n
bytes on each of g devices, n (g - 1) for an all-gather, n (g - 1) / g for a reduce-scatter or an all-to-all, twice that
for an all-reduce (which is both), n for a permutation. Loops multiply what is in them.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
    "u64": 8, "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1,
}  # fmt: skip
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
      axes: the mesh axes along which the devices that it joins lie; None where they are no such group.
      dtype: of the operand that is largest.
      operand: bytes of all its operands on a device.
      sent: bytes that a device sends in one run.
      times: how often it runs.
      origin: what of the traced program it stands for.
    """

    kind: str
    axes: tuple[str, ...] | None
    dtype: str
    operand: int
    sent: float
    times: int
    origin: str

    @property
    def total(self) -> float:
        """Bytes that a device sends in all runs."""
        return self.sent * self.times


@dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    rest: str


def collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """All collectives of a compiled program, in the order of its text.

    Of the branches of a conditional the one that sends least is counted.

    Args:
      mesh: sizes of the axes, in their order (`Mesh.shape`); devices are numbered along it, the last axis fastest.

    Raises:
      ValueError: a loop whose number of rounds the text doesn't tell.
    """
    computations, entry = _parse(text)
    return list(_walk(computations, entry, 1, {name: size for name, size in mesh.items() if size > 1}))


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


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """The instructions of every computation, and the name of the one that is run."""
    computations: dict[str, list[str]] = {}
    lines, entry = [], ""
    for line in text.splitlines():
        opened = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if opened:
            lines = computations[opened[2]] = []
            entry = opened[2] if opened[1] else entry
        elif re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = ", line):
            lines.append(line)
        elif lines:  # attributes of kernels go over lines
            lines[-1] += " " + line
    return {name: [_instruction(line) for line in lines] for name, lines in computations.items()}, entry


def _instruction(line: str) -> _Instruction:
    name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
    # Shapes may be tuples with spaces; a word before a parenthesis comes only after them.
    return _Instruction(name.lstrip("%"), *re.match(r"(.*?) ([a-z][\w\-]*)\((.*)", rest).groups())


def _walk(computations: dict, name: str, times: int, mesh: Mapping[str, int]) -> Iterator[Collective]:
    shapes = {i.name: i.shape for i in computations[name]}
    for i in computations[name]:
        kind = i.opcode.removesuffix("-start")
        called = re.findall(r"\b(?:calls|body)=%?([\w.\-]+)", i.rest)
        if kind in KINDS:
            scatters = kind == "all-reduce" and SCATTERS in name
            yield _collective("reduce-scatter" if scatters else kind, i, shapes, times, mesh)
        elif i.opcode == "while":
            yield from _walk(computations, *called, times * _rounds(computations, i), mesh)
        elif i.opcode == "conditional":
            branches = [list(_walk(computations, branch, times, mesh)) for branch in _branches(i)]
            yield from min(branches, key=lambda branch: sum(c.total for c in branch))
        else:
            called += re.findall(r"\bto_apply=%?([\w.\-]+)", i.rest) if i.opcode == "call" else []
            for computation in called:
                yield from _walk(computations, computation, times, mesh)


def _branches(i: _Instruction) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", i.rest)
    if listed:
        return [name.strip().lstrip("%") for name in listed[1].split(",")]
    return re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", i.rest)


def _rounds(computations: dict, loop: _Instruction) -> int:
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest)
    if known:
        return int(known[1])
    # A scan counts from 0 up to the one constant of its condition.
    pending, found = [re.search(r"condition=%?([\w.\-]+)", loop.rest)[1]], set()
    while pending:
        for i in computations[pending.pop()]:
            pending += re.findall(r"\bcalls=%?([\w.\-]+)", i.rest)
            found |= {int(i.rest.split(")")[0])} if i.opcode == "constant" and re.match(r"\d+\)", i.rest) else set()
    if len(found) != 1:
        raise ValueError(f"{loop.name}: a loop whose number of rounds the program doesn't tell")
    return found.pop()


def _collective(kind: str, i: _Instruction, shapes: dict, times: int, mesh: Mapping[str, int]) -> Collective:
    operands = re.findall(r"%?([\w.\-]+)(?:,|$)", re.sub(r"/\*.*?\*/|\{[^}]*\}", "", i.rest.split(")")[0]))
    arrays = [array for name in operands for array in _arrays(shapes[name])]
    size = sum(BYTES[dtype] * count for dtype, count in arrays)
    axes, group = _axes(i.rest, mesh)
    dtype = max(arrays, key=lambda array: BYTES[array[0]] * array[1], default=("", 0))[0]
    origin = re.search(r'op_name="([^"]*)"', i.rest)
    return Collective(kind, axes, dtype, size, sent(kind, size, group), times, origin[1] if origin else "")


def _arrays(shape: str) -> list[tuple[str, int]]:
    """(dtype, numbers) of the arrays of a shape."""
    found = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)
    return [(dtype, math.prod(int(n) for n in dims.split(",") if n)) for dtype, dims in found if dtype in BYTES]


def _axes(attributes: str, mesh: Mapping[str, int]) -> tuple[tuple[str, ...] | None, int]:
    """The mesh axes that a collective goes along, and how many devices one group has."""
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    if pairs:
        moved = [_places(pair, mesh) for pair in _groups(pairs[1])]
        return tuple(name for name in mesh if any(a[name] != b[name] for a, b in moved)), 2
    groups = _replica_groups(attributes, math.prod(mesh.values()))
    for count in range(len(mesh) + 1):
        for axes in itertools.combinations(mesh, count):
            if {frozenset(g) for g in groups} == {frozenset(g) for g in _along(mesh, axes)}:
                return axes, len(groups[0])
    return None, len(groups[0])


def _along(mesh: Mapping[str, int], axes: Sequence[str]) -> list[list[int]]:
    """The devices in groups that differ in their place on `axes` alone."""
    inside = [list(mesh).index(axis) for axis in axes]
    devices = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    return np.moveaxis(devices, inside, range(-len(axes), 0)).reshape(-1, math.prod(mesh[a] for a in axes)).tolist()


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
