"""Killed at random moments and resumed, a run ends as the undisturbed one: parameters and metrics, bit for bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import transformer

ROOT = Path(__file__).parents[2]
KILLS = 10
STEPS = 1500


def start(workdir: Path, cache: Path) -> subprocess.Popen:
    options = {
        "model.num_layers": 2, "model.d_ff": 64, "data.seq_len": 32, "data.batch_size": 8, "train.steps": STEPS,
        "train.checkpoint_every": 7, "train.log_every": 1, "train.eval_every": 50, "train.eval_batches": 1,
    }  # fmt: skip
    arguments = [f"--config.{name}={value}" for name, value in options.items()]
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache), "XLA_FLAGS": ""}
    command = [sys.executable, "train.py", "--config=llama3:tiny", f"--workdir={workdir}", "--quiet", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def logged(workdir: Path) -> int:
    file = workdir / "metrics.jsonl"
    return file.stat().st_size if file.exists() else 0


def records(workdir: Path) -> list[dict]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if k not in ("tokens_per_second", "mfu", "data_wait")}
        for line in lines
    ]


@pytest.mark.slow
def test_killed_at_random_moments_is_the_straight_run(tmp_path):
    cache, straight, killed = tmp_path / "cache", tmp_path / "straight", tmp_path / "killed"
    process = start(straight, cache)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    rng, kills, ends = random.Random(0), 0, []
    while kills < KILLS:
        process = start(killed, cache)
        # The resumed process first rewrites the file without what was never saved, so wait until it is steady.
        before, grown = logged(killed), 0
        while process.poll() is None and grown < 3:
            time.sleep(0.02)
            size = logged(killed)
            grown, before = grown + (size > before), size
        time.sleep(rng.uniform(0, 1.0))
        if process.poll() is not None:
            assert process.returncode == 0, process.communicate()[0]
            pytest.fail(f"the run ended after {kills} kills; give it more steps")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
        ends.append(records_end(killed))
    process = start(killed, cache)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    print("killed when the log had reached steps", ends)
    assert len(set(ends)) > KILLS // 2, ends  # two may fall within one save
    assert records(killed) == records(straight)
    _, expected, _ = transformer.load(straight)
    _, found, _ = transformer.load(killed)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True):
        assert np.array_equal(x, y), jax.tree_util.keystr(path)


def records_end(workdir: Path) -> int:
    """The last step that the log shows whole."""
    for line in reversed((workdir / "metrics.jsonl").read_text().splitlines()):
        try:
            return json.loads(line)["step"]
        except json.JSONDecodeError:
            continue
    return 0
