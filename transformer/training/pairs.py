"""Pairs of a source and a target text, from files or made, and their split into training and validation."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from transformer.settings import Data, SettingsError, check
from transformer.training import corpus
from transformer.training.tasks import TASKS, Task

Pair = tuple[str, str]


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
        task = _read(data.paths, data.direction)
        hashes = _hashes(task)
    else:
        task = TASKS[data.source]
        hashes = _task_hashes(data.source)
    held_out = hashes < np.uint64(min(int(data.validation_fraction * 2**64), 2**64 - 1))
    train, validation = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    side = "validation" if len(train) else "training"
    remedy = f"no {side} pair among {len(hashes)}; change the fraction or add pairs to data.paths"
    check(bool(len(train)) and bool(len(validation)), "data.validation_fraction", data.validation_fraction, remedy)
    validation = validation[np.argsort(hashes[validation], kind="stable")]
    return Pairs(task, train, data.direction), Pairs(task, validation, data.direction)


def _hashes(task: Task) -> np.ndarray:
    return np.fromiter((corpus.content_hash(task.key(n)) for n in range(task.groups)), np.uint64, task.groups)


@functools.cache
def _task_hashes(name: str) -> np.ndarray:
    return _hashes(TASKS[name])


def _read(paths: Sequence[str], direction: str) -> Task:
    """The pairs of the .tsv and .jsonl files that `paths` (names or globs) match, each once."""
    found = dict.fromkeys(pair for name in corpus.files(paths) for pair in _pairs_of(name))
    listed = list(found)
    if not listed:
        raise SettingsError(f"data.paths={tuple(paths)!r}: the files hold no pairs; give files with pairs in them")
    asked = 1 if direction == "backward" else 0
    return Task(len(listed), 1, lambda n: listed[n][asked], lambda n, _: listed[n])


def _pairs_of(name: str) -> list[Pair]:
    parse = {".tsv": _tsv, ".jsonl": _jsonl}.get(Path(name).suffix)
    if parse is None:
        raise SettingsError(f"data.paths: {name} is neither .tsv nor .jsonl; use one of these")
    found = []
    for number, line in enumerate(corpus.read(name).split("\n"), start=1):
        if line.strip():
            pair = parse(line.removesuffix("\r"))
            if pair is None or not all(text.strip() for text in pair):
                expected = "source<tab>target" if parse is _tsv else '{"source": "…", "target": "…"}'
                raise SettingsError(f"data.paths: {name}, line {number}: expected {expected}, neither of them empty")
            found.append(pair)
    return found


def _tsv(line: str) -> Pair | None:
    fields = tuple(line.split("\t"))
    return fields if len(fields) == 2 else None


def _jsonl(line: str) -> Pair | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    pair = (values.get("source"), values.get("target")) if isinstance(values, dict) else (None, None)
    return pair if all(isinstance(text, str) for text in pair) else None
