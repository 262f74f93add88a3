"""Tells what a run on a slice of TPUs needs before it is paid for: `python -m transformer.plan --config llama3:8b
--topology v5p:4x4x4`.

The real training step (or `--prefill`, `--decode`) goes through the TPU's own compiler, which needs libtpu (the extra
`plan`) and no TPU. Memory, FLOPs, bytes and collectives are the compiled program's; times are estimates. `--no-compile`
plans by analysis alone. Exit status: 0, 1 where the run doesn't fit, 2 for a mistake.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from transformer import programs, sharding
from transformer.planning import assemble, terminal
from transformer.planning.compile import OutOfMemory, compile_program, find_libtpu, stay_off_tpus
from transformer.planning.report import Buffer, Report
from transformer.planning.request import Asked, ask, check_state
from transformer.settings import SettingsError, check
from transformer.spec import SpecError

PIPE_WIDTH = 140  # columns where the output is no terminal


def plan(asked: Asked, apart: bool = False) -> Report:
    """The report of what was asked for, compiled; `stay_off_tpus` must have been called.

    Args:
      apart: to generate, every layer has arrays of its own (`generation.unroll`).

    Raises:
      OutOfMemory: it doesn't fit.
      SettingsError, ShardingError: the program itself refuses its settings or the mesh.
    """
    request, libtpu = asked.request, find_libtpu()
    mesh = sharding.make_mesh(asked.run.settings.mesh, asked.topology.describe())
    steps = programs.STEPS if request.kind == "decode" else None
    if request.kind == "train":
        make, args = programs.train(asked.run, mesh)
    else:
        program = programs.decode if request.kind == "decode" else programs.prefill
        make, args = program(asked.run, mesh, request.rows, request.length, apart)
    versions = {"jax": jax.__version__, "libtpu": libtpu, "transformer": metadata.version("transformer")}
    return assemble.compiled(asked, compile_program(make, args, mesh, steps), versions, steps)


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """A line on stderr with the time that has passed."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(what, total=None)
        yield


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    about = "Tells what a run on a slice of TPUs needs before it is paid for."
    parser = argparse.ArgumentParser(prog="python -m transformer.plan", description=about)
    parser.add_argument("--config", help="a config page and a size: configs/llama3.py:8b or llama3:8b")
    parser.add_argument("--topology", help="such as v5p:4x4x4, v6e:4x8, or 2*v5p:4x4x4 for two slices")
    parser.add_argument("--mesh", help="such as fsdp=64,expert=16 (default: fsdp=-1; to decode, tensor)")
    parser.add_argument("--seq", type=int, help="tokens of a row (default: 4096, or the model's most)")
    parser.add_argument("--batch", type=int, help="rows of a step, on all devices (default: one a part of the batch)")
    kind = parser.add_mutually_exclusive_group()
    for name, does in (("train", "a training step (default)"), ("prefill", "read prompts"), ("decode", "draw tokens")):
        kind.add_argument(f"--{name}", dest="kind", action="store_const", const=name, help=does)
    parser.add_argument("--layers", choices=["stacked", "apart"], default="stacked", help="of --prefill and --decode")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting, such as compute.remat='none'"
    )
    parser.add_argument("--tokens", type=float, help="to be trained on, such as 15e12: for days and chip-hours")
    parser.add_argument("--no-compile", action="store_true", help="analysis alone; needs no libtpu")
    parser.add_argument("--json", type=Path, metavar="OUT", help="the report as data")
    parser.set_defaults(kind="train")
    return parser.parse_args(argv)


def parse_mesh(text: str | None) -> dict[str, int] | None:
    """The sizes that "fsdp=64,expert=16" names.

    Raises:
      SettingsError: it names none.
    """
    if text is None:
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    well = all(size.lstrip("-").isdigit() for _, _, size in pairs) and len({name for name, *_ in pairs}) == len(pairs)
    check(well, "--mesh", text, "write axes and sizes, such as fsdp=64,expert=16")
    return {name: int(size) for name, _, size in pairs}


def parse_settings(texts: Sequence[str]) -> dict[str, str]:
    """Names and values of `--set`.

    Raises:
      SettingsError: one isn't NAME=VALUE.
    """
    pairs = [text.partition("=") for text in texts]
    for name, equals, _ in pairs:
        check(bool(equals), "--set", name, "write NAME=VALUE, such as compute.remat='full'")
    return {name: value for name, _, value in pairs}


def run(args: argparse.Namespace) -> Report:
    """The report that the arguments ask for.

    Raises:
      SettingsError, SpecError, ShardingError: it can't be; OutOfMemory: it doesn't fit.
    """
    for name in ("config", "topology"):
        check(getattr(args, name) is not None, f"--{name}", None, "required")
    asked = ask(
        args.config, args.topology, kind=args.kind, mesh=parse_mesh(args.mesh), rows=args.batch, length=args.seq,
        overrides=parse_settings(args.set), tokens=args.tokens,
    )  # fmt: skip
    if args.no_compile:
        return assemble.analysed(asked)
    find_libtpu()
    check_state(asked)
    with working(f"compiling {asked.request.config} for {asked.request.topology}"):
        return plan(asked, args.layers == "apart")


def refuse(error: OutOfMemory, console: Console) -> None:
    """Says what didn't fit."""
    needed, offered = (terminal.gib(size) for size in (error.needed, error.offered))
    print(f"does not fit: the program needs {needed} GiB of a device, which has {offered}", file=sys.stderr)
    rows: Sequence[Buffer] = error.largest
    for buffer in rows:
        console.print(f"  {terminal.gib(buffer.bytes):>8} GiB  {buffer.name}", highlight=False, markup=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    args = _arguments(argv)
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    stay_off_tpus()
    try:
        report = run(args)
    except OutOfMemory as error:
        refuse(error, console)
        return 1
    except (SettingsError, SpecError, sharding.ShardingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console.print(terminal.render(report), highlight=False)
    if args.json:
        args.json.write_text(report.to_json())
    return 0 if report.memory.fits else 1


if __name__ == "__main__":
    sys.exit(main())
