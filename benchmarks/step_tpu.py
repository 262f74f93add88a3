"""Compiles whole training steps for TPU slices that aren't there, and writes the table of docs/step.md.

    python benchmarks/step_tpu.py --write docs/step.md                 (--steps llama3-8b: some of `STEPS`)
    python benchmarks/step_tpu.py --steps llama3-8b --options xla_tpu_scoped_vmem_limit_kib=65536 --note "64 MiB VMEM"

The step is the real one, with its optimiser, as `python -m transformer.plan` compiles it: two to ten minutes of a CPU
each, by the libtpu of `jax[tpu]`. Nothing runs. `--options` are further ones for the compiler, beside those that
`transformer/compiler.py` gives it always.
"""

import argparse
import time
from collections import Counter
from pathlib import Path

from benchmarks import pages
from transformer import programs, sharding
from transformer.planning.collectives import Collective, collectives
from transformer.planning.compile import Compiled, compile_program, stay_off_tpus
from transformer.planning.hlo import parse
from transformer.planning.request import Asked, ask
from transformer.planning.work import work

NAME = "benchmarks/step_tpu.py"
HEAD = [
    "step", "note", "HBM, GiB", "at its peak", "TFLOP", "estimated s", "matmul", "elementwise", "moves", "GB sent",
    "all-gather", "reduce-scatter", "all-reduce", "others", "CPU s",
]  # fmt: skip
GIB, GB = 2**30, 1e9
KERNELS = {"compute.attention": "splash"}
BOUNDED = KERNELS | {"compute.expert_buffer": "1.25"}
# What is compiled: config page, slice, mesh, rows of a device, tokens of a row, settings.
STEPS = {
    "llama3-8b": ("llama3:8b", "v5p:4x4x4", dict(fsdp=64), 2, 8192, KERNELS),
    "deepseek-v3-671b": ("deepseek_v3:671b", "v5p:8x8x16", dict(fsdp=64, expert=16), 1, 4096, BOUNDED),
}


def asked_of(name: str) -> Asked:
    """The run of a step, in bfloat16 with float32 parameters and moments and full remat."""
    model, slices, mesh, rows, length, overrides = STEPS[name]
    count = rows * ask(model, slices, mesh=mesh, length=length).topology.devices
    return ask(model, slices, mesh=mesh, rows=count, length=length, overrides=overrides)


def compiled(asked: Asked, options: dict[str, str]) -> Compiled:
    """What the TPU's compiler makes of the step."""
    mesh = sharding.make_mesh(asked.run.settings.mesh, asked.topology.describe())
    make, args = programs.train(asked.run, mesh)
    return compile_program(make, args, mesh, options=options)


def row(name: str, note: str, asked: Asked, program: Compiled, seconds: float) -> list[str]:
    """Cells for `HEAD`."""
    parsed, chip = parse(program.text), asked.topology.chip
    done, found = work(parsed, asked.topology.devices), collectives(parsed, asked.mesh)
    spent = {kind: cycles / chip.clock for kind, cycles in done.cycles.items()}
    return [
        name,
        note,
        f"{program.peak / GIB:.1f}",
        f"{program.busiest / GIB:.1f}",
        f"{done.flops / 1e12:.1f}",
        f"{sum(spent.values()):.2f}",
        *(f"{spent.get(kind, 0):.2f}" for kind in ("matmul", "elementwise", "moves")),
        *sent(found),
        f"{seconds:.0f}",
    ]


def sent(found: list[Collective]) -> list[str]:
    """GB that a device sends: in all, by the kinds that have a column, and by all others."""
    by_kind = Counter()
    for c in found:
        by_kind[c.kind] += c.total / GB
    named = [by_kind.pop(kind, 0.0) for kind in ("all-gather", "reduce-scatter", "all-reduce")]
    others = sum(by_kind.values())
    return [f"{size:.1f}" for size in (sum(named) + others, *named, others)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--options", nargs="*", default=[], metavar="NAME=VALUE", help="of the compiler")
    parser.add_argument("--note", default="", help="what is special about the rows")
    parser.add_argument("--text", type=Path, help="a folder for the texts of the compiled programs")
    parser.add_argument("--write", type=Path, help="the page whose table gets the rows")
    args = parser.parse_args()
    stay_off_tpus()
    for name in args.steps:
        asked, begin = asked_of(name), time.process_time()
        program = compiled(asked, dict(option.split("=") for option in args.options))
        made = row(name, args.note, asked, program, time.process_time() - begin)
        print(f"| {' | '.join(made)} |", flush=True)
        if args.text:
            (args.text / f"{name}.txt").write_text(program.text)
        if args.write:
            pages.update(args.write, NAME, HEAD, [made], keys=2)


if __name__ == "__main__":
    main()
