"""Where the time of a run goes: how much of it JAX compiled, and when the first text was there."""

import time

import jax

# What JAX reports as spent on making a program (jax/_src/dispatch.py).
STAGES = tuple(
    f"/jax/core/compile/{stage}"
    for stage in ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", "backend_compile_duration")
)


class Meter:
    """Measures from its making to `stop`, in seconds.

    Attributes:
      programs: how many were compiled.
      first: when `mark` was first called; None before.
      seconds: all of it, once stopped.
    """

    def __init__(self):
        self.programs, self.first, self.seconds = 0, None, 0.0
        self._spans: list[tuple[float, float]] = []
        self._begin = time.time()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def __enter__(self) -> "Meter":
        return self

    def __exit__(self, *_) -> None:
        self.seconds = time.time() - self._begin
        jax.monitoring.unregister_event_duration_listener(self._listen)

    @property
    def compiling(self) -> float:
        """Seconds that tracing, lowering and compiling took."""
        return sum(end - start for start, end in self._spans)

    def mark(self) -> None:
        """The first text is there."""
        if self.first is None:
            self.first = time.time() - self._begin

    def speed(self, count: int) -> float:
        """How many of `count` a second, compilation left out."""
        return count / max(self.seconds - self.compiling, 1e-9)

    def report(self, tokens: int, prompts: int | None = None) -> str:
        """One line: how long it took, what of it was compilation, and the speed apart from that."""
        counts = {"tokens": tokens} if prompts is None else {"prompts": prompts, "tokens": tokens}
        what = "text" if prompts is None else "batch"
        done = ", ".join(f"{count} {name}" for name, count in counts.items())
        first = "" if self.first is None else f"first {what} after {self.first:.2f} s, "
        made = f"{self.compiling:.2f} s of compilation" if self.programs else "nothing compiled"
        speeds = " and ".join(f"{self.speed(count):.1f} {name}/s" for name, count in counts.items())
        return f"{done} in {self.seconds:.2f} s: {first}{made}, {speeds}{' without it' if self.programs else ''}"

    def _listen(self, event: str, duration: float, **_) -> None:
        if event not in STAGES:
            return
        self.programs += event == STAGES[-1]
        start = max(time.time() - duration, self._begin)
        # A program traced within another one is part of its time.
        while self._spans and self._spans[-1][0] >= start:
            self._spans.pop()
        self._spans.append((start, time.time()))
