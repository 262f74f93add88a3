"""What a compiled program computes, reads and writes on one device: FLOPs, bytes of HBM, the compiler's own cycles."""

import math
import re
from collections import Counter
from dataclasses import dataclass, field

from transformer.planning.collectives import ordinary
from transformer.planning.hlo import FREE, KERNEL, Array, Instruction, Program, Run, walk

# The compiler writes about as much where it knows nothing.
UNKNOWN_CYCLES = 10**15
MOVES = frozenset({
    "copy", "broadcast", "reshape", "transpose", "slice", "dynamic-slice", "concatenate", "pad", "convert", "iota",
    "dynamic-update-slice",
})  # fmt: skip
# Instructions that read of their first operand no more than they give.
_PICKS = frozenset({"dynamic-slice", "slice", "gather"})
_THROUGH = frozenset({"bitcast", "reshape", "copy", "convert"})


@dataclass(frozen=True)
class Kernel:
    """All runs of a custom call: FLOPs and bytes as the kernel itself estimates them, `silent` where it doesn't."""

    times: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    silent: bool = False

    def __add__(self, other: "Kernel") -> "Kernel":
        sums = self.times + other.times, self.flops + other.flops, self.bytes + other.bytes
        return Kernel(*sums, self.silent or other.silent)


@dataclass(frozen=True)
class Work:
    """What a program does in one run.

    Attributes:
      flops: of matrix products and convolutions; kernels apart.
      bytes: that instructions read from and write to HBM, kernels included.
      cycles: the compiler's estimates, by class: "matmul" (with what is fused to it), "moves" (copies alone),
        "elementwise" (the rest). Collectives and kernels have none.
      kernels: by name.
    """

    flops: float
    bytes: float
    cycles: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, Kernel] = field(default_factory=dict)


def work(program: Program, devices: int, trips: int | None = None) -> Work:
    """FLOPs, bytes and cycles of a program that runs on so many devices; of branches, that which `collectives` counts.

    `trips` and errors are those of `hlo.walk`.
    """
    flops, size, cycles, kernels = 0.0, 0.0, Counter(), {}
    for run in walk(program, lambda within: ordinary(within, program, devices), trips):
        i = run.instruction
        if i.opcode in ("convolution", "dot"):
            flops += run.times * product_flops(i, program.table(run.computation))
        if run.fused or i.opcode in FREE:
            continue
        if KERNEL in i.rest:
            name = re.sub(r"[.\d]+$", "", i.name)
            kernels[name] = kernels.get(name, Kernel()) + _kernel(run, program)
        size += run.times * moved_bytes(program, run)
        estimate = i.number("estimated_cycles") or 0
        if 0 < estimate < UNKNOWN_CYCLES:
            cycles[_class(program, i)] += run.times * estimate
    return Work(flops, size + sum(kernel.bytes for kernel in kernels.values()), dict(cycles), kernels)


def _kernel(run: Run, program: Program) -> Kernel:
    i = run.instruction
    flops, size = i.number("flops"), i.number("bytes_accessed")
    if size is None:
        size = sum(array.bytes for array in _touched(program, run))
    return Kernel(run.times, run.times * (flops or 0), run.times * size, flops is None)


def _class(program: Program, i: Instruction) -> str:
    inside = {i.opcode} | {j.opcode for name in i.called for j in program.computations[name]}
    if inside & {"convolution", "dot"}:
        return "matmul"
    return "moves" if inside <= MOVES | FREE | {"fusion"} else "elementwise"


def product_flops(i: Instruction, table: dict[str, Instruction]) -> int:
    """Two a multiply-add; those with padding of a convolution, or with the zeros of a dilated operand, don't count."""
    left, right = (table[name].arrays[0].dims for name in i.operands[:2])
    (out,) = (array.dims for array in i.arrays[:1])
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.rest)
    if contracted:
        return 2 * math.prod(out) * math.prod(left[int(axis)] for axis in contracted[1].split(",") if axis)
    of_left, of_right, of_out = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.rest).groups()
    pairs = 1
    for space in (label for label in of_out if label.isdigit()):
        sizes = left[of_left.index(space)], right[of_right.index(space)], out[of_out.index(space)]
        pairs *= _pairs(*sizes, _window(i.rest, int(space)))
    return 2 * pairs * out[of_out.index("b")] * out[of_out.index("f")] * right[of_right.index("i")]


def _window(attributes: str, axis: int) -> dict[str, int]:
    """Stride, padding before, and dilations of one axis of a convolution."""
    values = {"stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}
    written = re.search(r"window=\{([^}]*)\}", attributes)
    for name, value in (item.split("=") for item in (written[1].split() if written else ())):
        if name in values:
            values[name] = int(value.split("x")[axis].split("_")[0])
    return values


def _pairs(size: int, kernel: int, out: int, window: dict[str, int]) -> int:
    """(output, kernel) positions along an axis at which the kernel meets a number of the input."""
    stride, pad, wide, apart = window["stride"], window["pad"], window["lhs_dilate"], window["rhs_dilate"]
    total, end = 0, (size - 1) * wide
    for k in range(kernel):
        # The input's position is o · stride + shift, of which every `wide`-th is a number.
        shift = k * apart - pad
        first, last = max(0, -(shift // stride)), min(out - 1, (end - shift) // stride)
        if wide == 1:
            total += max(0, last - first + 1)
        else:
            total += sum((o * stride + shift) % wide == 0 for o in range(first, last + 1))
    return total


def moved_bytes(program: Program, run: Run) -> float:
    """Bytes of HBM that an instruction reads and writes in one run; a started one reads, the end of it writes."""
    i = run.instruction
    if i.opcode in FREE or i.opcode.endswith("-update") or KERNEL in i.rest:
        return 0
    return sum(array.bytes for array in _touched(program, run))


def _touched(program: Program, run: Run) -> list[Array]:
    """Arrays in HBM, or the parts of them, that are read and written."""
    i, table = run.instruction, program.table(run.computation)
    if i.opcode in ("call-start", "call-done"):
        return []  # what it runs is counted
    arrays = []
    if not i.opcode.endswith("-done"):
        for number, name in enumerate(dict.fromkeys(i.operands)):
            given = table[name].arrays if name in table else []
            if i.opcode == "fusion":
                arrays += _read(program, i.called[0], i.operands.index(name), given)
            elif i.opcode.removesuffix("-start") in _PICKS and number == 0:
                picked = i.arrays[len(given) if i.opcode.endswith("-start") else 0]
                arrays += [Array(a.dtype, picked.dims, a.near) for a in given[:1]]
            elif number not in _changes(i):
                arrays += given
    if not i.opcode.endswith("-start"):
        arrays += _written(program, i, table)
    return [array for array in arrays if not array.near]


def _read(program: Program, computation: str, number: int, given: list[Array]) -> list[Array]:
    """What a fusion reads of its operand `number`: the parts that it picks, if it only picks."""
    table = program.table(computation)
    parameter = next(i for i in table.values() if i.opcode == "parameter" and i.rest.startswith(f"{number})"))
    parts, pending = [], [parameter.name]
    while pending:
        name = pending.pop()
        for user in (i for i in table.values() if name in i.operands):
            first = user.operands[0] == name
            if user.opcode in _PICKS and first:
                parts += [Array(a.dtype, user.arrays[0].dims, a.near) for a in given[:1]]
            elif user.opcode in _THROUGH:
                pending.append(user.name)
            elif user.opcode == "tuple":
                continue  # handed on as it is
            elif user.opcode == "fusion":
                parts += _read(program, user.called[0], user.operands.index(name), given)
            elif not {n for n, operand in enumerate(user.operands) if operand == name} <= _changes(user):
                return given
    # Read more than once, it comes from HBM once, as long as that is less.
    return min(parts, given, key=lambda arrays: sum(a.bytes for a in arrays)) if parts else []


def _written(program: Program, i: Instruction, table: dict[str, Instruction]) -> list[Array]:
    """Its results; of an array that is changed in place, what is changed."""
    if i.opcode == "fusion":
        inner = program.table(i.called[0])
        root = next((j for j in inner.values() if j.root), None)
        parts = [inner[name] for name in root.operands] if root and root.opcode == "tuple" else [root]
        if len(parts) == len(i.arrays) and None not in parts:
            made = [(part, whole) for part, whole in zip(parts, i.arrays, strict=True) if part.opcode != "parameter"]
            return [_changed(part, inner, whole) for part, whole in made]
        return i.arrays
    return [_changed(i, table, whole) for whole in i.arrays]


def _changed(i: Instruction, table: dict[str, Instruction], whole: Array) -> Array:
    while i.opcode in ("bitcast", "reshape") and i.operands[0] in table:
        i = table[i.operands[0]]
    if not _changes(i):
        return whole
    update = table[i.operands[1 if i.opcode == "dynamic-update-slice" else -1]].arrays[0]
    return Array(update.dtype, update.dims, whole.near)


def _changes(i: Instruction) -> set[int]:
    """Which of its operands an instruction changes in place: of these it writes as much as it is given."""
    if i.opcode == "scatter":  # as many arrays as it gives, then where, then what
        return set(range(len(i.arrays)))
    return {0} if i.opcode == "dynamic-update-slice" else set()
