"""Tells what a run on a slice of TPUs needs before it is paid for: `python -m transformer.plan --config llama3:8b
--topology v5p:4x4x4`.

The real training step (or `--prefill`, `--decode`) goes through the TPU's own compiler, which needs libtpu (the extra
`plan`) and no TPU. Memory, FLOPs, bytes and collectives are the compiled program's; times are estimates. `--no-compile`
plans by analysis alone, `--search` looks for the best mesh, remat and batch, `--diff` compares two plans.
Exit status: 0; 1 where the run doesn't fit, with what would; 2 for a mistake, with the remedy.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import jax
from rich.console import Console

from transformer import config, families, programs, sharding
from transformer.planning import assemble, difference, fit, page, search, terminal, topology
from transformer.planning.chips import CHIPS
from transformer.planning.compile import OutOfMemory, compile_program, find_libtpu, stay_off_tpus
from transformer.planning.report import Report, from_json
from transformer.planning.request import Asked, ask, settle
from transformer.planning.waiting import working
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
    parser.add_argument(
        "--search", action="store_true", help="the best mesh, remat and batch; of a chip, of its slices"
    )
    about = "each a config page, options such as '--mesh fsdp=8,tensor=4' (in quotes), a revision of this repository, "
    about += "or a report (.json); the other options are for both"
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help=about)
    parser.add_argument("--json", type=Path, metavar="OUT", help="the report as data")
    parser.add_argument("--html", type=Path, metavar="OUT", help="the report as a page")
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


def asked_for(args: argparse.Namespace, **changes) -> Asked:
    """What the arguments ask for, with arguments of `ask` in place of theirs.

    Raises:
      SettingsError, SpecError, ShardingError: it can't be.
    """
    how = dict(
        kind=args.kind, mesh=parse_mesh(args.mesh), rows=args.batch, length=args.seq, tokens=args.tokens,
        overrides=parse_settings(args.set),
    ) | changes  # fmt: skip
    named = [
        how.pop(key, None) or _required(args, name) for key, name in (("reference", "config"), ("slices", "topology"))
    ]
    return ask(*named, **how)


def made(args: argparse.Namespace, asked: Asked) -> Report:
    """Its report, compiled unless the arguments say otherwise.

    Raises:
      OutOfMemory: the compiler says that it doesn't fit.
    """
    if args.no_compile:
        return assemble.analysed(asked)
    with working(f"compiling {asked.request.config} for {asked.request.topology}"):
        return plan(asked, args.layers == "apart")


def run(args: argparse.Namespace) -> tuple[Asked, Report]:
    """What the arguments ask for, and its report.

    Raises:
      SettingsError, SpecError, ShardingError: as of `asked_for`; DoesNotFit: no report can be made of it.
    """
    asked = asked_for(args)
    try:
        if not args.no_compile:
            fit.check_state(asked)
        return asked, made(args, asked)
    except OutOfMemory as error:
        raise fit.refusal(asked, error.needed, error.largest) from None


def _required(args: argparse.Namespace, name: str) -> str:
    check(getattr(args, name) is not None, f"--{name}", None, "required")
    return getattr(args, name)


def look(args: argparse.Namespace) -> tuple[search.Found, Report]:
    """The best ways to run, on the slice or on those of the chip that the arguments name; and the plan of the best.

    Raises:
      SettingsError, SpecError, ShardingError: it can't be; DoesNotFit: nothing that was tried fits.
    """
    where, reference = _required(args, "topology"), _required(args, "config")
    check(args.mesh is None, "--mesh", args.mesh, "--search finds it; leave it out")
    values, settings = settle(reference, args.kind, args.seq, parse_settings(args.set))
    base, length = config.resolve(values), values["data"]["seq_len"]

    def report(choice: search.Choice) -> Report:
        remat = {"compute.remat": repr(choice.remat)}
        if choice.names or "compute.remat_names" in settings:
            remat["compute.remat_names"] = repr(choice.names)
        if choice.moments != base.settings.optimizer.moments_dtype:
            remat["optimizer.moments_dtype"] = repr(choice.moments)
        how = dict(slices=choice.topology, mesh=choice.mesh, rows=choice.rows, length=length)
        return made(args, asked_for(args, **how, overrides=settings | (remat if args.kind == "train" else {})))

    how = dict(rows=args.batch, kind=args.kind, verify=None if args.no_compile else report)
    if ":" in where:
        found = search.search(base, topology.parse(where), length, **how).check()
    else:
        check(where in CHIPS, "--topology", where, f"use a slice, or one of {', '.join(CHIPS)} for the smallest")
        found = search.smallest(base, CHIPS[where], length, **how).check()
    return found, found.report or report(found.best)


def compared(args: argparse.Namespace, name: str, argv: Sequence[str]) -> Report:
    """The plan of one side of `--diff`: a report that was written, a config page, options, or a revision.

    Args:
      argv: the options for both sides.

    Raises:
      SettingsError, SpecError, ShardingError, DoesNotFit: as of `run`.
    """
    if name.endswith(".json"):
        check(Path(name).is_file(), "--diff", name, "no such file; --json writes a report")
        return from_json(Path(name).read_text())
    words = shlex.split(name) or [name]
    family = words[0].partition(":")[0]
    if family in families.names() or family.endswith(".py"):
        words = ["--config", *words]
    if words[0].startswith("--"):
        return run(_arguments([*argv, *words]))[1]
    _required(args, "config")
    return difference.at_revision(name, argv, Path(__file__).parent.parent)


def _without(argv: Sequence[str], options: dict[str, int]) -> list[str]:
    """Arguments without some options and the values that follow them."""
    left, kept = list(argv), []
    while left:
        word = left.pop(0)
        if word in options:
            del left[: options[word]]
        else:
            kept.append(word)
    return kept


def refuse(error: fit.DoesNotFit, console: Console) -> None:
    """Says what didn't fit, and what would."""
    print(f"does not fit: {error}", file=sys.stderr)
    console.print(terminal.render_refusal(error), highlight=False)


def _writable(args: argparse.Namespace) -> None:
    """Raises `SettingsError` before anything is compiled for what can't be written."""
    for name in ("json", "html"):
        path = getattr(args, name)
        check(path is None or path.parent.is_dir(), f"--{name}", str(path), "no such directory; make it first")


def show(args: argparse.Namespace, argv: Sequence[str], console: Console) -> bool:
    """Prints and writes what the arguments ask for; whether it fits.

    Raises:
      SettingsError, SpecError, ShardingError: it can't be; DoesNotFit: it doesn't fit, but for one side of `--diff`.
    """
    _writable(args)
    if args.diff:
        rest = _without(argv, {"--diff": 2, "--json": 1, "--html": 1})
        check(args.json is None, "--json", str(args.json), "of --diff there is a page: --html")
        one, other = (compared(args, name, rest) for name in args.diff)
        rows = difference.compare(one, other)
        console.print(
            terminal.render_difference(tuple(args.diff), rows, difference.caution(one, other)), highlight=False
        )
        if args.html:
            args.html.write_text(page.difference_page(one, other, rows, tuple(args.diff)))
        return one.memory.fits and other.memory.fits
    if args.search:
        found, report = look(args)
        console.print(terminal.render_search(found), highlight=False)
    else:
        asked, report = run(args)
    if args.json:
        args.json.write_text(report.to_json())
    if args.html:
        args.html.write_text(page.page(report))
    if not (args.search or report.memory.fits):
        raise fit.refusal(asked, report.memory.peak)
    console.print(terminal.render(report), highlight=False)
    return report.memory.fits


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    args = _arguments(argv)
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    stay_off_tpus()
    try:
        return 0 if show(args, argv, console) else 1
    except fit.DoesNotFit as error:
        refuse(error, console)
        return 1
    except (SettingsError, SpecError, sharding.ShardingError) as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename or 'the system'}: {error.strerror or error}", file=sys.stderr)
    except jax.errors.JaxRuntimeError as error:
        print(f"error: the compiler refuses the program: {str(error).splitlines()[0]}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
