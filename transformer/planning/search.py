"""The best mesh, remat policy and batch for a topology, or the smallest topology that fits.

Everything legal is enumerated and pruned by analysis (`planning.memory`, `planning.roofline`); what is left is ranked
by tokens a second, and the first few can be verified by a compiler. The same question has the same answer every time.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from transformer import axes as ax
from transformer import sharding
from transformer.config import Run
from transformer.nn import stack
from transformer.planning import accounting, analysis, topology
from transformer.planning.accounting import BYTES
from transformer.planning.chips import GIB, Chip
from transformer.planning.choices import Choice, Found
from transformer.planning.legal import meshes
from transformer.planning.report import Kind, Report
from transformer.planning.topology import Topology
from transformer.settings import Compute

# From what computes most again and keeps least to the opposite.
POLICIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("full", ()),
    ("names", ("attended",)),
    ("names", ("q", "k", "v", "attended")),
    ("names", ("q", "k", "v", "attended", "ffn_gate", "ffn_up")),
    ("dots", ()),
    ("none", ()),
)
# Rows of a device of a microbatch; beyond the last, more of them make no product faster.
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)


# What is said of a plan whose moments had to be made smaller.
NUMERICS = (
    "moments are in bfloat16, which changes numerics: with no other train.accumulate or optimizer.moments_memory, "
    "nothing fits with float32 ones"
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
    """The best way to run on a topology: with moments as the run has them, or, if nothing fits so, in bfloat16.

    Args:
      rows: of a step, on all devices; by default the best number.
      verify: gives the report of a choice; raises `RuntimeError` if the compiler refuses it.
      verified: how many of the best are compiled at most, until one fits.
    """
    how = dict(rows=rows, kind=kind, verify=verify, verified=verified)
    found, lossy = _search(run, on, length, **how), _lossy(run, kind)
    if found.best is not None:
        return found
    slices = (t for t in topology.offered(on.chip, on.slices) if t.chips > on.chips)
    held = _first(run, slices, length, rows, kind)
    larger = held and f"the smallest slice that holds it is {held.words}"
    other = _search(lossy, on, length, **how) if lossy is not None else Found()
    if other.best is None:
        return dataclasses.replace(found, larger=larger)
    return dataclasses.replace(other, lossy=f"{NUMERICS}{f', for which {larger}' if larger else ''}")


def _first(run: Run, slices: Iterable[Topology], length: int, rows: int | None, kind: Kind) -> Choice | None:
    """The first of some slices on which anything fits; on it, what is computed again as far as it can be."""
    for on in _roomy(run, slices, kind):
        for mesh in meshes(run, on, length, Counter(), kind):
            leanest = next(_of_mesh(run, on, mesh, length, rows, kind, Counter()), None)
            if leanest is not None and leanest.fits:
                return leanest
    return None


def _roomy(run: Run, slices: Iterable[Topology], kind: Kind) -> Iterator[Topology]:
    """Those with room for the parameters, and to train for their gradients, if they are split over all devices."""
    each = 2 * BYTES["float32"] if kind == "train" else BYTES["bfloat16"]
    least = accounting.parameters(run.spec).total * each
    return (t for t in slices if least <= t.devices * t.chip.offered)


def _lossy(run: Run, kind: Kind) -> Run | None:
    """The run with moments in bfloat16; None where they are so already, or there are none."""
    return _moments(run, "bfloat16") if kind == "train" and run.settings.optimizer.moments_dtype == "float32" else None


def _moments(run: Run, dtype: str) -> Run:
    optimizer = dataclasses.replace(run.settings.optimizer, moments_dtype=dtype)
    return dataclasses.replace(run, settings=dataclasses.replace(run.settings, optimizer=optimizer))


def _search(
    run: Run, on: Topology, length: int, *, rows: int | None, kind: Kind, verify: Compiler | None, verified: int = 3
) -> Found:
    """`search`, with moments as the run has them."""
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

    What is said of pruning is of the last one tried. Of the slice before it is told if it would do with moments in
    bfloat16.
    """
    last, before, lossy = Found(), None, _lossy(run, kind)
    for on in _roomy(run, topology.offered(chip), kind):
        last = _search(run, on, length, rows=rows, kind=kind, verify=verify)
        if last.best is not None:
            break
        before = on
    if lossy is None or before is None:
        return last
    nothing = last.best is None
    other = _search(lossy, before, length, rows=rows, kind=kind, verify=verify if nothing else None)
    if other.best is None:
        return last
    told = NUMERICS if nothing else f"with moments in bfloat16, which change numerics, {other.best.words} would do"
    return dataclasses.replace(other if nothing else last, lossy=told)


def _of_mesh(
    run: Run, on: Topology, mesh: dict[str, int], length: int, rows: int | None, kind: Kind, pruned: Counter[str]
) -> Iterator[Choice]:
    """Every policy with every number of rows, and the memory that each needs."""
    parts, accumulate = _row_ways(mesh, run.settings.compute, kind), run.settings.train.accumulate
    if rows is not None and rows % (parts * (accumulate if kind == "train" else 1)):
        pruned["meshes over which the rows can't be split"] += 1
        return
    counts = [rows] if rows is not None else [parts * accumulate * n for n in ROWS]
    for (remat, names), count in itertools.product(_policies(run, kind), counts):
        chosen = Choice(
            topology=on.name, mesh=mesh, remat=remat, names=names, moments=run.settings.optimizer.moments_dtype,
            rows=count, needed=0, offered=int(on.chip.offered),
        )  # fmt: skip
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
    old = run.settings.compute
    moved = old.offload_names if choice.remat == "names" else ()
    compute = dataclasses.replace(old, remat=choice.remat, remat_names=choice.names, offload_names=moved)
    return _moments(
        dataclasses.replace(run, settings=dataclasses.replace(run.settings, compute=compute)), choice.moments
    )


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
