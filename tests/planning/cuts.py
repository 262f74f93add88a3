"""Programs as the TPU's compiler lays them out, stopped before it makes code of them, which is most of its work.

    python -m tests.planning.cuts FOLDER '[{"reference": "gpt2:small", …}, …]'      what `planned` runs

The layout, the peak and the text of the program are all written by then: "Total bytes" of the compiler's report is what
`memory_analysis().peak_memory_in_bytes` says in the end (docs/estimates.md).
"""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Planned:
    """What a device needs at most and what goes in, in bytes; and the program that was to become code."""

    peak: int
    arguments: int
    text: str


def planned(jobs: Sequence[dict[str, Any]], folder: Path) -> list[Planned]:
    """Training steps of requests, compiled as far as that.

    Args:
      jobs: "reference", "slices", and either further arguments of `request.ask`, of which two layers are kept
        (`plans.cut`), or all "values" of a run.
    """
    command = [sys.executable, "-m", "tests.planning.cuts", str(folder), json.dumps(jobs)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr[-3000:]}"
    return [_read(folder / str(number)) for number in range(len(jobs))]


def _read(folder: Path) -> Planned:
    def text(name: str) -> str:
        (path,) = folder.glob(f"*jit_train_step*.after_optimizations{name}.txt")
        return path.read_text()

    total = re.search(r"Memory Space: default.*\nTotal bytes: (\d+)", text("-memory-usage-report"))
    arguments = re.findall(
        r"^allocation \d+: size (\d+), page \d+, parameter ", text("-buffer-assignment"), re.MULTILINE
    )
    return Planned(int(total[1]), sum(map(int, arguments)), spelled_out(text("_after_buffer_assignment")))


def spelled_out(text: str) -> str:
    """A program whose elements of tuples are instructions, as they are in what is compiled to the end.

    Here the compiler writes `%name#1` where such an element is read.
    """
    shapes, lines, made = {}, [], set()
    for line in text.splitlines():
        if line.startswith("}"):
            made.clear()
        for name, index in re.findall(r"%([\w.\-]+)#(\d+)", line):
            if (name, index) not in made:
                made.add((name, index))
                part = _parts(shapes[name])[int(index)]
                lines.append(f"  %{name}.at{index} = {part} get-tuple-element(%{name}), index={index}")
        lines.append(re.sub(r"%([\w.\-]+)#(\d+)", r"%\1.at\2", line))
        if found := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)) [a-z][\w\-]*\(", line):
            shapes[found[1]] = found[2]
    return "\n".join(lines)


def _parts(shape: str) -> list[str]:
    """Of a tuple's shape: "(f32[2,3]{1,0}, (s32[], s32[]))"."""
    depth, parts = 0, [""]
    for letter in re.sub(r"/\*.*?\*/", "", shape)[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _written(folder: Path) -> bool:
    """True when all is there: the options are written once more behind the program."""
    programs = [*folder.glob("*jit_train_step*_after_buffer_assignment.txt")]
    options = [*folder.glob("*jit_train_step*.debug_options")]
    return bool(programs and options) and options[0].stat().st_mtime_ns > programs[0].stat().st_mtime_ns


def _compile(job: dict[str, Any], folder: Path) -> None:
    import jax

    from benchmarks import plans
    from transformer import config, programs, sharding
    from transformer.planning import topology
    from transformer.planning.request import ask

    run = config.resolve(job["values"]) if "values" in job else plans.cut(ask(**job)).run
    mesh = sharding.make_mesh(run.settings.mesh, topology.parse(job["slices"]).describe())
    make, args = programs.train(run, mesh)
    with jax.set_mesh(mesh):
        make().lower(*args).compile({"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True})


def main() -> None:
    """Each job in a process of its own, which is killed when it has written what is read; imports are done once."""
    from transformer.planning.compile import find_libtpu, stay_off_tpus

    stay_off_tpus()
    find_libtpu()
    import benchmarks.plans  # noqa: F401 (for the children)

    for number, job in enumerate(json.loads(sys.argv[2])):
        folder, child = Path(sys.argv[1]) / str(number), os.fork()
        if child == 0:
            try:
                _compile(job, folder)
            except BaseException as error:
                print(f"{job['reference']}: {error}", flush=True)
            os._exit(1)
        while not _written(folder):
            if os.waitpid(child, os.WNOHANG) != (0, 0):
                sys.exit(f"{job['reference']}: it wrote no layout")
            time.sleep(0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
