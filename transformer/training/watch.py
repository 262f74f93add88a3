"""What ends a run early: a signal that all processes heed at one step, and a watchdog for one that hangs."""

import faulthandler
import os
import signal
import sys
import threading
import time

from transformer import distributed

GRACE_SECONDS = 10


class StopRequest:
    """Whether a signal has asked to stop. A context manager, which handles SIGTERM and SIGINT meanwhile.

    Further SIGTERMs change nothing (schedulers send several); a second SIGINT, of somebody at the keyboard, interrupts.
    Where there are several processes a signal to one of them is heeded by all, at the same step: that protocol is
    JAX's own, runs beside the steps, and costs none of them a wait for the devices. JAX handles SIGTERM itself there.
    """

    def __init__(self):
        self._asked = False
        self._previous = {}

    def __enter__(self) -> "StopRequest":
        mine = (signal.SIGINT,) if distributed.joined() else (signal.SIGINT, signal.SIGTERM)
        try:
            self._previous = {number: signal.signal(number, self._ask) for number in mine}
        except ValueError:  # not the main thread: a notebook's worker has no signals to handle
            self._previous = {}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _) -> None:
        self._asked = True
        if number == signal.SIGINT:
            signal.signal(number, self._previous[number])
            if distributed.joined():
                os.kill(os.getpid(), signal.SIGTERM)

    def reached(self, step: int) -> bool:
        """Whether to stop after this step; all processes must ask after each step, and get the same answer."""
        if not distributed.joined():
            return self._asked
        from jax.experimental import multihost_utils

        return multihost_utils.reached_preemption_sync_point(step)


class Watchdog:
    """Ends the process, telling what every thread was doing, when no work was reported for `seconds` (0: never).

    A context manager. The time counts from the first report, so that the first step may compile for as long as it
    takes; later compilations, saves and samples must fit in.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._last: tuple[float, str] | None = None
        self._closed = threading.Event()

    def __enter__(self) -> "Watchdog":
        if self._seconds:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._closed.set()
        if self._seconds:
            faulthandler.cancel_dump_traceback_later()

    def report(self, what: str) -> None:
        """A piece of work is done."""
        if self._seconds:
            self._last = time.monotonic(), what
            # A thread of Python stands still in a hang that holds the interpreter's lock; this one is C's.
            faulthandler.dump_traceback_later(self._seconds + GRACE_SECONDS, exit=True)

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._seconds / 4)):
            if self._last is not None and time.monotonic() - self._last[0] > self._seconds:
                self._end(self._last[1])

    def _end(self, what: str) -> None:
        who = distributed.label()
        print(
            f"error{who}: hung: nothing was done for train.watchdog_seconds={self._seconds:g} after {what}. What each "
            "thread was doing follows; the same command resumes from the newest checkpoint",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(all_threads=True)
        os._exit(distributed.HUNG)


__all__ = ["StopRequest", "Watchdog"]
