"""A report as one HTML page that needs nothing else: no script, server or network; it follows the reader's theme."""

from collections.abc import Iterable, Sequence
from html import escape

from transformer.planning import roofline, topology
from transformer.planning.chips import CHIPS, GIB
from transformer.planning.difference import Row
from transformer.planning.report import Report
from transformer.planning.topology import words

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1d2530; --muted: #5d6878; --line: #dfe4eb; --faint: #f3f5f9;
  --blue: #2f6fed; --orange: #e0791a; --green: #1f9d66; --purple: #8157c8; --red: #d0455a; --grey: #8a94a3 }
@media (prefers-color-scheme: dark) { :root { --paper: #14181f; --ink: #e8ecf2; --muted: #9ba7b7; --line: #2f3743;
  --faint: #1d232c; --blue: #6b9dff; --orange: #f2a154; --green: #4cc38a; --purple: #b394f0; --red: #f07a8a;
  --grey: #77818f } }
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 Inter, "Helvetica Neue", Arial, sans-serif }
main { max-width: 860px; margin: 0 auto; padding: 1.2rem }
h1 { font-size: 1.5rem; margin: .5rem 0 } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem }
p, li { max-width: 75ch } .muted { color: var(--muted) }
.verdict { border-left: 4px solid var(--mark); background: var(--faint); padding: .6rem .9rem; margin: 1rem 0 }
.bar { position: relative; display: flex; height: 2rem; background: var(--faint); border: 1px solid var(--line) }
.bar i { display: block; height: 100% } .bar .limit { position: absolute; top: -.3rem; bottom: -.3rem; border-left: 2px
  solid var(--red) }
.rows { display: grid; grid-template-columns: minmax(7rem, 1fr) 2fr auto; gap: .3rem .7rem; align-items: center }
.rows b { font-weight: 500; overflow-wrap: anywhere } .rows u { text-decoration: none; text-align: right;
  font-variant-numeric: tabular-nums; white-space: nowrap }
.rows s { text-decoration: none; display: block; background: var(--faint); height: .9rem }
.rows s i { display: block; height: 100% }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .93rem }
td, th { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
"""
COLORS = ("blue", "purple", "orange", "green", "grey", "red")


def page(report: Report) -> str:
    """The page of a plan."""
    r = report.request
    title = f"{r.config} on {r.topology}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">{escape(_asked(report))}</p>',
        _verdict(report),
        _memory(report),
        _time(report),
        _work(report),
        _exchanges(report),
        _assumptions(report),
        _launch(report),
    ]
    return _html(title, parts)


def difference_page(a: Report, b: Report, rows: Sequence[Row], names: tuple[str, str] | None = None) -> str:
    """The page of two plans and `difference.compare` of them."""
    one, other = names or tuple(f"{x.request.config} on {x.request.topology}" for x in (a, b))
    table = [
        (row.name, _number(row.a), _number(row.b), row.unit, "" if row.change is None else f"{row.change:+.1%}")
        for row in rows
    ]
    title = f"{one} and {other}"
    asked = "".join(f'<p class="muted">{escape(name)}: {escape(_asked(x))}</p>' for name, x in ((one, a), (other, b)))
    return _html(title, [f"<h1>{escape(title)}</h1>", asked, _table(("", one, other, "", "change"), table)])


def _asked(report: Report) -> str:
    r = report.request
    does = {"train": "a training step", "prefill": "reading prompts", "decode": "a token of each row"}[r.kind]
    settings = "".join(f", {name}={value}" for name, value in r.overrides.items())
    by = "compiled" if report.compile else "by analysis, nothing compiled"
    versions = "".join(f", {name} {version}" for name, version in report.versions.items())
    size = f"{r.rows:,} rows of {r.length:,} tokens, {r.chips:,} chips, mesh {words(r.mesh)}"
    return f"{does}, {size}{settings}; {by}{versions}"


def _verdict(report: Report) -> str:
    memory, found = report.memory, report.estimate
    fits = memory.fits
    says = "fits" if fits else "does not fit"
    text = f"It {says}: {memory.needed / GIB:.1f} of {memory.offered / GIB:.1f} GiB of a device. "
    text += f"Estimated {_seconds(found.step)} a step, {found.tokens_per_second:,.0f} tokens/s, MFU {found.mfu:.0%}."
    if report.request.tokens:
        days = found.days(report.request.tokens)
        text += (
            f" {report.request.tokens:.3g} tokens would take {days:,.1f} days, {days * 24 * report.request.chips:,.0f} "
        )
        text += "chip-hours."
    return f'<p class="verdict" style="--mark: var(--{"green" if fits else "red"})">{escape(text)}</p>'


def _memory(report: Report) -> str:
    memory, parts = report.memory, report.memory.parts
    named = parts.named
    most = max(memory.offered, parts.total, memory.needed)
    colors = {name: COLORS[min(i, len(COLORS) - 1)] for i, name in enumerate(named)}
    segments = "".join(
        f'<i style="width: {100 * size / most:.2f}%; background: var(--{colors[name]})" title="{escape(name)}"></i>'
        for name, size in named.items()
    )
    limit = f'<i class="limit" style="left: {100 * memory.offered / most:.2f}%" title="offered"></i>'
    rows = [(name, size / max(named.values()), f"{size / GIB:.2f} GiB", colors[name]) for name, size in named.items()]
    compiled = ""
    if memory.peak is not None:
        compiled = f"<p>As compiled: {memory.peak / GIB:.2f} GiB at the worst moment"
        compiled += f", {memory.arguments / GIB:.2f} of state and batch" if memory.arguments is not None else ""
        compiled += "." if parts.total == 0 else f"; by analysis {parts.total / GIB:.2f}, split below."
        compiled += "</p>"
    largest = ""
    if memory.largest:
        table = [(buffer.name, f"{buffer.bytes / GIB:.2f} GiB") for buffer in memory.largest]
        largest = f"<h2>Largest buffers</h2>{_table(('', ''), table)}"
    bar = f'<div class="bar">{segments}{limit}</div>'
    note = f'<p class="muted">The line is what the compiler offers: {memory.offered / GIB:.2f} GiB.</p>'
    return f"<h2>Memory of a device</h2>{compiled}{bar}{note}{_bars(rows)}{largest}"


def _time(report: Report) -> str:
    terms = {name: seconds for name, seconds in report.estimate.terms.items() if seconds}
    most = max(terms.values(), default=1.0)
    rows = [(name, s / most, _seconds(s), COLORS[i % len(COLORS)]) for i, (name, s) in enumerate(terms.items())]
    made = f"Each as if it ran alone; a step is {report.estimate.rule} = {_seconds(report.estimate.step)}"
    note = f"{made}. An estimate: nothing was measured."
    return f'<h2>Estimated time of a step</h2><p class="muted">{escape(note)}</p>{_bars(rows)}'


def _work(report: Report) -> str:
    flops, size = report.flops, report.bytes
    table = [(f"model: {name}", f"{n / 1e12:,.2f} TFLOP") for name, n in flops.model.items() if n]
    table += [("model: all", f"{sum(flops.model.values()) / 1e12:,.2f} TFLOP")]
    table += [
        (name, f"{n / 1e12:,.2f} TFLOP")
        for name, n in (("products of the program", flops.program), ("products as compiled", flops.compiled))
        if n is not None
    ]
    table += [(f"kernel: {name}", f"{n / 1e12:,.2f} TFLOP") for name, n in flops.kernels.items()]
    table += [("HBM, at least", f"{size.minimal / 1e9:,.1f} GB")]
    table += [("HBM, as compiled", f"{size.hbm / 1e9:,.1f} GB")] if size.hbm is not None else []
    return f"<h2>Work of a device in a step</h2>{_table(('', ''), table)}"


def _exchanges(report: Report) -> str:
    if not report.exchanges:
        return "<h2>Collectives</h2><p>None.</p>"
    ordered = sorted(report.exchanges, key=lambda e: -e.sent)
    table = [
        (e.kind, " × ".join(e.axes) if e.axes else "–", e.purpose, f"{e.times:,}", f"{e.sent / 1e9:,.2f} GB",
         "overlapped" if e.overlapped else "waited for")
        for e in ordered
    ]  # fmt: skip
    by_axes: dict[str, float] = {}
    for e in ordered:
        name = " × ".join(e.axes) if e.axes else "no axis"
        by_axes[name] = by_axes.get(name, 0.0) + e.sent
    most = max(by_axes.values()) or 1.0
    bars = _bars([(name, sent / most, f"{sent / 1e9:,.2f} GB", "blue") for name, sent in by_axes.items()])
    head = ("kind", "along", "for", "times", "sent", "")
    return f"<h2>Collectives, bytes that a device sends</h2>{bars}<br>{_table(head, table, numbers=(3, 4))}"


def _launch(report: Report) -> str:
    on, command = topology.parse(report.request.topology), report.request.command
    slices = f"{on.slices} slices of " if on.slices > 1 else ""
    where = f"Cloud TPU accelerator type: {slices}{on.accelerator}, topology {'x'.join(map(str, on.shape))}."
    runs = f'<pre class="wide">{escape(command)}</pre>' if command else ""
    return f"<h2>To run it</h2><p>{escape(where)}</p>{runs}"


def _assumptions(report: Report) -> str:
    sentences = "".join(f"<li>{escape(text)}</li>" for text in report.estimate.assumptions)
    chip = CHIPS.get(report.request.chip)
    source = f'<p class="muted">{escape(roofline.rates(chip))}</p>' if chip else ""
    return f"<h2>What this assumes</h2><ul>{sentences}</ul>{source}" if sentences else ""


def _bars(rows: Iterable[tuple[str, float, str, str]]) -> str:
    """Lines of a name, a bar of a length from 0 to 1, what it stands for, and its colour."""
    lines = (
        f'<b>{escape(name)}</b><s><i style="width: {100 * length:.2f}%; background: var(--{color})"></i></s>'
        f"<u>{escape(value)}</u>"
        for name, length, value, color in rows
    )
    return f'<div class="rows">{"".join(lines)}</div>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] | None = None) -> str:
    """Cells from the second on are numbers, or those of `numbers`."""

    def cells(row: Sequence[str], tag: str) -> str:
        right = range(1, len(row)) if numbers is None else numbers
        kind = dict.fromkeys(right, ' class="number"')
        return "".join(f"<{tag}{kind.get(i, '')}>{escape(cell)}</{tag}>" for i, cell in enumerate(row))

    top = f"<tr>{cells(head, 'th')}</tr>" if any(head) else ""
    return f'<div class="wide"><table>{top}{"".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)}</table></div>'


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}"


def _html(title: str, parts: Sequence[str]) -> str:
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body><main>\n{chr(10).join(parts)}\n</main></body>\n</html>\n"
    )
