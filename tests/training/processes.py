"""Runs of `train.py` by real processes on this host, which meet over its loopback interface."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Texts that are read in no time.
TEXTS = {"data.source": "text", "data.paths": (str(ROOT / "docs" / "*.md"),), "data.validation_fraction": 0.3}
TIMINGS = ("tokens_per_second", "mfu", "data_wait")


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(
    workdir: Path,
    processes: int,
    devices: int,
    config: str,
    fields: dict,
    flags: Sequence[str] = (),
) -> list[subprocess.Popen]:
    """`processes` of `devices` CPU devices each; their outputs, both streams in one, are pipes."""
    command = [sys.executable, "train.py", f"--config={config}", f"--workdir={workdir}", *flags]
    command += [f"--config.{name}={value}" for name, value in fields.items()]
    environment = {
        **os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("TRANSFORMER_TEST_CACHE", ""),
    }  # fmt: skip
    where = ("--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(processes), "--process-id")
    return [
        subprocess.Popen(
            [*command, *((*where, str(i)) if processes > 1 else ())],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for i in range(processes)
    ]  # fmt: skip


def finish(running: list[subprocess.Popen], seconds: float = 900) -> tuple[list[int], list[str]]:
    """Exit codes and outputs; whoever is still there after `seconds` is killed, and that is an error."""
    try:
        outputs = [process.communicate(timeout=seconds)[0] for process in running]
    except subprocess.TimeoutExpired as late:
        for process in running:
            process.kill()
        outputs = [process.communicate()[0] for process in running]
        raise AssertionError("hung:\n" + "\n---\n".join(outputs)) from late
    return [process.returncode for process in running], outputs


def records(workdir: Path) -> list[dict]:
    """The metrics, without timings."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMINGS} for line in lines]
