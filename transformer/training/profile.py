"""A window of steps that JAX's profiler records, for TensorBoard and Perfetto."""

from pathlib import Path

import jax

from transformer.settings import SettingsError


def parse_window(text: str) -> tuple[int, int]:
    """(first, last) of "steps=10:13".

    Raises:
      SettingsError: it is written otherwise, or no step is in it.
    """
    first, colon, last = text.removeprefix("steps=").partition(":")
    if not (text.startswith("steps=") and colon and first.isdecimal() and last.isdecimal()):
        raise SettingsError(f"--profile={text!r}: write steps=FIRST:LAST, such as steps=10:13")
    if not 1 <= int(first) <= int(last):
        raise SettingsError(f"--profile={text!r}: steps count from 1, and the last is none before the first")
    return int(first), int(last)


class Profiler:
    """Records the steps of a window into a folder, each process its own."""

    def __init__(self, window: tuple[int, int] | None, folder: Path):
        self._window, self.folder, self._running = window, folder, False

    def begin(self, step: int) -> None:
        """To be told before each step; the first of a run compiles, and isn't worth recording."""
        if self._window and not self._running and self._window[0] <= step <= self._window[1]:
            jax.profiler.start_trace(str(self.folder))
            self._running = True

    def end(self, step: int, result: jax.Array) -> bool:
        """To be told after each step, with something that it computes; True where a record is now complete."""
        if not (self._running and step >= self._window[1]):
            return False
        jax.block_until_ready(result)
        self.close()
        return True

    def close(self) -> None:
        """Ends a record that is under way."""
        if self._running:
            self._running, self._window = False, None
            jax.profiler.stop_trace()
