"""Runs of several processes, and what can be done to them: kills, flipped bits, disks without room, signals.

Processes are forked from one that has imported everything, so that a start takes a second, not ten. Each keeps a diary
of what it is doing, in which a process that was killed in the middle of something says in what.
"""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

PROCESSES, DEVICES = 2, 1
PATIENCE = 240  # seconds after which a run that is still there hangs: nothing here takes a quarter of that
STEPS = 24
FIELDS = {
    "mesh.data": 1, "mesh.fsdp": 2, "model.num_layers": 1, "model.d_model": 32, "model.num_heads": 2,
    "model.num_kv_heads": 1, "model.head_dim": 16, "model.d_ff": 32, "data.seq_len": 128, "data.batch_size": 8,
    "train.steps": STEPS, "train.checkpoint_every": 3, "train.eval_every": 4, "train.eval_batches": 4,
    "train.log_every": 2, "train.check_replicas_every": 6, "train.keep_checkpoints": 100, "train.watchdog_seconds": 0.0,
    "data.source": "text", "data.validation_fraction": 0.3,
}  # fmt: skip
LIMITS = ("--heartbeat-timeout=30", "--start-timeout=100")  # seconds


@dataclass(frozen=True)
class Fate:
    """When a process kills itself: so many seconds after it has come to a phase for the `visit`th time; 0: at once."""

    phase: str
    visit: int
    seconds: float


class Diary:
    """Writes down when a process begins and ends a phase; what is written outlives a kill -9."""

    def __init__(self, path: Path, fate: Fate | None):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._fate, self._visits = fate, 0

    def begin(self, phase: str) -> None:
        os.write(self._file, f"+{phase}\n".encode())
        if self._fate is not None and self._fate.phase == phase:
            self._visits += 1
            if self._visits == self._fate.visit and not self._fate.seconds:
                os.kill(os.getpid(), signal.SIGKILL)
            elif self._visits == self._fate.visit:
                threading.Timer(self._fate.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def end(self, phase: str) -> None:
        os.write(self._file, f"-{phase}\n".encode())

    def follow(self, owner, name: str, phase: str, background: bool = False) -> None:
        """Has calls of `owner.name` written down: those of the main thread, or of the others."""
        function = getattr(owner, name)

        def followed(*args, **kwargs):
            if background == (threading.current_thread() is threading.main_thread()):
                return function(*args, **kwargs)
            self.begin(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.end(phase)

        setattr(owner, name, followed)


def open_phases(path: Path) -> set[str]:
    """What a process was doing when it ended."""
    open_ = Counter()
    for line in path.read_text().splitlines():
        open_[line[1:]] += 1 if line[0] == "+" else -1
    return {phase for phase, count in open_.items() if count}


def child(arguments: list[str], log: Path, diary: Path, fate: Fate | None) -> None:
    """One process of a run."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    import train
    from transformer.checkpoints.workdir import Workdir
    from transformer.training import data, feed, loop

    diary = Diary(diary, fate)
    for owner, name, phase in (
        (Workdir, "restore", "restore"), (loop._Loop, "_steps", "step"), (loop._Loop, "_evaluate", "evaluation"),
        (Workdir, "save", "save"), (feed.Feed, "put", "feed"), (Workdir, "wait", "wait"),
    ):  # fmt: skip
        diary.follow(owner, name, phase)
    diary.follow(data, "_batch", "prefetch", background=True)
    diary.begin("start")
    sys.exit(train.main(arguments))


class Run:
    """One run in a workdir of its own."""

    def __init__(self, context, folder: Path, texts: Path):
        self._context, self._texts, self._starts = context, texts, 0
        self.folder, self.workdir = folder, folder / "run"
        self.processes = []
        self.seconds = 0.0  # from the first process's end to the last one's

    def start(self, fates: dict[int, Fate] | None = None) -> None:
        """Starts all processes; of those with a fate nobody else needs to take care."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        arguments = ["--config=llama3:tiny", f"--workdir={self.workdir}", *LIMITS]
        arguments += [f"--config.{name}={value}" for name, value in FIELDS.items()]
        arguments.append(f"--config.data.paths={(str(self._texts / '*.md'),)}")
        arguments += [f"--coordinator=127.0.0.1:{port}", f"--num-processes={PROCESSES}"]
        self._starts += 1
        self.processes = [
            self._context.Process(
                target=child,
                args=([*arguments, f"--process-id={i}"], self._file("log", i), self._file("diary", i), fate),
            )
            for i in range(PROCESSES)
            for fate in [(fates or {}).get(i)]
        ]
        for process in self.processes:
            process.start()

    def begin_from(self, straight: "Run", rng: random.Random) -> None:
        """Puts here what an undisturbed run had saved at some moment, of two checkpoints at least."""
        shutil.copytree(straight.workdir, self.workdir)
        saved = self.checkpoints()
        for folder in saved[rng.randrange(2, len(saved)) :]:
            shutil.rmtree(folder)

    def _file(self, what: str, process: int) -> Path:
        return self.folder / f"{what}-{self._starts}-{process}.txt"

    def log(self, process: int) -> str:
        """What a process printed since the last start."""
        return self._file("log", process).read_text(errors="replace")

    def logs(self) -> str:
        """What all printed at all times."""
        return "".join(file.read_text(errors="replace") for file in sorted(self.folder.glob("log-*")))

    def steps(self) -> int:
        """The last step that was logged."""
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            return json.loads((self.workdir / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        return 0

    def wait_for(self, step: int) -> None:
        end = time.monotonic() + PATIENCE
        while all(x.is_alive() for x in self.processes) and self.steps() < step and time.monotonic() < end:
            time.sleep(0.02)

    def wait(self) -> list[int | None]:
        """Exit codes; None for a process that hung, and was killed."""
        end, left, first = time.monotonic() + PATIENCE, {x.sentinel for x in self.processes}, None
        while left and time.monotonic() < end:
            left -= set(wait(left, end - time.monotonic()))
            first = first or time.monotonic()
        self.seconds = time.monotonic() - (first or end)
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return [None if process.sentinel in left else process.exitcode for process in self.processes] if left else codes

    def phase(self, process: int) -> str:
        """What a process that was killed was doing."""
        found = open_phases(self._file("diary", process))
        for phase in ("restore", "evaluation", "save", "prefetch"):
            if phase in found:
                return phase
        if any("tmp" in x.name for x in (self.workdir / "checkpoints").glob("*")):
            return "save, in the background"
        return "step" if "step" in found else "end" if "wait" in found else "start"

    def checkpoints(self) -> list[Path]:
        """Complete ones, oldest first."""
        found = (self.workdir / "checkpoints").glob("[0-9]*")
        return sorted((x for x in found if x.name.isdecimal()), key=lambda x: int(x.name))

    def seal(self) -> dict | None:
        """Sums of the last step's parameters and moments."""
        newest = self.checkpoints()[-1:]
        if not newest or newest[0].name != str(STEPS):
            return None
        return json.loads((newest[0] / "checksums" / "metadata").read_text())


def _moment(run: Run, rng: random.Random) -> None:
    """Waits for a random moment between the start of the processes and the end of training."""
    if rng.random() < 0.2:
        time.sleep(rng.uniform(0, 4))  # while they meet, compile or restore
    else:
        run.wait_for(rng.randrange(STEPS))
        time.sleep(rng.uniform(0, 0.2))


def kill(run: Run, rng: random.Random, straight: Run) -> tuple[list, str]:
    """kill -9 of one process, in a phase that chance picks."""
    victim = rng.randrange(PROCESSES)
    fate = rng.choice([
        Fate("start", 1, rng.uniform(0, 6)),
        Fate("restore", 1, rng.uniform(0, 0.2)),
        Fate("feed", rng.randrange(2, STEPS), rng.uniform(0, 0.05)),
        Fate("prefetch", rng.randrange(1, STEPS), 0),  # a batch is made faster than a timer starts
        Fate("evaluation", rng.randrange(1, 6), rng.uniform(0, 0.1)),
        Fate("save", rng.randrange(1, 8), rng.uniform(0, 0.1)),
        Fate("save", rng.randrange(1, 8), rng.uniform(0.1, 0.4)),
    ])  # fmt: skip
    if fate.phase == "restore":
        run.begin_from(straight, rng)
    run.start({victim: fate})
    codes = run.wait()
    return codes, run.phase(victim) if codes[victim] == -signal.SIGKILL else "not killed"


def storm(run: Run, rng: random.Random, straight: Run) -> tuple[list, str]:
    """Many SIGTERMs to all processes, a few milliseconds apart."""
    run.start()
    _moment(run, rng)
    for _ in range(rng.randint(2, 60)):
        for process in rng.sample(run.processes, rng.randint(1, PROCESSES)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
        time.sleep(rng.uniform(0, 0.05))
    return run.wait(), ""


def flip(run: Run, rng: random.Random, straight: Run) -> tuple[list, str]:
    """A bit of a file of the newest checkpoint of a run that has stopped."""
    run.begin_from(straight, rng)
    files = sorted(file for file in run.checkpoints()[-1].rglob("*") if file.is_file() and file.stat().st_size)
    file = rng.choices(files, [x.stat().st_size for x in files])[0] if rng.random() < 0.5 else rng.choice(files)
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    run.start()
    return run.wait(), ""


def fill(run: Run, rng: random.Random, straight: Run) -> tuple[list, str]:
    """No room on the disk from a random moment on, until the run is started again."""
    run.workdir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", run.workdir], check=True)
    run.start()
    _moment(run, rng)
    ballast = run.workdir / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    codes = run.wait()
    ballast.unlink(missing_ok=True)
    return codes, ""


def limit(run: Run, rng: random.Random, straight: Run) -> tuple[list, str]:
    """No room for one of the processes: its files may not grow as large as those of its arrays."""
    victim = rng.randrange(PROCESSES)
    run.start()
    _moment(run, rng)
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(run.processes[victim].pid, resource.RLIMIT_FSIZE, (50_000, 50_000))
    return run.wait(), ""


WAYS = {
    "kill -9 of a process": kill, "flipped bit": flip, "disk full": fill, "disk full for one process": limit,
    "storm of SIGTERMs": storm,
}  # fmt: skip
