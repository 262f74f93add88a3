"""Reports of what was compiled: an analysis, with what the compiler found in place of what was reckoned."""

import dataclasses
import math
from collections.abc import Iterable

from transformer.planning import analysis, roofline, topology, traffic
from transformer.planning.accounting import BYTES
from transformer.planning.collectives import Collective, collectives
from transformer.planning.compile import Compiled
from transformer.planning.hlo import parse
from transformer.planning.leaves import leaves
from transformer.planning.moments import kept
from transformer.planning.report import Buffer, Bytes, Compile, Exchange, Flops, Report
from transformer.planning.request import Asked, ask
from transformer.planning.work import Work, work
from transformer.settings import SettingsError
from transformer.sharding import ShardingError

# How many of the biggest arrays a report names.
LARGEST = 8
# Ways to need less memory, or to use more of it for speed.
WAYS = (
    {"compute.remat": '"none"', "compute.remat_names": "()"},
    {"compute.remat": '"names"', "compute.remat_names": '("attended",)'},
    {"compute.remat": '"full"', "compute.remat_names": "()"},
    {"optimizer.moments_dtype": '"bfloat16"'},
)


def analysed(asked: Asked) -> Report:
    """By analysis alone, with the biggest arrays and what other settings would need."""
    report = analysis.report(asked.request, asked.run)
    memory_ = dataclasses.replace(report.memory, largest=largest(asked, report), instead=instead(asked))
    return dataclasses.replace(report, memory=memory_)


def compiled(asked: Asked, program: Compiled, versions: dict[str, str], steps: int | None = None) -> Report:
    """With what a compiler made of it.

    Args:
      steps: of decoding that the program makes; figures are of one.
    """
    report, topology_ = analysed(asked), asked.topology
    text, each = parse(program.text), steps or 1
    done, found = work(text, topology_.devices, steps), collectives(text, asked.mesh, steps)
    rules = asked.run.settings.compute.rules if asked.request.kind == "train" else "decode"
    flops = Flops(
        model=report.flops.model,
        program=None if program.program is None else program.program / topology_.devices / each,
        compiled=done.flops / each,
        kernels=kernels(report, done, each),
    )
    size = Bytes(minimal=report.bytes.minimal, hbm=done.bytes / each)
    cycles = {name: count / each for name, count in done.cycles.items()}
    sent = exchanges(found, rules, each)
    compile_ = Compile(seconds=program.seconds, cpu=program.cpu, max_rss=program.max_rss, cycles=cycles)
    plan = analysis.Plan(asked.run, topology_, asked.mesh, asked.request.kind, asked.request.rows, asked.request.length)
    of = roofline.Asked(topology=topology_, mesh=asked.mesh, tokens=plan.tokens)
    return dataclasses.replace(
        report,
        memory=dataclasses.replace(
            report.memory, peak=program.peak, arguments=program.arguments, temporary=program.temporary
        ),
        flops=flops,
        bytes=size,
        exchanges=sent,
        estimate=roofline.estimate(of, flops, size, sent, compile_),
        compile=compile_,
        versions=versions,
    )


def kernels(report: Report, done: Work, steps: int) -> dict[str, float]:
    """FLOPs of kernels by their own estimates; those that multiply experts' rows are reckoned if they give none."""
    estimated = {name: kernel.flops / steps for name, kernel in done.kernels.items() if not kernel.silent}
    if any(name.startswith(roofline.GROUPED) and n for name, n in estimated.items()):
        return estimated
    return {name: n for name, n in report.flops.kernels.items() if name.startswith(roofline.GROUPED)} | estimated


def exchanges(found: Iterable[Collective], rules: str, steps: int = 1) -> tuple[Exchange, ...]:
    """Collectives by kind, axes, purpose and whether they overlap, those that send most first; of one of `steps`."""
    totals: dict[tuple, Exchange] = {}
    for c in found:
        key = c.kind, c.axes, traffic.purpose(c, rules), c.overlapped
        old = totals.get(key)
        times, operand, sent = (old.times, old.operand, old.sent) if old else (0, 0.0, 0.0)
        totals[key] = Exchange(
            kind=c.kind, axes=c.axes, purpose=key[2], overlapped=c.overlapped, times=times + c.times,
            operand=operand + c.operand * c.times, sent=sent + c.total,
        )  # fmt: skip
    each = (
        dataclasses.replace(e, times=-(-e.times // steps), operand=e.operand / steps, sent=e.sent / steps)
        for e in totals.values()
    )
    return tuple(sorted(each, key=lambda e: -e.sent))


def largest(asked: Asked, report: Report) -> tuple[Buffer, ...]:
    """The biggest arrays of a device: parameters, their moments, the cache, and what is kept of activations."""
    run, train, parts = asked.run, asked.request.kind == "train", report.memory.parts
    compute = run.settings.compute
    rules, item = (compute.rules, BYTES["float32"]) if train else ("decode", BYTES[compute.dtype])
    beside: dict[str, int] = {}
    for k in kept(run.spec, run.settings.optimizer) if train else ():
        name = "/".join(k.leaf.path)
        beside[name] = beside.get(name, 0) + k.bytes(asked.mesh, rules)
    found = [Buffer(name=f"activations: {name}", bytes=size) for name, size in parts.activations.items()]
    found.append(Buffer(name="cache", bytes=parts.cache))
    for leaf in leaves(run.spec):
        size, name = math.prod(leaf.local(asked.mesh, rules)), "/".join(leaf.path)
        found.append(Buffer(name=name, bytes=size * item))
        found.append(Buffer(name=f"moments of {name}", bytes=beside.get(name, 0)))
    found = [buffer for buffer in found if buffer.bytes]
    return tuple(sorted(found, key=lambda buffer: -buffer.bytes)[:LARGEST])


def instead(asked: Asked) -> tuple[Buffer, ...]:
    """What a device would need by analysis with other settings, or on a larger slice; the least first."""
    if asked.request.kind != "train":
        return ()
    found, now = [], asked.request.overrides
    for way in WAYS:
        if any(now.get(name, "").strip("'\"") != text.strip("'\"") for name, text in way.items() if text != "()"):
            told = ", ".join(f"{name}={text}" for name, text in way.items() if text != "()")
            found += _instead(asked, told, overrides={**now, **way})
    accumulate = str(2 * asked.run.settings.train.accumulate)
    found += _instead(asked, f"train.accumulate={accumulate}", overrides={**now, "train.accumulate": accumulate})
    here = asked.topology
    larger = next((t for t in topology.offered(here.chip, here.slices) if t.chips >= 2 * here.chips), None)
    if larger:
        rows = max(asked.request.rows, larger.devices)
        told = f"{larger.name}, all fsdp" + f", batch {rows}" * (rows != asked.request.rows)
        found += _instead(asked, told, slices=larger.name, mesh={"data": 1, "fsdp": -1}, rows=rows)
    return tuple(sorted(found, key=lambda buffer: buffer.bytes))


def _instead(asked: Asked, name: str, slices: str | None = None, **changes) -> list[Buffer]:
    """Nothing where it can't be."""
    request = asked.request
    how = dict(mesh=request.mesh, rows=request.rows, length=request.length, overrides=request.overrides) | changes
    try:
        other = ask(request.config, slices or request.topology, **how)
    except (SettingsError, ShardingError):
        return []
    plan = analysis.Plan(other.run, other.topology, other.mesh, "train", other.request.rows, other.request.length)
    return [Buffer(name=name, bytes=analysis.parts_of(plan).total)]
