"""Two plans side by side: of two configs, or of one at two revisions of this repository."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformer.planning.chips import GIB
from transformer.planning.report import Report, from_json
from transformer.settings import SettingsError


@dataclass(frozen=True)
class Row:
    """A figure of both plans, in `unit`; None where a plan has none."""

    name: str
    unit: str
    a: float | None
    b: float | None

    @property
    def change(self) -> float | None:
        """Of b from a, as a part of a; None where there is nothing to compare."""
        return self.b / self.a - 1 if self.a and self.b is not None else None


def compare(a: Report, b: Report) -> tuple[Row, ...]:
    """Memory, FLOPs, bytes, collectives and time of two plans; rows that are empty in both are left out."""
    return tuple(row for row in _rows(a, b) if row.a or row.b)


def _rows(a: Report, b: Report) -> Iterator[Row]:
    def gib(name: str, one: float | None, other: float | None) -> Row:
        return Row(name, "GiB", None if one is None else one / GIB, None if other is None else other / GIB)

    def scaled(name: str, unit: str, by: float, one: float | None, other: float | None) -> Row:
        return Row(name, unit, None if one is None else one / by, None if other is None else other / by)

    one, other = a.memory, b.memory
    yield gib("memory needed", one.needed, other.needed)
    yield gib("memory offered", one.offered, other.offered)
    for name in ("parameters", "optimizer", "gradients", "cache", "buffers"):
        yield gib(name, getattr(one.parts, name), getattr(other.parts, name))
    for name in _union(one.parts.activations, other.parts.activations):
        yield gib(f"activations, {name}", *(m.parts.activations.get(name) for m in (one, other)))
    for name, form in (("compiled", "compiled products"), ("program", "products of the program")):
        yield scaled(form, "TFLOP", 1e12, getattr(a.flops, name), getattr(b.flops, name))
    for name in _union(a.flops.kernels, b.flops.kernels):
        yield scaled(f"kernel {name}", "TFLOP", 1e12, *(r.flops.kernels.get(name) for r in (a, b)))
    yield scaled("products of the model", "TFLOP", 1e12, *(sum(r.flops.model.values()) for r in (a, b)))
    yield scaled("bytes of HBM", "GB", 1e9, a.bytes.hbm, b.bytes.hbm)
    yield scaled("bytes of HBM, at least", "GB", 1e9, a.bytes.minimal, b.bytes.minimal)
    sent = [_sent(a), _sent(b)]
    for name in _union(*sent):
        yield scaled(f"sent by {name}", "GB", 1e9, *(by.get(name) for by in sent))
    for name in _union(a.estimate.terms, b.estimate.terms):
        yield scaled(f"estimated {name}", "ms", 1e-3, *(r.estimate.terms.get(name) for r in (a, b)))
    yield scaled("estimated step", "ms", 1e-3, a.estimate.step, b.estimate.step)
    yield Row("estimated tokens/s", "", a.estimate.tokens_per_second, b.estimate.tokens_per_second)
    yield scaled("estimated MFU", "%", 1e-2, a.estimate.mfu, b.estimate.mfu)
    if a.request.tokens or b.request.tokens:
        days = [r.estimate.days(r.request.tokens) if r.request.tokens else None for r in (a, b)]
        yield Row("estimated days of its tokens", "days", *days)
        hours = (d and d * 24 * r.request.chips for d, r in zip(days, (a, b), strict=True))
        yield Row("estimated chip-hours", "h", *hours)


def caution(a: Report, b: Report) -> str | None:
    """What to know of two plans before they are compared: that one alone was compiled, that their steps differ."""
    said = []
    if (a.compile is None) != (b.compile is None):
        first, second = ("compiled", "by analysis") if b.compile is None else ("by analysis", "compiled")
        said.append(f"the first plan is {first}, the second {second}: what made the figures may be what differs")
    one, other = (f"{r.request.rows:,} x {r.request.length:,} tokens" for r in (a, b))
    if one != other:
        said.append(f"a step of the first plan is {one}, of the second {other}")
    return "; ".join(said) or None


def _union(one: dict, other: dict) -> list[str]:
    """Keys of both, in the order in which they come."""
    return [*dict.fromkeys([*one, *other])]


def _sent(report: Report) -> dict[str, float]:
    totals: dict[str, float] = {}
    for e in report.exchanges:
        along = " × ".join(e.axes) if e.axes else "no axis"
        name = f"{e.kind} along {along}{', overlapped' if e.overlapped else ''}"
        totals[name] = totals.get(name, 0.0) + e.sent
    return totals


def at_revision(revision: str, arguments: Sequence[str], repository: Path) -> Report:
    """What `python -m transformer.plan` with these arguments finds at a revision, checked out for the time it takes.

    Args:
      arguments: without `--json`; a config page's path is of that revision.

    Raises:
      SettingsError: there is no such revision, or its command failed; with its last words.
    """
    with tempfile.TemporaryDirectory() as folder:
        tree, out = Path(folder) / "tree", Path(folder) / "report.json"
        _git(repository, revision, "worktree", "add", "--quiet", "--detach", str(tree), revision)
        try:
            path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
            command = [sys.executable, "-m", "transformer.plan", *arguments, "--json", str(out)]
            done = subprocess.run(
                command, cwd=tree, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
            )
            if not out.exists():
                words = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
                raise SettingsError(
                    f"revision {revision!r}: transformer.plan ended with {done.returncode}: {''.join(words)}"
                )
            return from_json(out.read_text())
        finally:
            _git(repository, revision, "worktree", "remove", "--force", str(tree))


def _git(repository: Path, revision: str, *arguments: str) -> None:
    done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SettingsError(
            f"revision {revision!r}: {done.stderr.strip().splitlines()[-1]}; use a commit, branch or tag"
        )
