"""A plan for the terminal."""

import shlex
from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from transformer.planning import topology
from transformer.planning.difference import Row
from transformer.planning.fit import DoesNotFit
from transformer.planning.report import Buffer, Report
from transformer.planning.search import Found
from transformer.planning.topology import words
from transformer.planning.words import si

GIB = 2**30
BAR = 40  # columns
COMMAND = 110  # columns of a line of a command
# What `report.Parts.buffers` is, in a few words.
BUFFERS = "batch, weights gathered or cast for use, rows of experts"


def render(report: Report) -> Group:
    """Memory, work, what is sent, the estimate, and how to run it, in this order."""
    blocks = [_head(report), _memory(report), _work(report), _sent(report), _estimate(report), _launch(report)]
    return Group(*(line for block in blocks for line in (*block, Text(""))))


def _head(report: Report) -> Iterator[RenderableType]:
    r = report.request
    what = {"train": "one training step", "prefill": "reading prompts", "decode": "one token a row"}[r.kind]
    length = f"{r.length:,} slots" if r.kind == "decode" else f"{r.length:,} tokens"
    each = f"{r.chips} chips" if r.devices == r.chips else f"{r.chips} chips, {r.devices} devices"
    yield Text(f"{r.config} on {r.topology} ({each}), mesh {words(r.mesh)}", style="bold")
    yield Text(f"{what}: {r.rows:,} rows of {length}; " + ", ".join(f"{n}={v}" for n, v in r.overrides.items()))
    if report.compile is None:
        yield Text("by analysis alone: nothing was compiled", style="yellow")
    else:
        c = report.compile
        made = f"{c.seconds:.0f} s ({c.cpu:.0f} s of processor time) and {c.max_rss / GIB:.1f} GiB of memory here"
        yield Text(f"compiled by {', '.join(f'{n} {v}' for n, v in report.versions.items())} in {made}; nothing ran")


def _memory(report: Report) -> Iterator[RenderableType]:
    m = report.memory
    share = m.needed / m.offered
    colour = "green" if share <= 0.9 else "yellow" if share <= 1 else "red"
    filled = min(round(share * BAR), BAR)
    how = "compiled" if m.peak is not None else "by analysis"
    yield Text.assemble(
        ("HBM of a device  ", "bold"), ("█" * filled + "░" * (BAR - filled), colour),
        f"  {gib(m.needed)} of {gib(m.offered)} GiB, {how}{'' if m.fits else ': DOES NOT FIT'}",
    )  # fmt: skip
    if m.peak is not None:
        # So that the printed numbers add up.
        beside = round(m.peak / GIB, 2) - round(m.arguments / GIB, 2)
        yield Text(
            f"  of it {gib(m.arguments)} arguments, which stay, and {beside:,.2f} beside them at the worst moment"
        )
        yield Text(f"  by analysis {gib(m.parts.total)} in all:")
    rows = {name: amount(size) for name, size in m.parts.named.items()}
    if "buffers" in rows:
        rows["buffers"] += f"   {BUFFERS}"
    yield _two(rows)
    yield from _buffers("largest arrays, by analysis", m.largest)
    yield from _buffers("also fits, by analysis", m.instead)


def _buffers(title: str, buffers: tuple[Buffer, ...]) -> Iterator[RenderableType]:
    if buffers:
        yield Text(f"  {title}")
        yield _two({buffer.name: amount(buffer.bytes) for buffer in buffers}, indent=4)


def _work(report: Report) -> Iterator[RenderableType]:
    f, b = report.flops, report.bytes
    yield Text("work of a device in a step", style="bold")
    asked = sum(f.model.values())
    parts = ", ".join(f"{name} {n / asked:.0%}" for name, n in sorted(f.model.items(), key=lambda item: -item[1]))
    rows = {"model FLOPs": f"{si(asked)}FLOP  ({parts})"}
    rows |= {"products of the program": f"{si(f.program)}FLOP"} if f.program is not None else {}
    rows |= {"products, compiled": f"{si(f.compiled)}FLOP"} if f.compiled is not None else {}
    rows |= {f"kernel {name}": f"{si(n)}FLOP" for name, n in f.kernels.items() if n}
    rows |= {"HBM, at least": f"{si(b.minimal)}B"}
    rows |= {"HBM, all operands": f"{si(b.hbm)}B"} if b.hbm is not None else {}
    yield _two(rows)


def _sent(report: Report) -> Iterator[RenderableType]:
    if not report.exchanges:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="what a device sends in a step", title_justify="left")
    for name in ("collective", "along", "for", "runs", "GB sent", "beside work"):
        table.add_column(name, justify="right" if name in ("runs", "GB sent") else "left")
    for e in report.exchanges:
        if e.sent >= 1e6 or e is report.exchanges[0]:
            axes = "no axes" if e.axes is None else " × ".join(e.axes)
            hidden = "yes" if e.overlapped else "no"
            table.add_row(e.kind, axes, e.purpose, f"{e.times:,}", f"{e.sent / 1e9:,.3f}", hidden)
    yield table
    if report.request.accumulate > 1:
        more = sum(e.sent for e in report.exchanges if e.purpose in ("parameters", "gradients"))
        more *= 1 - 1 / report.request.accumulate
        each = f"{report.request.accumulate} microbatches gather parameters and sum gradients each for itself"
        yield Text(f"  {each}: {more / 1e9:,.3f} GB more than one would send")


def _estimate(report: Report) -> Iterator[RenderableType]:
    e, r = report.estimate, report.request
    yield Text("estimate (nothing was measured)", style="bold")
    rows = {name: _time_of(seconds) for name, seconds in e.terms.items() if seconds}
    if "hidden" in rows:
        rows["hidden"] += ", of ici and dcn, beside other work"
    rows["step"] = f"{_time_of(e.step)} = {e.rule}"
    rows["longest term"] = f"{e.longest}, {e.terms[e.longest] / e.step:.0%} of the step"
    rows |= {"MFU": f"{e.mfu:.1%}", "tokens a second": f"{e.tokens_per_second:,.0f} on all devices"}
    if r.tokens:
        days = e.days(r.tokens)
        rows[f"{si(r.tokens)}tokens"] = f"{days:,.1f} days, {days * 24 * r.chips:,.0f} chip-hours, without a break"
    yield _two(rows)
    yield Text("  assumed:")
    for sentence in e.assumptions:
        yield Padding(Text(sentence), (0, 0, 0, 4))


def _launch(report: Report) -> Iterator[RenderableType]:
    r = report.request
    on = topology.parse(r.topology)
    slices = f"{on.slices} slices of {on.accelerator}" if on.slices > 1 else on.accelerator
    shape = "x".join(map(str, on.shape))
    yield Text("to run it", style="bold")
    yield Text(f"  Cloud TPU accelerator type {slices}, topology {shape}: {on.chips} chips")
    if r.command:
        lines = [""]
        for word in map(shlex.quote, shlex.split(r.command)):
            lines += [""] if len(lines[-1]) + len(word) > COMMAND else []
            lines[-1] += f"{word} "
        yield Text("  " + "\\\n      ".join(lines).rstrip(), no_wrap=True, overflow="ignore")


def _two(rows: Mapping[str, str], indent: int = 2) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(min_width=indent)
    table.add_column()
    table.add_column()
    for name, value in rows.items():
        table.add_row("", name, value)
    return table


def render_refusal(error: DoesNotFit) -> Group:
    """What takes most of the memory, and what would fit."""
    blocks = (
        _buffers("what a device would hold, by analysis", error.parts),
        _buffers("its biggest arrays, as compiled", error.largest),
        _buffers("fits, by analysis", error.instead),
    )
    return Group(*(line for block in blocks for line in block))


def _time_of(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 10 else f"{1e3 * seconds:,.4g} ms"


def amount(size: float) -> str:
    """12.34 GiB; what is less than a tenth of one, 12.3 MiB."""
    return f"{gib(size)} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"


def gib(size: float | None) -> str:
    """In GiB: 12.3."""
    return "–" if size is None else f"{size / GIB:,.2f}"


def render_search(found: Found, most: int = 8) -> Table:
    """The best ways to run, by analysis, the one that was chosen marked."""
    dropped = "; ".join(f"{count:,} {reason}" for reason, count in found.pruned.items() if count)
    lossy = f"\n{found.lossy}" if found.lossy else ""
    refused = "".join(f"\nrefused by the compiler: {choice.words}: {why}" for choice, why in found.refused)
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, caption=f"dropped: {dropped}{lossy}{refused}", caption_justify="left"
    )
    for name in ("", "slice", "mesh", "remat", "rows", "GiB, by analysis", "step, estimated", "MFU"):
        table.add_column(name, justify="right" if name in ("rows", "GiB, by analysis", "MFU") else "left")
    for choice in found.ranked[:most]:
        remat = ", ".join((choice.remat, *choice.names))
        mark = "→" if choice == found.best else ""
        cells = mark, choice.topology, words(choice.mesh), remat, f"{choice.rows:,}", gib(choice.needed)
        table.add_row(*cells, _time_of(choice.seconds), f"{choice.mfu:.0%}")
    return table


def render_difference(names: tuple[str, str], rows: Sequence[Row], caution: str | None = None) -> Table:
    """Two plans side by side."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caution, caption_justify="left")
    for name in ("", *names, "unit", "change"):
        table.add_column(name, justify="left" if name in ("", "unit") else "right")
    for row in rows:
        cells = ("–" if x is None else f"{x:,.4g}" for x in (row.a, row.b))
        table.add_row(row.name, *cells, row.unit, "" if row.change is None else f"{row.change:+.1%}")
    return table
