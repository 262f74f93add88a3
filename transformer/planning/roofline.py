"""How long a step may take, from FLOPs, bytes and what a chip can do of them: an estimate, not a measurement.

It takes what a compiler found (`planning.work`, `planning.collectives`) or, where nothing was compiled, what
`planning.analysis` counts; the same terms are made of either. What it assumes comes with it, a sentence each.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from transformer.planning import links
from transformer.planning.chips import GIB, Chip
from transformer.planning.report import COMPUTING, WAITED, Bytes, Compile, Estimate, Exchange, Flops
from transformer.planning.topology import Topology

# Of the peak: what the compiler's own cycles of matrix products come to (79 % on v5p, 81 % on v5e, libtpu 0.0.52).
PRODUCTS = 0.80
# Of the peak: attention kernels, of whose time no compiler tells anything. Assumed.
ATTENTION = 0.50
# Of HBM's bandwidth: work beside products that reads and writes its arrays once. The compiler's cycles of such work
# come to that, or less (docs/estimates.md).
ELEMENTWISE = 0.50
# Kernels that multiply the rows of experts.
GROUPED = "ragged-dot"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the estimate is of.

    Attributes:
      mesh: sizes of all axes.
      tokens: of a step, on all devices.
    """

    topology: Topology
    mesh: Mapping[str, int]
    tokens: float


def estimate(
    asked: Asked,
    flops: Flops,
    size: Bytes,
    exchanges: Sequence[Exchange],
    compiled: Compile | None = None,
    elementwise: float = 0.0,
) -> Estimate:
    """The time of a step, on devices that all do the same.

    Args:
      compiled: with the compiler's cycles, if it compiled.
      elementwise: bytes that work beside matrix products reads and writes, for a plan that compiled nothing.
    """
    chip, topology = asked.topology.chip, asked.topology
    cycles = compiled.cycles if compiled is not None and chip.clock else {}
    grouped = sum(n for name, n in flops.kernels.items() if name.startswith(GROUPED))
    products = next(n for n in (flops.compiled, flops.program, sum(flops.model.values())) if n is not None)
    terms = dict.fromkeys((*COMPUTING, "hbm", *WAITED, "hidden"), 0.0)
    rate = PRODUCTS * chip.device_flops
    terms["matmul"] = (cycles["matmul"] / chip.clock if "matmul" in cycles else products / rate) + grouped / rate
    terms["attention"] = (sum(flops.kernels.values()) - grouped) / (ATTENTION * chip.device_flops)
    moved = size.hbm if size.hbm is not None else size.minimal
    if cycles:
        terms["elementwise"] = sum(n for name, n in cycles.items() if name != "matmul") / chip.clock
    else:
        terms["elementwise"] = elementwise / (ELEMENTWISE * chip.device_bandwidth)
    terms["hbm"] = moved / chip.device_bandwidth
    for exchange in exchanges:
        term = "dcn" if exchange.axes and "slice" in exchange.axes else "ici"
        time = links.seconds(topology, asked.mesh, exchange)
        terms[term] += time
        terms["hidden"] += time * exchange.overlapped
    terms["host"] = size.host / (chip.device_host_link or math.inf)
    busy = max(sum(terms[name] for name in COMPUTING), terms["hbm"], terms["hidden"])
    step = busy + sum(terms[name] for name in WAITED) - terms["hidden"]
    return Estimate(
        terms=terms,
        step=step,
        mfu=sum(flops.model.values()) / (step * chip.device_flops),
        tokens_per_second=asked.tokens / step,
        assumptions=tuple(_assumptions(asked, bool(cycles), size, exchanges, terms)),
    )


def _assumptions(
    asked: Asked, cycles: bool, size: Bytes, exchanges: Sequence[Exchange], terms: Mapping[str, float]
) -> Iterator[str]:
    """Those that were used, a sentence each."""
    chip = asked.topology.chip
    peak, hbm = f"{chip.device_flops / 1e12:.0f} TFLOP/s", f"{chip.device_bandwidth / 1e9:,.0f} GB/s"
    each = "" if chip.devices == 1 else f" A {chip.name} chip is {chip.devices} devices, which share its rates."
    yield f"Nothing was measured: these are bounds and the compiler's own estimates.{each}"
    if cycles:
        clock = f"{chip.clock / 1e9:g} GHz"
        yield f"Matrix products and elementwise work take the cycles that the compiler estimates, at {clock}."
    else:
        yield f"Matrix products run at {PRODUCTS:.0%} of {peak}, as by the compiler's own estimates on v5p and v5e."
        if terms["elementwise"]:
            yield f"Work beside products reads and writes its arrays once, at {ELEMENTWISE:.0%} of HBM's {hbm}."
    if terms["attention"]:
        yield f"Attention kernels run at {ATTENTION:.0%} of {peak}, which is assumed: no compiler estimates them."
    beside = "" if terms["elementwise"] else ", those of work beside products too,"
    compiled = f"all operands and results of the program{beside}"
    moved = compiled if size.hbm is not None else "weights, moments, cache and what is kept"
    yield f"HBM moves {moved} at {hbm} while products run; the longer of the two counts."
    if terms["ici"]:
        yield (
            f"A link carries {chip.link / 1e9:g} GB/s each way; a collective uses the links of all dimensions of its "
            "mesh axes at once, both ways round where a dimension is a ring."
        )
    if terms["ici"] or terms["dcn"]:
        count = sum(e.overlapped for e in exchanges)
        which = "none" if not count else "all" if count == len(exchanges) else f"{count} of {len(exchanges)} kinds"
        yield f"Of the collectives, {which} run beside products; the others are waited for."
    if terms["dcn"]:
        yield f"Between slices each device has {chip.device_network / 1e9:.2f} GB/s of the data centre's network."
    if terms["host"]:
        link = f"{chip.device_host_link / 1e9:g} GB/s"
        yield f"Moments come from the host's memory and go back at {link} each way, both at once; that is waited for."
    elif size.host:
        yield f"Moments travel to the host's memory and back; {chip.name}'s link to it isn't published: not counted."


def chip_hours(asked: Asked, found: Estimate, tokens: float) -> float:
    """Of so many tokens, without a break."""
    return found.days(tokens) * 24 * asked.topology.chips * asked.topology.slices


def rates(chip: Chip) -> str:
    """What a chip is taken to do, in a sentence."""
    return (
        f"{chip.name}: {chip.flops / 1e12:,.0f} TFLOP/s in bfloat16, {chip.capacity / GIB:.0f} GiB of HBM at "
        f"{chip.bandwidth / 1e9:,.0f} GB/s, {2 * chip.dims} links of {chip.link / 1e9:g} GB/s each way (published; "
        "planning/chips.py has the sources)."
    )
