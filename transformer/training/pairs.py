"""Pairs of a source and a target text, from files or made, and their split into training and validation."""

import functools
import logging
from collections.abc import Sequence
from typing import Literal

import numpy as np

from transformer.settings import Data, SettingsError, check
from transformer.training import corpus, files
from transformer.training.files import Bad
from transformer.training.indexes import content_hash
from transformer.training.tasks import TASKS, Task

Pair = tuple[str, str]
log = logging.getLogger("transformer")


class Pairs(Sequence[Pair]):
    """Some groups of a task, made when asked for.

    Args:
      groups: which, in this order.
      direction: "backward" swaps source and target, "both" has each pair in either direction.
    """

    def __init__(self, task: Task, groups: np.ndarray, direction: str):
        self._task, self._groups = task, groups
        self._swaps = {"forward": (False,), "backward": (True,), "both": (False, True)}[direction]

    def __len__(self) -> int:
        return len(self._groups) * self._task.members * len(self._swaps)

    def __getitem__(self, index: int) -> Pair:
        if not 0 <= index < len(self):
            raise IndexError(index)
        rest, swap = divmod(int(index), len(self._swaps))
        group, member = divmod(rest, self._task.members)
        source, target = self._task.pair(int(self._groups[group]), member)
        return (target, source) if self._swaps[swap] else (source, target)


def pairs(data: Data, split: Literal["train", "validation"]) -> list[Pair]:
    """The (source, target) texts of one side, validation in a fixed random order.

    Raises:
      SettingsError: the files can't be read, or one side is empty.
    """
    return list(sides(data)[("train", "validation").index(split)])


def sides(data: Data) -> tuple[Sequence[Pair], Sequence[Pair]]:
    """Training and validation pairs, validation in a fixed random order.

    A pair's side depends on what it asks (dates: on the day) and the fraction only, so that no source that is asked in
    validation is trained on.

    Raises:
      SettingsError: the files can't be read, or one side is empty.
    """
    if data.source == "pairs":
        task = _read(files.stamped(data.paths), data.paths, data.direction, data.on_bad)
        hashes = _hashes(task)
    else:
        task = TASKS[data.source]
        hashes = _task_hashes(data.source)
    held_out = corpus.is_held_out(hashes, data.validation_fraction)
    train, validation = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    side = "validation" if len(train) else "training"
    remedy = f"no {side} pair among {len(hashes)}; change the fraction or add pairs to data.paths"
    check(bool(len(train)) and bool(len(validation)), "data.validation_fraction", data.validation_fraction, remedy)
    validation = validation[np.argsort(hashes[validation], kind="stable")]
    return Pairs(task, train, data.direction), Pairs(task, validation, data.direction)


def _hashes(task: Task) -> np.ndarray:
    return np.fromiter((content_hash(task.key(n)) for n in range(task.groups)), np.uint64, task.groups)


@functools.cache
def _task_hashes(name: str) -> np.ndarray:
    return _hashes(TASKS[name])


@functools.lru_cache(maxsize=8)
def _read(stamps: tuple, paths: tuple[str, ...], direction: str, on_bad: str) -> Task:
    """The pairs of files, each once."""
    bad, found = Bad(on_bad), {}
    for name, *_ in stamps:
        kind = files.kind_of(name)[0]
        if kind == "text":
            remedy = "use .tsv, .jsonl, .parquet or .arrayrecord"
            raise SettingsError(f"data.paths: {name} is of no format that holds pairs; {remedy}")
        for row in files.rows(name, ("source", "target"), bad):
            if all(text.strip() for text in row.values):
                found[row.values] = None
            else:
                bad(name, row.place, "source or target is empty")
    listed = list(found)
    if not listed:
        why = f" ({bad.first})" if bad.first else ""
        raise SettingsError(f"data.paths={paths!r}: the files hold no pairs{why}; give files with pairs in them")
    if bad.count:
        log.warning("data: %d pairs; %d bad rows left out (the first: %s)", len(listed), bad.count, bad.first)
    asked = 1 if direction == "backward" else 0
    return Task(len(listed), 1, lambda n: listed[n][asked], lambda n, _: listed[n])
