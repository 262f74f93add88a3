"""`train.py` as people call it: mistakes are one line, before any work."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

import train

ROOT = Path(__file__).parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "train.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config.data.batch_size=7", "--config.train.accumulate=2"], ["train.accumulate=2", "data.batch_size=7"]),
        (["--config.data.tokenizer=none.json"], ["data.tokenizer", "none.json"]),
        (["--config.model.vocab_size=100"], ["model.vocab_size=100", "259"]),
        (["--config.train.stops=3"], ["train.stops='3'", "did you mean train.steps?"]),
        (["--config.trian.steps=3"], ["trian.steps='3'", "no such group"]),
        (["--config.train.steps=many"], ["train.steps='many'", "expected int"]),
        (["--config.model.hats=3"], ["model.hats=3", "unknown field"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, arguments, words):
    done = run("--config=configs/gpt2.py:tiny", f"--workdir={tmp_path / 'run'}", *arguments)
    assert done.returncode == 2, done.stderr
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("error: ") and all(word in message for word in words)
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_leaves_logging_as_it_was():
    log = logging.getLogger("transformer")
    before = log.propagate, log.level, log.handlers[:]
    assert train.main(["--config=nowhere", "--workdir=unused"]) == 2
    assert (log.propagate, log.level, log.handlers) == before
