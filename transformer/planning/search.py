"""The best mesh, remat policy and batch for a topology, or the smallest topology that fits.

Everything legal is enumerated and pruned by analysis (`planning.memory`, `planning.roofline`); what is left is ranked
by tokens a second, and the first few can be verified by a compiler. The same question has the same answer every time.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from transformer import axes as ax
from transformer import sharding
from transformer.config import Run
from transformer.nn import stack
from transformer.planning import analysis, topology
from transformer.planning.chips import GIB, Chip
from transformer.planning.legal import meshes
from transformer.planning.report import Kind, Report
from transformer.planning.topology import Topology
from transformer.settings import Compute, SettingsError

# From what computes most again and keeps least to the opposite.
POLICIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("full", ()),
    ("names", ("attended",)),
    ("names", ("q", "k", "v", "attended")),
    ("names", ("q", "k", "v", "attended", "ffn_gate", "ffn_up")),
    ("dots", ()),
    ("none", ()),
)
# Of what the compiler offers: analysis is right to a tenth (docs/estimates.md), and the compiler has the last word.
ROOM = 0.95
# Rows of a device of a microbatch; beyond that, more of them make no product faster.
MOST_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A way to run, and what analysis says of it.

    Attributes:
      mesh: sizes of all axes.
      remat, names: `compute.remat` and `compute.remat_names`.
      rows: of a step, on all devices.
      needed, offered: bytes of a device.
      seconds: of a step.
    """

    topology: str
    mesh: dict[str, int]
    remat: str
    names: tuple[str, ...]
    rows: int
    needed: int
    offered: int
    seconds: float = math.inf
    tokens_per_second: float = 0.0
    mfu: float = 0.0

    @property
    def fits(self) -> bool:
        """With `ROOM` to spare."""
        return self.needed <= ROOM * self.offered

    @property
    def words(self) -> str:
        """On a line."""
        remat = f'"{self.remat}"' + (f" {', '.join(self.names)}" if self.names else "")
        return f"{self.topology}, mesh {topology.words(self.mesh)}, remat {remat}, {self.rows} rows"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search came to.

    Attributes:
      ranked: what fits, the fastest first.
      pruned: how many meshes or choices were dropped, by reason.
      best: the first of `ranked` that the compiler confirmed; without one, the first.
      report: what the compiler made of it.
      refused: choices that the compiler refused, with its reason.
      nearest: what needs least, where nothing fits.
    """

    ranked: tuple[Choice, ...] = ()
    pruned: dict[str, int] = field(default_factory=dict)
    best: Choice | None = None
    report: Report | None = None
    refused: tuple[tuple[Choice, str], ...] = ()
    nearest: Choice | None = None

    def check(self) -> "Found":
        """Itself, if there is something that fits.

        Raises:
          SettingsError: with the nearest possible choice.
        """
        if self.best is not None:
            return self
        if self.nearest is None:
            why = "; ".join(f"{count} {reason}" for reason, count in self.pruned.items())
            raise SettingsError(f"search: no mesh can hold this model ({why}); use another topology")
        near = self.nearest
        raise SettingsError(
            f"search: nothing fits; the nearest is {near.words}, which needs {near.needed / GIB:.1f} of "
            f"{near.offered / GIB:.1f} GiB; use a larger topology"
        )


Compiler = Callable[[Choice], Report]


def search(
    run: Run,
    on: Topology,
    length: int,
    *,
    rows: int | None = None,
    kind: Kind = "train",
    verify: Compiler | None = None,
    verified: int = 3,
) -> Found:
    """The best way to run on a topology.

    Args:
      rows: of a step, on all devices; by default the best number.
      verify: gives the report of a choice; raises `RuntimeError` if the compiler refuses it.
      verified: how many of the best are compiled at most, until one fits.
    """
    pruned: Counter[str] = Counter()
    choices = [
        c for mesh in meshes(run, on, length, pruned, kind) for c in _of_mesh(run, on, mesh, length, rows, kind, pruned)
    ]
    fitting = [choice for choice in choices if choice.fits]
    pruned["choices that need more memory than there is"] += len(choices) - len(fitting)
    ranked = sorted((_timed(run, on, c, length, kind) for c in _leanest(fitting)), key=_rank)
    if not ranked:
        nearest = min(choices, key=lambda c: (c.needed, _rank(c)), default=None)
        return Found(pruned=_counted(pruned), nearest=nearest)
    refused = []
    for choice in ranked[:verified] if verify else ():
        try:
            made = verify(choice)
        except RuntimeError as error:
            refused.append((choice, str(error)))
            continue
        if made.memory.fits:
            found = Found(ranked=tuple(ranked), pruned=_counted(pruned), best=choice, report=made)
            return dataclasses.replace(found, refused=tuple(refused))
        refused.append((choice, f"needs {made.memory.needed / GIB:.1f} of {made.memory.offered / GIB:.1f} GiB"))
    best = None if verify else ranked[0]
    nearest = ranked[-1] if best is None else None
    return Found(ranked=tuple(ranked), pruned=_counted(pruned), best=best, refused=tuple(refused), nearest=nearest)


def smallest(
    run: Run,
    chip: Chip,
    length: int,
    *,
    rows: int | None = None,
    kind: Kind = "train",
    verify: Compiler | None = None,
) -> Found:
    """The best way to run on the smallest slice of a chip that fits.

    Slices that hold not even the parameters are passed over; what is said of pruning is of the last one tried.
    """
    last = Found()
    for on in topology.offered(chip):
        last = search(run, on, length, rows=rows, kind=kind, verify=verify)
        if last.best is not None:
            return last
    return last


def _of_mesh(
    run: Run, on: Topology, mesh: dict[str, int], length: int, rows: int | None, kind: Kind, pruned: Counter[str]
) -> Iterator[Choice]:
    """Every policy with every number of rows, and the memory that each needs."""
    parts, accumulate = _row_ways(mesh, run.settings.compute, kind), run.settings.train.accumulate
    if rows is not None and rows % (parts * (accumulate if kind == "train" else 1)):
        pruned["meshes over which the rows can't be split"] += 1
        return
    counts = [rows] if rows is not None else [parts * accumulate * 2**n for n in range(MOST_ROWS.bit_length())]
    for (remat, names), count in itertools.product(_policies(run, kind), counts):
        chosen = Choice(
            topology=on.name, mesh=mesh, remat=remat, names=names, rows=count, needed=0, offered=int(on.chip.offered)
        )
        yield dataclasses.replace(chosen, needed=analysis.parts_of(plan(run, on, chosen, length, kind)).total)


def _policies(run: Run, kind: Kind) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Those that differ for this model: points that it doesn't have are left out."""
    if kind != "train":
        yield "none", ()
        return
    there = set().union(*(stack.points(layers) for layers in run.spec.stacks.values()))
    seen = []
    for remat, names in POLICIES:
        policy = remat, tuple(name for name in names if name in there)
        if policy not in seen:
            seen.append(policy)
            yield policy


def _row_ways(mesh: Mapping[str, int], compute: Compute, kind: Kind) -> int:
    rules = compute.rules if kind == "train" else "decode"
    return math.prod(mesh[axis] for axis in sharding.RULES[rules][ax.BATCH])


def plan(run: Run, on: Topology, choice: Choice, length: int, kind: Kind = "train") -> analysis.Plan:
    """The plan that a choice stands for."""
    return analysis.Plan(chosen(run, choice), on, choice.mesh, kind, choice.rows, length)


def chosen(run: Run, choice: Choice) -> Run:
    """The run with the settings of a choice."""
    old, moved = run.settings, choice.remat == "names"
    compute = dataclasses.replace(
        old.compute,
        remat=choice.remat,
        remat_names=choice.names,
        offload_names=old.compute.offload_names if moved else (),
    )
    return dataclasses.replace(run, settings=dataclasses.replace(old, compute=compute))


def _leanest(fitting: list[Choice]) -> Iterator[Choice]:
    """Of each mesh and number of rows, the policies that compute least again: those that keep more and still fit.

    All policies of a mesh send the same, so that what computes less is never slower.
    """
    order = {policy: index for index, policy in enumerate(POLICIES)}
    groups: dict[tuple, list[Choice]] = {}
    for choice in fitting:
        groups.setdefault((*choice.mesh.values(), choice.rows), []).append(choice)
    for group in groups.values():
        yield from sorted(group, key=lambda c: -order.get((c.remat, c.names), 0))[:2]


def _timed(run: Run, on: Topology, choice: Choice, length: int, kind: Kind) -> Choice:
    asked = plan(run, on, choice, length, kind)
    flops, size = analysis.flops_of(asked), analysis.bytes_of(asked)
    made = analysis.estimate_of(asked, flops, size, analysis.exchanges_of(asked))
    return dataclasses.replace(choice, seconds=made.step, tokens_per_second=made.tokens_per_second, mfu=made.mfu)


def _rank(choice: Choice) -> tuple:
    """The fastest first; of equals the one that needs least, then by its sizes."""
    return -choice.tokens_per_second, choice.needed, choice.rows, *choice.mesh.values(), choice.remat, choice.names


def _counted(pruned: Counter[str]) -> dict[str, int]:
    return {reason: count for reason, count in sorted(pruned.items()) if count}
