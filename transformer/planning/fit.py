"""What to do where a run doesn't fit: other ways to run for which analysis says that a device has room."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from transformer import axes as ax
from transformer import config, sharding
from transformer.planning import analysis, chips, legal, topology
from transformer.planning.report import Buffer, Kind
from transformer.planning.request import Asked, ask, default_mesh
from transformer.planning.topology import Topology
from transformer.settings import HOST_MEMORY, SettingsError
from transformer.sharding import MESH_AXES, ShardingError

# Of what the compiler offers: analysis is right to a tenth (docs/estimates.md), and the compiler has the last word.
ROOM = 0.95
GIB = chips.GIB


class DoesNotFit(RuntimeError):
    """A run for which a device has no room; the message is one sentence.

    Attributes:
      parts: what the memory is for, by analysis, the most first.
      largest: the biggest arrays, as compiled, where a compiler refused it.
      instead: ways that fit, as of `instead`.
    """

    def __init__(self, message: str, **found: tuple[Buffer, ...]):
        super().__init__(message)
        self.parts, self.largest, self.instead = (found.get(name, ()) for name in ("parts", "largest", "instead"))


def check_state(asked: Asked) -> None:
    """Raises `DoesNotFit` if what a training step keeps doesn't fit by itself: no compiler need be asked."""
    kept = analysis.arguments_of(_plan(asked))
    if kept is not None and kept > asked.topology.chip.offered:
        raise refusal(asked)


def refusal(asked: Asked, compiled: int | None = None, largest: tuple[Buffer, ...] = ()) -> DoesNotFit:
    """Why a run doesn't fit, and what would.

    Args:
      compiled: bytes that a compiler says it needs; by default those of the analysis.
      largest: its biggest arrays, as compiled.
    """
    r, offered = asked.request, asked.topology.chip.offered
    size, by = (_needed(asked), "by analysis") if compiled is None else (compiled, "as compiled")
    named = analysis.parts_of(_plan(asked)).named
    parts = tuple(Buffer(name=name, bytes=n) for name, n in sorted(named.items(), key=lambda item: -item[1]))
    ways = instead(asked, compiled)
    near = f"the nearest that fits is {ways[0].name}" if ways else "no slice of TPUs has room for it"
    what = f"{r.config} on {r.topology}, mesh {topology.words(r.mesh)}, {r.rows:,} x {r.length:,} tokens"
    says = f"needs {size / GIB:,.2f} GiB of a device ({by}), which offers {offered / GIB:.2f}"
    return DoesNotFit(f"{what}: {says}; {near}", parts=parts, largest=largest, instead=ways)


def instead(asked: Asked, compiled: int | None = None) -> tuple[Buffer, ...]:
    """Other settings, or another slice, that fit, as options of the command; what changes least first.

    Bytes are those that a device needs by analysis. What is said of numerics changes results, all else nothing.

    Args:
      compiled: bytes that a compiler says the run itself needs: what others need is taken to be off by as much.
    """
    here = _needed(asked)
    known = max(here, compiled or 0)
    return tuple(way for way in _Ways(asked, known / here).all(known <= asked.topology.chip.offered) if way)


def _plan(asked: Asked) -> analysis.Plan:
    r = asked.request
    return analysis.Plan(asked.run, asked.topology, asked.mesh, r.kind, r.rows, r.length)


def _needed(asked: Asked) -> int:
    return analysis.parts_of(_plan(asked)).total


class _Ways:
    """Neighbours of a run; each method gives one that fits, or None."""

    def __init__(self, asked: Asked, off: float):
        self.asked, self.request, self.off = asked, asked.request, off
        self.each = _parts(asked.run, asked.mesh, asked.request.kind) * asked.request.accumulate

    def all(self, fits: bool) -> Iterator[Buffer | None]:
        """Those that help a run that doesn't fit; of one that does, those that need less or are faster."""
        train, optimizer = self.request.kind == "train", self.asked.run.settings.optimizer
        if train:
            yield from (self.set(way) for way in self.remats())
            yield self.microbatches()
        if not fits:
            yield self.fewer_rows()
        if train and not fits:
            ways = self.asked.topology.devices // self.asked.topology.slices
            yield self.other(f"--mesh fsdp={ways}", mesh={"fsdp": ways})
            if optimizer.moments_memory != HOST_MEMORY:
                yield self.set({"optimizer.moments_memory": repr(HOST_MEMORY)})
        if train and optimizer.moments_dtype == "float32":
            yield self.set({"optimizer.moments_dtype": "'bfloat16'"}, " (changes numerics)")
        yield self.larger()

    def remats(self) -> Iterator[dict[str, str]]:
        """From the policy that needs least memory to the one that computes least again, the present one apart."""
        compute = self.asked.run.settings.compute
        for remat, names in (("full", ()), ("names", ("attended",)), ("none", ())):
            if (compute.remat, compute.remat_names) != (remat, names):
                all_of = {"remat": remat, "remat_names": names, "offload_names": ()}
                yield {f"compute.{name}": repr(value) for name, value in all_of.items()}

    def set(self, settings: Mapping[str, str], note: str = "") -> Buffer | None:
        """With other settings, of which those that are so already aren't told."""

        def now(name: str) -> str:
            group, _, field = name.partition(".")
            return repr(getattr(getattr(self.asked.run.settings, group), field))

        told = [f"--set {name}={_quoted(text)}" for name, text in settings.items() if text != now(name)]
        return self.other(" ".join(told) + note, overrides={**self.request.overrides, **settings})

    def microbatches(self) -> Buffer | None:
        """As few more of them as fit."""
        rows = self.request.rows // self.each
        for times in (n for n in range(2, rows + 1) if rows % n == 0):
            found = self.set({"train.accumulate": str(times * self.request.accumulate)})
            if found:
                return found
        return None

    def fewer_rows(self) -> Buffer | None:
        """As many rows as fit."""
        for count in range(self.request.rows - self.each, 0, -self.each):
            found = self.other(f"--batch {count}", rows=count)
            if found:
                return found
        return None

    def other(self, name: str, **changes) -> Buffer | None:
        r = self.request
        how = dict(mesh=r.mesh, rows=r.rows, length=r.length, overrides=r.overrides, kind=r.kind) | changes
        try:
            other = ask(r.config, r.topology, **how)
        except (SettingsError, ShardingError):
            return None
        needed = _needed(other)
        return Buffer(name=name, bytes=needed) if needed * self.off <= ROOM * other.topology.chip.offered else None

    def larger(self) -> Buffer | None:
        """The next slice of the chip that has room, else the smallest of any."""
        here, r = self.asked.topology, self.request
        more = [t for t in topology.offered(here.chip, here.slices) if t.chips > here.chips]
        others = [t for chip in chips.CHIPS.values() for t in topology.offered(chip, here.slices)]
        for slices in (more, sorted(others, key=lambda t: t.chips)):
            found = smallest(self.asked.run, slices, r.length, r.rows, r.kind, self.off)
            if found:
                return Buffer(name=found.words, bytes=found.needed)
        return None


def _quoted(text: str) -> str:
    """For a shell; a plain word needs no quotes of its own (`config.override`)."""
    word = text.strip("'")
    return word if word.isidentifier() or word.isdigit() else f'"{text}"'


def _parts(run: config.Run, mesh: Mapping[str, int], kind: Kind) -> int:
    rules = run.settings.compute.rules if kind == "train" else "decode"
    return math.prod(mesh[axis] for axis in sharding.RULES[rules][ax.BATCH])


@dataclass(frozen=True, kw_only=True)
class Held:
    """A run as a slice holds it: `needed` bytes of a device."""

    topology: Topology
    mesh: dict[str, int]
    rows: int
    needed: int

    @property
    def words(self) -> str:
        """As options of the command."""
        return f"--topology {self.topology.name} --mesh {topology.words(self.mesh)} --batch {self.rows}"


def smallest(
    run: config.Run, slices: Iterable[Topology], length: int, rows: int, kind: Kind, off: float = 1.0
) -> Held | None:
    """The first of some slices that has room by analysis for as many rows, or for one on each device.

    To train, parameters are split as far as they can be: over `fsdp` alone, else `expert` or `tensor` beside it.

    Args:
      off: times what analysis says.
    """
    accumulate = run.settings.train.accumulate if kind == "train" else 1
    for on in slices:
        for mesh in _splits(run, on, kind):
            parts = _parts(run, mesh, kind) * accumulate
            count = -(-rows // parts) * parts
            needed = analysis.parts_of(analysis.Plan(run, on, mesh, kind, count, length)).total
            if needed * off <= ROOM * on.chip.offered and topology.lies(on, mesh):
                return Held(topology=on, mesh=mesh, rows=count, needed=needed)
    return None


def _splits(run: config.Run, on: Topology, kind: Kind) -> Iterator[dict[str, int]]:
    devices, whole = on.devices // on.slices, dict.fromkeys(MESH_AXES, 1) | {"slice": on.slices}
    if kind == "decode":
        tried = [topology.mesh_sizes(on, default_mesh(on, run, kind))]
    else:
        beside = ("expert", "tensor") if legal.experts(run.spec) else ("tensor",)
        pairs = [(axis, ways) for axis in beside for ways in (2, 4, 8, 16) if devices % ways == 0]
        tried = [whole | {"fsdp": devices}, *(whole | {"fsdp": devices // n, axis: n} for axis, n in pairs)]
    rules = run.settings.compute.rules if kind == "train" else "decode"
    yield from (mesh for mesh in tried if legal.refusal(run.spec, mesh, rules) is None)
