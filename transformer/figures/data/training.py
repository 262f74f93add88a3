"""What a training run has reported so far."""

import json
from dataclasses import dataclass
from pathlib import Path

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


def curves(workdir: str | Path) -> Curves:
    """The curves of a run's workdir, of a run in progress too; empty where it has not reported yet."""
    path = Path(workdir) / FILE
    # What is being written may end in the middle of a line.
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    of = {kind: [(r["step"], r["loss"]) for r in records if r["kind"] == kind] for kind in ("train", "eval")}
    return Curves(*(column for kind in of.values() for column in (tuple(zip(*kind, strict=True)) or ((), ()))))
