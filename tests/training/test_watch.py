"""Signals ask once, whatever their number; a hang ends with the stacks of all threads."""

import os
import signal
import subprocess
import sys

import pytest

from transformer.training.watch import StopRequest

HANG = """
import re, time
from transformer.training import watch
watch.GRACE_SECONDS = 0.5
with watch.Watchdog({seconds}) as dog:
    dog.report("step 7")
    {hang}
    print("through")
"""


def test_a_storm_of_signals_asks_once():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert not stop.reached(1)
        for _ in range(100):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reached(2) and stop.reached(3)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def interruptible():
    """Shells start jobs in the background with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_from_the_keyboard_interrupts():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.reached(1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def hang(seconds: float, how: str) -> subprocess.CompletedProcess:
    code = HANG.format(seconds=seconds, hang=how)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_a_hang_is_ended_and_tells_what_it_was_doing():
    done = hang(0.4, "time.sleep(60)")
    assert done.returncode == 3 and "through" not in done.stdout
    assert "hung: nothing was done for train.watchdog_seconds=0.4 after step 7" in done.stderr
    assert "Current thread" in done.stderr and 'File "<string>", line 7' in done.stderr


@pytest.mark.slow
def test_a_hang_that_holds_the_interpreter_is_ended_too():
    done = hang(0.4, 're.match("(a|aa)+$", "a" * 60 + "b")')
    assert done.returncode == 1 and 'File "<string>", line 7' in done.stderr


@pytest.mark.slow
def test_work_keeps_it_quiet():
    done = hang(0.5, 'for _ in range(20): dog.report("step 8"); time.sleep(0.1)')
    assert done.returncode == 0 and "through" in done.stdout
