"""Law: every process traces the same program. Devices that run different ones wait for each other forever.

The order of a Python set of names is another in every process, by the seed of its hashes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import common

SEEDS = (1, 3)
FLAGS = "--xla_force_host_platform_device_count=8"


def programs(families: tuple[str, ...], seed: int) -> dict[str, dict[str, str]]:
    """What `tests.laws.programs` prints in a process with this seed of hashes."""
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    command = [sys.executable, "-m", "tests.laws.programs", *families]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(*families: str) -> None:
    first, second = (programs(families, seed) for seed in SEEDS)
    assert first == second
    assert all(first[family] for family in families)


def test_processes_trace_the_same_program():
    check("mixtral")


@pytest.mark.slow
def test_processes_trace_the_same_program_of_every_family():
    check(*common.FAMILIES)
