"""Runs that are disturbed at random moments and then resumed: do they end as the undisturbed one, and does any hang?

    python benchmarks/chaos.py --runs 100 --results chaos.jsonl --write docs/failures.md

A run is two processes of a CPU device each, which train a tiny model whose parameters are split over both. It is
disturbed once (`disturbances.py`), and started again by the same command until it is done. Then its last checkpoint
must hold the arrays of the undisturbed run, bit for bit: the seals that are saved with the arrays are compared, which
restoring verifies. No watchdog runs, so that whoever hangs is seen to hang.

What happens to run 17 follows from --seed and 17: `--first 17 --runs 1` does it again. With --results the runs of many
calls add up to one table, and a run that is done again takes the place of its first try. Running out of disk needs the
right to mount a tmpfs.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import disturbances, pages
from benchmarks.disturbances import PROCESSES, STEPS, Run

ROOT = Path(__file__).parents[1]
# Half of the runs are killed.
ORDER = ("kill -9 of a process", "flipped bit", "kill -9 of a process", "disk full", "kill -9 of a process",
         "storm of SIGTERMs", "kill -9 of a process", "disk full for one process", "kill -9 of a process",
         "storm of SIGTERMs", "kill -9 of a process", "flipped bit", "kill -9 of a process",
         "disk full", "kill -9 of a process", "disk full for one process")  # fmt: skip
TOLD = ("is damaged", "stopped by a signal", "can't be written", "another process is gone", "another task died")
RUNS = ["disturbance", "runs", "stopped by it", "as undisturbed", "hangs", "the last process ended after the first by: "
        "median, longest (s)", "a run took: median, longest (s)", "told"]  # fmt: skip
KILLS = ["killed in", "kills", "as undisturbed", "hangs"]


def disturb(run: Run, number: int, seed: int, straight: Run) -> dict:
    """One run: disturbed, then started until it is done; what came of it."""
    name, begin = ORDER[number % len(ORDER)], time.monotonic()
    codes, phase = disturbances.WAYS[name](run, random.Random(f"{seed}/{number}"), straight)
    # Whoever ended with an error has to say so, but for whoever was killed, or told to stop before there was a run.
    excused = 0, None, -signal.SIGKILL, -signal.SIGTERM
    silent = [i for i, code in enumerate(codes) if code not in excused and not _spoke(run.log(i))]
    found = {
        "run": number, "kind": name, "phase": phase, "codes": codes, "apart": round(run.seconds, 1),
        "stopped": run.steps() < STEPS, "silent": bool(silent),
    }  # fmt: skip
    starts = 1
    while None not in codes and (codes != [0] * PROCESSES or run.steps() < STEPS) and starts < 4:
        run.start()
        codes, starts = run.wait(), starts + 1
    text = run.logs().lower()
    found["silent"] |= found["stopped"] and "disk" in name and "can't be written" not in text
    return found | {
        "same": run.seal() == straight.seal(), "hung": None in codes, "starts": starts,
        "seconds": round(time.monotonic() - begin, 1), "told": [words for words in TOLD if words in text],
    }  # fmt: skip


def _spoke(log: str) -> bool:
    return "error" in log or "another task died" in log


def _figures(seconds: list[float]) -> str:
    times = sorted(seconds)
    return f"{times[len(times) // 2]:.0f}, {times[-1]:.0f}"


def _row(name: str, found: list[dict]) -> list[str]:
    told = {words: sum(words in x["told"] for x in found) for words in TOLD}
    told["nothing"] = sum(x["silent"] for x in found)
    return [
        name, str(len(found)), *(str(sum(x[field] for x in found)) for field in ("stopped", "same", "hung")),
        _figures([x["apart"] for x in found]), _figures([x["seconds"] for x in found]),
        "; ".join(f"{words}: {count}" for words, count in told.items() if count),
    ]  # fmt: skip


def write(page: Path, results: list[dict]) -> None:
    """The tables."""
    kinds = sorted({x["kind"] for x in results})
    rows = [_row(kind, [x for x in results if x["kind"] == kind]) for kind in kinds]
    pages.update(page, "chaos", RUNS, [*rows, _row("together", results)], keys=1)
    kills = [x for x in results if x["phase"] not in ("", "not killed")]
    rows = [
        [phase, str(len(found)), str(sum(x["same"] for x in found)), str(sum(x["hung"] for x in found))]
        for phase in sorted({x["phase"] for x in kills})
        for found in [[x for x in kills if x["phase"] == phase]]
    ]
    pages.update(page, "kills", KILLS, rows, keys=1)


def read(file: Path | None) -> dict[int, dict]:
    """Results of earlier calls, by the number of the run."""
    lines = file.read_text().splitlines() if file and file.exists() else []
    return {found["run"]: found for found in map(json.loads, lines)}


def prepare(programs: Path) -> None:
    """The environment of the processes: CPU devices, and programs that are compiled once."""
    os.environ |= {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={disturbances.DEVICES}", "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(programs), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**30), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and not without unmounting


def run_all(flags: argparse.Namespace, results: dict[int, dict]) -> None:
    """Does as many runs as asked for, or as there is time for, and adds what came of them to `results`."""
    root, begin = Path(tempfile.mkdtemp(prefix="chaos-")), time.monotonic()
    prepare(root / "programs")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train", "benchmarks.disturbances"])
    shutil.copytree(ROOT / "docs", root / "docs")  # what is trained on; the pages may change meanwhile
    straight = Run(context, root, root / "docs")
    straight.start()
    codes = straight.wait()
    assert codes == [0] * PROCESSES, straight.logs()
    for number in range(flags.first, flags.first + flags.runs):
        if time.monotonic() - begin > 60 * flags.minutes:
            break
        run = Run(context, root / str(number), root / "docs")
        run.folder.mkdir()
        try:
            found = results[number] = disturb(run, number, flags.seed, straight)
        finally:
            if run.workdir.is_mount():
                subprocess.run(["umount", "-l", run.workdir], check=False)
        if found["same"] and not found["hung"] and not found["silent"]:
            shutil.rmtree(run.folder)
        else:
            print(f"see {run.folder}", flush=True)
        print(json.dumps(found), flush=True)
        if flags.results:
            with flags.results.open("a") as file:
                file.write(json.dumps(found) + "\n")


def main() -> None:
    """Does the runs and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the number of the first run")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="where what came of runs is kept from call to call")
    parser.add_argument("--write", type=Path, help="a page with places for the tables")
    flags = parser.parse_args()
    results = read(flags.results)
    if flags.runs:
        run_all(flags, results)
    if flags.write:
        write(flags.write, list(results.values()))


if __name__ == "__main__":
    main()
