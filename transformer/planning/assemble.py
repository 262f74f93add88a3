"""Reports of what was compiled: an analysis, with what the compiler found in place of what was reckoned."""

import dataclasses
import math
from collections.abc import Iterable

from transformer.planning import analysis, fit, roofline, traffic
from transformer.planning.accounting import BYTES
from transformer.planning.collectives import Collective, collectives
from transformer.planning.compile import Compiled
from transformer.planning.hlo import parse
from transformer.planning.leaves import leaves
from transformer.planning.moments import kept
from transformer.planning.report import Buffer, Compile, Exchange, Flops, Report
from transformer.planning.request import Asked
from transformer.planning.work import Work, work

# How many of the biggest arrays a report names.
LARGEST = 8


def analysed(asked: Asked) -> Report:
    """By analysis alone, with the biggest arrays and what else would fit."""
    report = analysis.report(asked.request, asked.run)
    memory_ = dataclasses.replace(report.memory, largest=largest(asked, report), instead=fit.instead(asked))
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
    size = dataclasses.replace(report.bytes, hbm=done.bytes / each)
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
