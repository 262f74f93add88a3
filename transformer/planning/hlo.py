"""The text of a compiled program (`compiled.as_text()`), parsed, and which of its instructions run how often.

XLA's own counts (`compiled.cost_analysis()`) see the body of a loop once; `walk` goes into loops as often as they run,
and says of each instruction whether others run beside it.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4,
    "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "f8e4m3fn": 1, "f8e5m2": 1, "f8e4m3": 1,
}  # fmt: skip
# Compute nothing and move nothing.
FREE = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id", "after-all",
    "opt-barrier", "domain", "while", "conditional", "call",
})  # fmt: skip
KERNEL = "tpu_custom_call"
# Cycles of an instruction that hides anything of a collective: half a microsecond.
WORTH = 1000
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_INSTRUCTION = re.compile(r"(.*?) ([a-z][\w\-]*)\((.*)", re.DOTALL)
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_BEGIN = re.compile(r"\s+(?:ROOT )?%?[\w.\-]+ = ")


@dataclass(frozen=True)
class Array:
    """An array as an instruction's shape tells it; `near` is in faster memory than HBM."""

    dtype: str
    dims: tuple[int, ...]
    near: bool = False

    @property
    def bytes(self) -> int:
        """Without padding to tiles."""
        return math.ceil(BYTES[self.dtype] * math.prod(self.dims))


@dataclass(frozen=True)
class Instruction:
    """A line: `name = shape opcode(rest`."""

    name: str
    shape: str
    opcode: str
    rest: str
    root: bool = False

    @functools.cached_property
    def arrays(self) -> list[Array]:
        """What it gives; several for a tuple."""
        found = [(d, tuple(int(n) for n in dims.split(",") if n), at) for d, dims, at in _SHAPE.findall(self.shape)]
        return [Array(dtype, dims, _near(layout)) for dtype, dims, layout in found if dtype in BYTES]

    @functools.cached_property
    def operands(self) -> list[str]:
        """Names of the instructions that it reads."""
        inside = re.sub(r"/\*.*?\*/|\{[^}]*\}", "", self.rest.split(")")[0])
        return re.findall(r"%?([\w.\-]+)(?:,|$)", inside)

    @functools.cached_property
    def called(self) -> list[str]:
        """Computations that it runs as a whole: a fusion's, a loop's body, what runs beside."""
        names = re.findall(r"\b(?:calls|body)=%?([\w.\-]+)", self.rest)
        if self.opcode in ("call", "call-start", "async-start"):
            names += re.findall(r"\bto_apply=%?([\w.\-]+)", self.rest)
        return names

    def number(self, name: str) -> int | None:
        """A number that its attributes quote."""
        found = re.search(rf'"{name}":"?(-?\d+)', self.rest)
        return int(found[1]) if found else None

    @property
    def origin(self) -> str:
        """What of the traced program it stands for."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""


def _near(layout: str) -> bool:
    # Space 0 has no mark, and 5 is the host's; TPUs' faster memories are 1 (VMEM) and up.
    return bool(re.search(r"S\([1-46-9]\)", layout))


@dataclass(frozen=True)
class Program:
    """All computations by name, and the one that is run."""

    computations: dict[str, list[Instruction]]
    entry: str
    _tables: dict[str, dict[str, Instruction]] = field(default_factory=dict, compare=False, repr=False)

    def table(self, computation: str) -> dict[str, Instruction]:
        """The instructions of a computation by name."""
        if computation not in self._tables:
            self._tables[computation] = {i.name: i for i in self.computations[computation]}
        return self._tables[computation]


@dataclass(frozen=True)
class Run:
    """An instruction that runs.

    Attributes:
      computation: where it stands.
      times: how often it runs.
      beside: other work is under way meanwhile.
      fused: within an instruction that is a run itself.
    """

    instruction: Instruction
    computation: str
    times: int = 1
    beside: bool = False
    fused: bool = False


# Which of a conditional's branches is the one that runs.
Choose = Callable[[list[list[Run]]], list[Run]]


def parse(text: str) -> Program:
    """The program of a text.

    Raises:
      ValueError: there is no entry.
    """
    computations: dict[str, list[list[str]]] = {}
    lines, entry = [], ""
    for line in text.splitlines():
        opened = _HEAD.match(line)
        if opened:
            lines = computations[opened[2]] = []
            entry = opened[2] if opened[1] else entry
        elif _BEGIN.match(line):
            lines.append([line])
        elif lines:  # attributes of kernels go over lines
            lines[-1].append(line)
    if not entry:
        raise ValueError("this is no text of a compiled program: no computation is its ENTRY")
    return Program({name: [_instruction(" ".join(i)) for i in listed] for name, listed in computations.items()}, entry)


def _instruction(line: str) -> Instruction:
    line = line.strip()
    name, _, rest = line.removeprefix("ROOT ").partition(" = ")
    # Shapes may be tuples with spaces; a word before a parenthesis comes only after them.
    shape, opcode, rest = _INSTRUCTION.match(rest).groups()
    if KERNEL in rest:  # its code
        rest = re.sub(r'"body":"[^"]*"', '"body":""', rest)
    return Instruction(name.lstrip("%"), shape, opcode, rest, line.startswith("ROOT "))


def walk(program: Program, choose: Choose, trips: int | None = None) -> Iterator[Run]:
    """All instructions that run, in the order of the text, those inside fusions too (`Run.fused`).

    Args:
      trips: how often loops run whose number of rounds depends on values, such as that over the steps of decoding.

    Raises:
      ValueError: a loop whose number of rounds the text doesn't tell, and `trips` isn't given.
    """
    return _walk(program, Run(Instruction("", "", "", ""), program.entry), choose, trips)


def _walk(program: Program, around: Run, choose: Choose, trips: int | None) -> Iterator[Run]:
    """`around` has what the instructions of its computation share."""
    for index, i in enumerate(program.computations[around.computation]):
        beside = around.beside or (i.opcode.endswith("-start") and _hides(program, around.computation, index))
        run = replace(around, instruction=i, beside=beside)
        yield run
        if i.opcode == "while":
            times = around.times * rounds(program, i, trips)
            yield from _walk(program, replace(run, computation=i.called[0], times=times), choose, trips)
        elif i.opcode == "conditional":
            within = [replace(run, computation=name) for name in branches(i)]
            yield from choose([list(_walk(program, branch, choose, trips)) for branch in within])
        else:
            # What a call runs stands for itself; of any other instruction it is a part.
            fused = around.fused or not i.opcode.startswith("call")
            for name in i.called:
                yield from _walk(program, replace(run, computation=name, fused=fused), choose, trips)


def _hides(program: Program, computation: str, index: int) -> bool:
    """Work that the text has between a start and what waits for its end; the text's order is that of the device."""
    started, *later = program.computations[computation][index:]
    waiting = {started.name}
    for i in later:
        if waiting.intersection(i.operands):
            if i.opcode.endswith("-done"):
                return False
            waiting |= {i.name} if i.opcode.endswith("-update") else set()
        elif _works(i):
            return True
    return False


def _works(i: Instruction) -> bool:
    if i.opcode in ("while", "conditional", "call"):
        return True
    passes = i.opcode in FREE or i.opcode.endswith(("-start", "-update", "-done"))
    return not passes and (i.number("estimated_cycles") or WORTH) >= WORTH


def branches(i: Instruction) -> list[str]:
    """Computations of which a conditional runs one."""
    listed = re.search(r"branch_computations=\{([^}]*)\}", i.rest)
    if listed:
        return [name.strip().lstrip("%") for name in listed[1].split(",")]
    return re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", i.rest)


def rounds(program: Program, loop: Instruction, trips: int | None = None) -> int:
    """How often a loop's body runs; `trips` where the text doesn't tell.

    Raises:
      ValueError: neither tells.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest)
    if known:
        return int(known[1])
    # A loop counts from 0 up to the one constant of its condition: a scan by one, a product in parts often by two.
    condition = re.search(r"condition=%?([\w.\-]+)", loop.rest)[1]
    pending, found = [condition], set()
    while pending:
        for i in program.computations[pending.pop()]:
            pending += re.findall(r"\bcalls=%?([\w.\-]+)", i.rest)
            found |= {int(i.rest.split(")")[0])} if i.opcode == "constant" and re.match(r"\d+\)", i.rest) else set()
    if len(found) == 1 and _compares(program, condition):
        return -(-found.pop() // _step(program, loop, condition))
    if trips is None:
        raise ValueError(f"{loop.name}: a loop whose number of rounds the program doesn't tell")
    return trips


def _compares(program: Program, computation: str) -> bool:
    """Its result is one comparison, and nothing else."""
    root = next(i for i in program.computations[computation] if i.root)
    return _compares(program, root.called[0]) if root.opcode == "fusion" else root.opcode == "compare"


def _step(program: Program, loop: Instruction, condition: str) -> int:
    """What a loop adds to its counter in a round; 1 where the text doesn't say so plainly."""
    asked, body = program.table(condition), program.table(loop.called[0])
    root = next(i for i in asked.values() if i.root)
    counter = asked.get(root.operands[0])
    place = re.search(r"index=(\d+)", counter.rest) if counter else None
    given = next(i for i in body.values() if i.root)
    if place is None or given.opcode != "tuple":
        return 1
    i, step = body.get(given.operands[int(place[1])]), 0
    while i and i.opcode in ("add", "copy", "fusion"):
        inside = [j for name in i.called for j in program.computations[name]]
        if any(j.opcode not in ("add", "constant", "parameter") for j in inside):
            break
        parts = [body[name] for name in i.operands if name in body]
        step += sum(int(j.rest.split(")")[0]) for j in (*parts, *inside) if j.opcode == "constant")
        i = next((part for part in parts if part.opcode != "constant"), None)
    return step or 1
