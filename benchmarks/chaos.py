"""Runs that are disturbed at random moments and then resumed: do they end as the undisturbed one, and does any hang?

    python benchmarks/chaos.py --runs 100 --minutes 25 --write docs/failures.md

A run is two processes of a CPU device each, which train a tiny model whose parameters are split over both. It is
disturbed once, and started again by the same command until it is done. Then its last checkpoint must hold the arrays
of the undisturbed run, bit for bit: the seals that are saved with the arrays are compared, which restoring verifies.

Processes are forked from one that has imported everything, so that a start takes a second, not ten. Running out of disk
needs the right to mount a tmpfs; without it the sizes of files are limited instead.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROCESSES, DEVICES = 2, 1
PATIENCE = 900  # seconds after which a run that is still there hangs
FIELDS = {
    "mesh.data": 1, "mesh.fsdp": 2, "model.num_layers": 1, "model.d_model": 32, "model.num_heads": 2,
    "model.num_kv_heads": 1, "model.head_dim": 16, "model.d_ff": 32, "data.seq_len": 32, "data.batch_size": 8,
    "train.steps": 60, "train.checkpoint_every": 6, "train.eval_every": 0, "train.eval_batches": 1,
    "train.log_every": 5, "train.check_replicas_every": 10, "train.watchdog_seconds": 100.0,
    "data.source": "text", "data.validation_fraction": 0.3,
}  # fmt: skip
LIMITS = ("--heartbeat-timeout=30", "--start-timeout=100")  # seconds
TOLD = ("is damaged", "stopped by a signal", "can't be written", "no space", "another process is gone", "hung")
MARK = ("<!-- chaos -->", "<!-- end of chaos -->")


@dataclass
class Kind:
    """One way of disturbing, and how its runs ended."""

    name: str
    starts: int = 0
    seconds: list[float] = field(default_factory=list)
    same: int = 0
    hung: int = 0
    stopped: int = 0  # by what was done to them, before they were finished
    told: dict[str, int] = field(default_factory=dict)


def child(arguments: list[str], log: str) -> None:
    """One process of a run."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    import train

    sys.exit(train.main(arguments))


class Run:
    """One run in a workdir of its own."""

    def __init__(self, context, folder: Path, texts: Path):
        self.context, self.folder, self.log, self.texts = context, folder, folder / "log.txt", texts
        self.workdir = folder / "run"
        self.processes = []

    def start(self) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        arguments = ["--config=llama3:tiny", f"--workdir={self.workdir}", *LIMITS]
        arguments += [f"--config.{name}={value}" for name, value in FIELDS.items()]
        arguments.append(f"--config.data.paths={(str(self.texts / '*.md'),)}")
        arguments += [f"--coordinator=127.0.0.1:{port}", f"--num-processes={PROCESSES}"]
        self.processes = [
            self.context.Process(target=child, args=([*arguments, f"--process-id={i}"], str(self.log)))
            for i in range(PROCESSES)
        ]
        for process in self.processes:
            process.start()

    def steps(self) -> int:
        """The last step that was logged."""
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            return json.loads((self.workdir / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        return 0

    def alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def wait_for(self, step: int) -> None:
        end = time.monotonic() + PATIENCE
        while self.alive() and self.steps() < step and time.monotonic() < end:
            time.sleep(0.01)

    def wait(self) -> list[int | None]:
        """Exit codes; None for a process that hung, and was killed."""
        end, codes = time.monotonic() + PATIENCE, []
        for process in self.processes:
            process.join(max(0.1, end - time.monotonic()))
            codes.append(process.exitcode)
            if process.exitcode is None:
                process.kill()
                process.join()
        return codes

    def checkpoints(self) -> list[Path]:
        """Complete ones, oldest first."""
        found = (self.workdir / "checkpoints").glob("[0-9]*")
        return sorted((x for x in found if x.name.isdecimal()), key=lambda x: int(x.name))

    def seal(self) -> dict:
        newest = self.checkpoints()[-1]
        assert newest.name == str(FIELDS["train.steps"]), newest
        return json.loads((newest / "checksums" / "metadata").read_text())


def moment(run: Run, rng: random.Random) -> None:
    """Waits for a random moment between the start of the processes and the end of training."""
    if rng.random() < 0.25:
        time.sleep(rng.uniform(0, 4))  # while they meet, compile or restore
    else:
        run.wait_for(rng.randrange(FIELDS["train.steps"]))
        time.sleep(rng.uniform(0, 0.2))


def kill(run: Run, rng: random.Random) -> list:
    """kill -9 of one process."""
    run.start()
    moment(run, rng)
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(run.processes).pid, signal.SIGKILL)
    return run.wait()


def storm(run: Run, rng: random.Random) -> list:
    """Many SIGTERMs to all processes, a few milliseconds apart."""
    run.start()
    moment(run, rng)
    for _ in range(rng.randint(2, 60)):
        for process in rng.sample(run.processes, rng.randint(1, PROCESSES)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
        time.sleep(rng.uniform(0, 0.05))
    return run.wait()


def flip(run: Run, rng: random.Random) -> list:
    """A bit of a file of the newest checkpoint, once there are two; the processes are killed before."""
    run.start()
    run.wait_for(rng.randrange(15, FIELDS["train.steps"]))
    for process in run.processes:
        process.kill()
    codes = run.wait()
    files = [file for file in run.checkpoints()[-1].rglob("*") if file.is_file() and file.stat().st_size]
    file = rng.choices(files, [x.stat().st_size for x in files])[0] if rng.random() < 0.5 else rng.choice(files)
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    return codes


def fill(run: Run, rng: random.Random) -> list:
    """No room on the disk from a random moment on, until the run is started again."""
    run.workdir.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", run.workdir], check=False, capture_output=True
    )
    run.start()
    moment(run, rng)
    ballast = run.workdir / "ballast"
    if mounted.returncode == 0:
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    else:
        for process in run.processes:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (10_000, 10_000))
    codes = run.wait()
    ballast.unlink(missing_ok=True)
    return codes


def disturb(run: Run, kind: Kind, how, rng: random.Random, undisturbed: dict) -> None:
    """One run: disturbed, then started until it is done."""
    begin = time.monotonic()
    codes = how(run, rng)
    if run.steps() < FIELDS["train.steps"]:
        kind.stopped += 1
    for _ in range(3):
        if None in codes:
            kind.hung += 1
            print(f"HUNG: {run.folder}", flush=True)
            break
        run.start()
        kind.starts += 1
        codes = run.wait()
        if codes == [0] * PROCESSES and run.steps() == FIELDS["train.steps"]:
            break
    same = run.checkpoints() and run.seal() == undisturbed
    kind.same += bool(same)
    kind.seconds.append(time.monotonic() - begin)
    text = run.log.read_text(errors="replace")
    for words in (
        "is damaged",
        "stopped by a signal",
        "can't be written",
        "no space",
        "another process is gone",
        "hung",
    ):
        kind.told[words] = kind.told.get(words, 0) + (words in text.lower())
    if not same:
        print(f"DIFFERS: {run.folder}, exit codes {codes}", flush=True)


def table(kinds: list[Kind], elapsed: float) -> str:
    """Markdown."""
    lines = ["| disturbance | runs | stopped by it | as undisturbed | hangs | seconds a run: median, longest | told |"]
    lines.append("|---|---|---|---|---|---|---|")
    for kind in kinds:
        times = sorted(kind.seconds) or [0.0]
        told = "; ".join(f"{words}: {count}" for words, count in kind.told.items() if count)
        lines.append(
            f"| {kind.name} | {len(kind.seconds)} | {kind.stopped} | {kind.same} | {kind.hung} | "
            f"{times[len(times) // 2]:.0f}, {times[-1]:.0f} | {told} |"
        )
    runs, same, hung = (sum(x) for x in zip(*((len(k.seconds), k.same, k.hung) for k in kinds), strict=True))
    lines.append(f"\n{runs} runs in {elapsed / 60:.0f} minutes: {same} ended as the undisturbed one, {hung} hung.")
    return "\n".join(lines)


def main() -> None:
    """Runs as many as asked for, or as there is time for, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", type=Path, help="where compiled programs are kept from call to call")
    parser.add_argument("--only", help="a disturbance")
    parser.add_argument("--write", type=Path, help="a page with the marks between which the table goes")
    flags = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    programs = str(flags.programs or root / "programs")
    os.environ |= {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}", "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": programs, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**30), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }  # fmt: skip
    sys.path.insert(0, str(ROOT))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and not without unmounting
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train"])
    shutil.copytree(ROOT / "docs", root / "docs")  # what is trained on; the pages may change meanwhile
    undisturbed = Run(context, root, root / "docs")
    undisturbed.start()
    codes = undisturbed.wait()
    assert codes == [0] * PROCESSES, undisturbed.log.read_text()
    ways = {"kill -9 of a process": kill, "flipped bit": flip, "disk full": fill, "storm of SIGTERMs": storm}
    ways = {name: how for name, how in ways.items() if flags.only in (None, name)}
    kinds, rng, begin = [Kind(name) for name in ways], random.Random(flags.seed), time.monotonic()
    for i in range(flags.runs):
        if time.monotonic() - begin > 60 * flags.minutes:
            break
        folder = root / str(i)
        folder.mkdir()
        run, kind = Run(context, folder, root / "docs"), kinds[i % len(kinds)]
        same = kind.same
        try:
            disturb(run, kind, ways[kind.name], rng, undisturbed.seal())
        finally:
            if run.workdir.is_mount():
                subprocess.run(["umount", "-l", run.workdir], check=False)
        if kind.same > same:
            shutil.rmtree(folder)
        print(f"{i + 1}: {kind.name}: {kind.seconds[-1]:.1f} s", flush=True)
    text = table(kinds, time.monotonic() - begin)
    print(text)
    if flags.write:
        page = flags.write.read_text()
        before, after = page.partition(MARK[0])[0], page.partition(MARK[1])[2]
        flags.write.write_text(f"{before}{MARK[0]}\n\n{text}\n\n{MARK[1]}{after}")


if __name__ == "__main__":
    main()
