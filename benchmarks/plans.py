"""Writes the table of docs/plans.md: every published model on a slice that holds it, what a training step needs there.

    python benchmarks/plans.py --write docs/plans.md                      (--models llama3:8b …: some; --limit 3)

First all rows by analysis, in a minute; then each through the TPU's compiler, which takes one to five minutes a row on
two cores and no TPU. What is compiled stays in the page: run it again to go on. `--again` compiles those rows anew.
The slice is the smallest of the chip (`chips_for`) that leaves a tenth of its memory free with one row a device.
"""

import argparse
import dataclasses
import importlib
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import pages
from transformer import families, plan, spec
from transformer.planning import accounting, analysis, assemble, terminal, topology
from transformer.planning.chips import CHIPS
from transformer.planning.compile import OutOfMemory, stay_off_tpus
from transformer.planning.report import Report
from transformer.planning.request import LENGTH, Asked, ask
from transformer.planning.words import si
from transformer.settings import SettingsError
from transformer.sharding import ShardingError

NAME = "benchmarks/plans.py"
HEAD = [
    "model", "parameters", "slice", "mesh", "rows x length", "GiB, compiled", "GiB, by analysis", "of", "GB sent",
    "step, estimated", "MFU, estimated", "compile CPU s, GiB",
]  # fmt: skip
FREE = 0.9  # of a device's memory, at most
MOST = 2048  # chips
# Cells that only a compiler fills.
PENDING = "–"


def models() -> list[str]:
    """Every published size of every family."""
    found = []
    for family in families.names():
        page = importlib.import_module(f"configs.{family}")
        found += [f"{family}:{size}" for size in page.SIZES if not size.startswith(("tiny", "mini"))]
    return found


def chips_for(parameters: int) -> tuple[str, ...]:
    """Small models on v5e, large ones on v5p, others on v6e; on later ones of these where none of a kind holds them."""
    kinds = "v5e", "v6e", "v5p"
    return kinds[0 if parameters < 2e9 else 1 if parameters < 3e10 else 2 :]


def chosen(model: str) -> Asked:
    """The model on its slice, one row a device, split as far as it can be."""
    family, size = model.split(":")
    built = families.build_spec(importlib.import_module(f"configs.{family}").get_config(size).model.to_dict())
    total = accounting.parameters(built).total
    for chip in (CHIPS[name] for name in chips_for(total)):
        for slices in topology.offered(chip):
            # Parameters and moments alone, in float32.
            if slices.chips < 4 or 12 * total > FREE * chip.offered * slices.devices:
                continue
            asked = next(_candidates(model, built, slices), None)
            if asked and analysis.report(asked.request, asked.run).memory.parts.total <= FREE * chip.offered:
                return asked
            if slices.chips > MOST:
                break
    raise SettingsError(f"{model}: fits no slice of {MOST} chips")


def _candidates(model: str, built: spec.Model, slices: topology.Topology) -> Iterator[Asked]:
    """Parameters on as many devices as can be, experts on as many of those as can be, copies of both on the rest."""
    mixes = any(isinstance(block.ffn, spec.MoE) for block in built.layers)
    meshes = topology.meshes(slices, ("data", "fsdp", "expert") if mixes else ("data", "fsdp"))
    for mesh in sorted(meshes, key=lambda m: (m["data"], -m["expert"])):
        try:
            yield ask(model, slices.name, mesh=mesh, length=min(LENGTH, built.max_length))
        except (SettingsError, ShardingError):
            continue


def cut(asked: Asked) -> Asked:
    """The same with two layers in each stack: the first and the last."""

    def two(stack: spec.Stack) -> spec.Stack:
        ends = stack.layers[0], stack.layers[-1]
        return spec.Stack.of(ends, 1 if ends[0] == ends[1] else 2, stack.final_norm)

    whole = asked.run.spec
    stacks = {name: two(stack) for name, stack in whole.stacks.items()}
    return dataclasses.replace(asked, run=dataclasses.replace(asked.run, spec=dataclasses.replace(whole, **stacks)))


def row(asked: Asked, report: Report | None) -> list[str]:
    """Cells for `HEAD`, with `PENDING` for what wasn't compiled."""
    by_analysis, request = assemble.analysed(asked), asked.request
    one = report or by_analysis
    sent = sum(e.sent for e in one.exchanges)
    made = f"{report.compile.cpu:.0f}, {report.compile.max_rss / 2**30:.1f}" if report else PENDING
    return [
        request.config,
        si(accounting.parameters(asked.run.spec).total).strip(),
        request.topology,
        topology.words(request.mesh),
        f"{request.rows} x {request.length}",
        terminal.gib(report.memory.peak) if report else PENDING,
        terminal.gib(by_analysis.memory.parts.total),
        terminal.gib(one.memory.offered),
        f"{sent / 1e9:.2f}",
        f"{one.estimate.step:.3g} s",
        f"{one.estimate.mfu:.0%}",
        made,
    ]


def compiled(page: Path) -> set[str]:
    """Models whose rows a page has, compiled."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.read_text().splitlines()]
    return {line[0] for line in cells if len(line) == len(HEAD) and line[-1] not in (PENDING, HEAD[-1], "---")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=models(), help="family:size (default: all)")
    parser.add_argument("--limit", type=int, help="rows to compile, at most")
    parser.add_argument("--again", action="store_true", help="compile rows that are compiled, too")
    parser.add_argument("--write", type=Path, required=True, help="the page")
    args = parser.parse_args()
    stay_off_tpus()
    there = set() if args.again else compiled(args.write)
    asked = {model: chosen(model) for model in args.models if model not in there}
    pages.update(args.write, NAME, HEAD, [row(one, None) for one in asked.values()], keys=1)
    for model, one in list(asked.items())[: args.limit]:
        start = time.perf_counter()
        try:
            made = row(one, plan.plan(one))
        except OutOfMemory as error:
            print(f"{model}: {error}", flush=True)
            continue
        pages.update(args.write, NAME, HEAD, [made], keys=1)
        print(f"| {' | '.join(made)} | {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
