"""Sides of `train_step.py`, each in a process of its own, so that each has its own peak of memory.

One JSON object a line. The first line a worker reads is the task; it answers what runs. Then it answers every request
until the input ends: {"steps": n}, {"peak": true} and, of some sides, {"matmul": tries} and {"products": true}.
Nothing here needs more than numpy: workers run under interpreters that have only what their side needs.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

ROOT = Path(__file__).parent.parent
MATMUL = 2048  # rows and columns
# CPUs alone, and nothing that an earlier run has compiled.
ENVIRONMENT = dict(JAX_PLATFORMS="cpu", JAX_ENABLE_COMPILATION_CACHE="false", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
HIDDEN = 0.15  # of the tokens of a masked language model


class Trainer(Protocol):
    """A model, its optimiser and one batch."""

    def describe(self) -> dict[str, Any]:
        """What runs: `parameters`, `versions`, and `compile`, seconds to trace and compile, where that came first."""
        ...

    def run(self, steps: int) -> float:
        """Trains some steps, and waits for the last; its loss in nats a token."""
        ...


def random_batch(task: dict) -> dict[str, np.ndarray]:
    """Full rows of one document each: `tokens` and `targets` int32 [B, T], `weights` float32 [B, T] of the targets.

    Targets are the next tokens, all of them; or, where tokens are hidden, the tokens themselves, of which the hidden
    ones count.
    """
    rng, shape = np.random.default_rng(0), (task["rows"], task["length"])
    text = rng.integers(0, task["model"]["vocab_size"], (shape[0], shape[1] + 1), dtype=np.int32)
    if not task["masked"]:
        return dict(tokens=text[:, :-1], targets=text[:, 1:], weights=np.ones(shape, np.float32))
    hidden = rng.random(shape) < HIDDEN
    return dict(tokens=np.where(hidden, 0, text[:, 1:]), targets=text[:, 1:], weights=hidden.astype(np.float32))


def serve(make: Callable[[dict], Trainer]) -> None:
    """Answers requests until the input ends, or until something goes wrong, which is the last answer."""
    # Whatever libraries print goes elsewhere than the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    # Where memory runs out, this goes, and nothing else of the machine; the side's cells are then empty.
    Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        trainer = make(json.loads(sys.stdin.readline()))
        print(json.dumps(trainer.describe()), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(_answer(trainer, json.loads(line))), file=answers, flush=True)
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        print(json.dumps({"error": f"{type(error).__name__}: {reason}"}), file=answers, flush=True)
        raise


def _answer(trainer: Trainer, request: dict) -> dict:
    match request:
        case {"steps": steps}:
            start = time.perf_counter()
            loss = trainer.run(steps)
            return {"seconds": time.perf_counter() - start, "loss": loss}
        case {"matmul": tries}:
            return {"flops": max(_speeds(trainer.multiply(), tries))}
        case {"products": True}:
            return {"flops": trainer.products()}
        case {"peak": True}:
            return {"bytes": _peak()}
    raise ValueError(f"{request}: unknown request")


def _speeds(multiply: Callable[[], None], tries: int) -> list[float]:
    """FLOP/s of some products, after one that is not counted."""
    multiply()
    speeds = []
    for _ in range(tries):
        start = time.perf_counter()
        multiply()
        speeds.append(2 * MATMUL**3 / (time.perf_counter() - start))
    return speeds


def _peak() -> int:
    """Bytes of memory that this process held at most. Not `getrusage`, where a child begins at its parent's peak."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


class Worker:
    """The parent's end of a worker, which starts with further variables in its environment.

    Attributes:
      failure: why it ended, None while it lives.
    """

    def __init__(self, python: str, module: str, task: dict, environment: dict[str, str]):
        self.process = subprocess.Popen(
            [python, "-m", module],
            cwd=ROOT, env=os.environ | ENVIRONMENT | environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.failure: str | None = None
        self.description = self.ask(task)

    def ask(self, request: dict) -> dict | None:
        """One request, one answer; None from now on if it fails."""
        if self.failure:
            return None
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            answer = json.loads(self.process.stdout.readline() or "null")
        except BrokenPipeError:
            answer = None
        if answer is None:
            self.failure = f"{self.process.args[0]} ended with code {self.process.wait()}"
        elif "error" in answer:
            self.failure, answer = answer["error"], None
        return answer

    def close(self) -> None:
        """Ends the worker."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()
