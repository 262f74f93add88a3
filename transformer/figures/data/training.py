"""What a training run has reported so far."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Curves:
    """Losses in nats a token, each with the steps at which it was reported.

    Attributes:
      train: of the batches of a step.
      held_out: of the validation set.
    """

    train_steps: tuple[int, ...]
    train: tuple[float, ...]
    held_out_steps: tuple[int, ...]
    held_out: tuple[float, ...]


def read(workdir: str | Path) -> list[dict[str, Any]]:
    """The records of a run's workdir, of a run in progress too; none where it has not reported yet.

    Raises:
      ValueError: a line is no record.
    """
    path = Path(workdir) / FILE
    # What is being written may end in the middle of a line.
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [_record(line, f"{path}, line {i + 1}") for i, line in enumerate(lines) if line.endswith(b"\n")]


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:  # of JSON, or of UTF-8
        record = None
    if not (isinstance(record, dict) and {"step", "kind"} <= record.keys()):
        raise ValueError(f"{where}: damaged, no record of a step; delete the line")
    return record


def series(records: list[dict[str, Any]], kind: str, name: str) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """(steps, values) of those records of a kind that have a value of that name."""
    found = [(r["step"], r[name]) for r in records if r["kind"] == kind and name in r]
    return tuple(zip(*found, strict=True)) or ((), ())


def curves(workdir: str | Path) -> Curves:
    """The losses of a run's workdir, as `read`."""
    records = read(workdir)
    return Curves(*series(records, "train", "loss"), *series(records, "eval", "loss"))


def layers(records: list[dict[str, Any]], what: str) -> tuple[tuple[int, ...], tuple[str, ...], list[list[float]]]:
    """(steps, layers or parameters, their norms [layer][step]) of "gradient", "parameter" or "activation".

    A repeat of a stack's body counts as a line of its own, named PATH[repeat].
    """
    steps = tuple(r["step"] for r in records if r["kind"] == "norms")
    lines: dict[str, list[float]] = {}
    for record in (r for r in records if r["kind"] == "norms"):
        for name, value in record.items():
            if name.startswith(f"{what}/"):
                path, values = name.removeprefix(f"{what}/"), value if isinstance(value, list) else [value]
                for i, x in enumerate(values):
                    lines.setdefault(f"{path}[{i}]" if isinstance(value, list) else path, []).append(x)
    return steps, tuple(lines), list(lines.values())


def experts(records: list[dict[str, Any]], name: str, worst: Callable) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """(steps, the worst layer's value) of what is told of the experts: "violation", "dropped" or "entropy"."""

    def flat(value: Any) -> list[float]:
        return [x for item in value for x in flat(item)] if isinstance(value, list) else [value]

    steps, told = series(records, "train", "experts")
    return steps, tuple(worst(x for layer in every.values() for x in flat(layer[name])) for every in told)
