"""Shows that a mesh changes no result: `python -m transformer.check_mesh --families llama3 mixtral`.

One training step of each family's tiny model, on one device and on every mesh that so many devices make: the loss, the
norm of the gradient, every leaf of the gradient, every router's correction and every metric agree to float32 rounding.
On a CPU, the host's cores stand in for the devices. Exit status: 0, 1 where something differs, 2 for a mistake.
"""

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence

import jax
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from transformer import config, families, sharding
from transformer.settings import SettingsError
from transformer.spec import SpecError
from transformer.training.meshes import FLOORS, TOLERANCE, Sizes, Verdict, check_family, meshes_for

PIPE_WIDTH = 140  # columns where the output is no terminal


def render(verdicts: Sequence[Verdict]) -> Table:
    """A row for each family: the largest difference of each kind, the leaf where it lies, and the mesh."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption=f"largest differences over a leaf's largest value; limit {TOLERANCE:g}",
    )
    for name in ("family", "meshes", "refused", "leaves", *FLOORS, "seconds", ""):
        table.add_column(name, justify="right" if name in ("meshes", "refused", "leaves", "seconds") else "left")
    for v in verdicts:
        told = [f"{d.size:.1e} {d.name}\n{d.mesh}" if d.name else "–" for d in v.worst.values()]
        count = len(v.same) + len(v.wrong)
        ok = "[green]same[/]" if v.passed else "[red]nothing compared[/]" if not count else "[red]DIFFERS[/]"
        table.add_row(v.family, str(count), str(len(v.refused)), str(v.leaves), *told, f"{v.seconds:.0f}", ok)
    return table


def parse_mesh(text: str, devices: int) -> Sizes:
    """The sizes that "fsdp=4,tensor=2" names; axes that it doesn't name are 1.

    Raises:
      SettingsError: an unknown axis, no size, or sizes that don't multiply to `devices`.
    """
    sizes = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in sharding.MESH_AXES or not size.isdigit() or axis in sizes:
            known = ", ".join(sharding.MESH_AXES)
            raise SettingsError(f"--meshes={text!r}: {part!r} is no AXIS=SIZE with a further axis of {known}")
        sizes[axis] = int(size)
    if math.prod(sizes.values()) != devices:
        product = math.prod(sizes.values())
        raise SettingsError(f"--meshes={text!r}: sizes multiply to {product}; use --devices={product}, or other sizes")
    return {axis: sizes[axis] for axis in sharding.MESH_AXES if sizes.get(axis, 1) > 1}


def find_devices(count: int) -> list[jax.Device]:
    """So many devices; a CPU is asked to stand in for as many, if JAX hasn't started yet.

    Raises:
      SettingsError: there are fewer.
    """
    if count < 2:
        raise SettingsError(f"--devices={count}: use at least 2; one device is what they are compared with")
    with contextlib.suppress(RuntimeError):  # it has started, with what it has
        jax.config.update("jax_num_cpu_devices", count)
    found = jax.devices()
    if found[0].platform == "cpu":  # such small models spend their time in the compiler
        jax.config.update("jax_disable_most_optimizations", True)
    if len(found) < count:
        kind = found[0].device_kind
        remedy = f"use --devices={len(found)}, or JAX_PLATFORMS=cpu, which has as many as it is asked for"
        raise SettingsError(f"--devices={count}: there are {len(found)} of {kind}; {remedy}")
    return found[:count]


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task("", total=total)
        yield progress


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m transformer.check_mesh", description=__doc__.split(":")[0] + ".")
    parser.add_argument("--families", nargs="+", default=list(families.names()), help="default: all")
    parser.add_argument("--devices", type=int, default=8, help="devices of a mesh (%(default)s)")
    parser.add_argument("--meshes", nargs="+", help="such as fsdp=4,tensor=2 (default: all that so many devices make)")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches of the step (%(default)s)")
    return parser.parse_args(argv)


def check(families_: Sequence[str], devices: int, meshes: Sequence[str] | None, accumulate: int = 1) -> list[Verdict]:
    """The verdict on each family, with a line of progress on stderr.

    Raises:
      SettingsError: an unknown family, a mesh of other devices, or devices that aren't there.
    """
    chosen = None if meshes is None else [parse_mesh(text, devices) for text in meshes]
    for family in families_:
        config.load_config(f"{family}:tiny")
    found = find_devices(devices)
    todo = {family: chosen or meshes_for(family, devices) for family in families_}
    with _progress(sum(len(meshes) + 1 for meshes in todo.values())) as progress:
        (task,) = progress.task_ids

        def done(family: str) -> Callable[[str], None]:
            return lambda mesh: progress.update(task, advance=1, description=f"{family}: {mesh}")

        return [check_family(family, meshes, found, accumulate, done(family)) for family, meshes in todo.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    args = _arguments(argv)
    try:
        verdicts = check(args.families, args.devices, args.meshes, args.accumulate)
    except (SettingsError, SpecError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    console.print(render(verdicts), highlight=False)
    for v in verdicts:
        reasons = {reason: [name for name, r in v.refused.items() if r == reason] for reason in v.refused.values()}
        for reason, names in reasons.items():
            console.print(f"{v.family}: {', '.join(names)} refused: {reason}", highlight=False, markup=False)
        for name in v.wrong:
            console.print(f"{v.family}: {name} DIFFERS from one device", highlight=False, markup=False)
    return 0 if all(v.passed for v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
