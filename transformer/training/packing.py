"""From texts in an order to packed rows: a grain pipeline whose state is plain JSON and restores exactly."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import grain
import numpy as np
from absl import flags

from transformer.settings import SettingsError
from transformer.training.examples import Example
from transformer.training.objectives import Causal, Objective

BINS = 64  # rows that are filled at a time where no example may be split
CHUNK = 16  # texts that are cut at a time: what processes send each other, and what a restored state cuts again
AHEAD = 4  # chunks that each process makes ahead
GRACE_SECONDS = 60  # for which a process that is told to end goes on


def check_usable(items: Sequence[Any], objective: Objective) -> None:
    """Raises `SettingsError` where no item gives an example."""
    if not any(objective.pieces(items[i]) for i in range(len(items))):
        lengths = objective.lengths
        rows = f"data.seq_len={lengths.get('source', lengths['columns'])}"
        if "source" in lengths:  # of two sides, either may be what is too short
            rows += f", data.target_len={lengths['columns']}"
        raise SettingsError(
            f"{rows}: none of {len(items)} texts gives an example: each is one "
            "token, or longer than a row; use other texts, longer rows or a tokenizer with bos or eos"
        )


def pack(
    texts: grain.MapDataset[Any], objective: Objective, seed: int = 0, workers: int = 0
) -> grain.IterDataset[Example]:
    """Rows of the objective's `lengths`: each array of its examples, "NAME_segment_ids" and "NAME_positions".

    Causal rows have no gap but in the last; elsewhere no example is split.

    Args:
      texts: documents or pairs, in the order in which they are packed.
      seed: of what the objective draws, anew for each example.
      workers: processes that read texts and cut them; rows and states are the same for any number of them.
    """
    cut = texts.batch(CHUNK, batch_fn=list).map(_Pieces(objective))
    pieces = grain.experimental.FlatMapIterDataset(_Ordered(cut, workers), _Flat())
    examples = pieces.random_map(objective.example, seed=seed)
    if isinstance(objective, Causal):
        return _JsonState(grain.experimental.ConcatThenSplitIterDataset(examples, length_struct=objective.lengths))
    return grain.experimental.FirstFitPackIterDataset(
        examples, length_struct=objective.lengths, num_packing_bins=BINS, shuffle_bins=False
    )


class _Pieces:
    """The objective's cut of a chunk of texts."""

    def __init__(self, objective: Objective):
        self._objective = objective

    def __call__(self, texts: Iterable[Any]) -> list[Any]:
        return [piece for text in texts for piece in self._objective.pieces(text)]


class _Flat(grain.experimental.FlatMapTransform):
    """The pieces of a chunk, one by one."""

    max_fan_out = 2**31

    def flat_map(self, element: list[Any]) -> list[Any]:
        return element


class _Ordered(grain.IterDataset[Any]):
    """The elements of a dataset in its order, whatever number of processes makes them."""

    def __init__(self, source: grain.MapDataset[Any], workers: int):
        super().__init__()
        self._source, self._workers = source, workers

    def __iter__(self) -> grain.DatasetIterator[Any]:
        return _OrderedIterator(self._source, self._workers)


class _OrderedIterator(grain.DatasetIterator[Any]):
    """Takes turns among processes, each of which makes every `workers`-th element. Its state is how many were taken.

    (Grain's own interleaving has states of its workers each, which fit no other number of them.)
    """

    def __init__(self, source: grain.MapDataset[Any], workers: int):
        super().__init__()
        self._source, self._workers, self._index = source, workers, 0
        self._makers: list[grain.DatasetIterator[Any]] = []
        self._first = 0  # the index of the first maker's first element

    def __next__(self) -> Any:
        if self._index >= len(self._source):
            raise StopIteration
        if self._workers:
            self._start()
            element = next(self._makers[(self._index - self._first) % self._workers])
        else:
            element = self._source[self._index]
        self._index += 1
        return element

    def get_state(self) -> dict[str, Any]:
        return {"next_index": self._index}

    def set_state(self, state: dict[str, Any]) -> None:
        self._stop()
        self._index = state["next_index"]

    def close(self) -> None:
        super().close()
        self._stop()

    def _start(self) -> None:
        if self._makers:
            return
        self._first = self._index
        if not flags.FLAGS.is_parsed():  # grain asks absl for flags that nobody gives on our command lines
            flags.FLAGS.mark_as_parsed()
        one = grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=AHEAD)
        # Text is tokenised where it is used: threads that read ahead in the process would only contend.
        reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        # Pieces are small and many: a block of shared memory for each costs more than it saves.
        options = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
        for worker in range(self._workers):
            share = self._source[self._index + worker :: self._workers]
            made = grain.experimental.WithOptionsIterDataset(share.to_iter_dataset(reading), options)
            self._makers.append(iter(made.mp_prefetch(one, _in_worker)))
        for maker in self._makers:
            maker.get_state()  # makes the iterator that is started, so that all processes start at once
            maker.start_prefetch()

    def _stop(self) -> None:
        for maker in self._makers:
            maker.close()
        self._makers = []


def _in_worker(index: int, count: int) -> None:
    """A signal to all processes of a job is for the one that trains, which may need batches until it has saved.

    None outlives it, however it ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_later)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_later(*_: Any) -> None:
    timer = threading.Timer(GRACE_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


class _JsonState(grain.IterDataset[Any]):
    """Passes rows through; lets the state of ConcatThenSplit survive JSON."""

    def __iter__(self) -> grain.DatasetIterator[Any]:
        return _JsonStateIterator(self._parent.__iter__())


class _JsonStateIterator(grain.DatasetIterator[Any]):
    def __next__(self) -> Any:
        return next(self._parent)

    def get_state(self) -> dict[str, Any]:
        return _with_slices(self._parent.get_state(), list)

    def set_state(self, state: dict[str, Any]) -> None:
        # The packer compares slices with the tuple (-1, -1). JSON, in which checkpoints store states, makes lists of
        # tuples; the packer then takes "no remainder" for an empty remainder and drops a document.
        self._parent.set_state(_with_slices(state, tuple))


def _with_slices(state: dict[str, Any], kind: type) -> dict[str, Any]:
    return {**state, "remainder_slices": {name: kind(ends) for name, ends in state["remainder_slices"].items()}}


def empty_row(row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A row of padding, beside others like `row`."""
    return {name: np.zeros_like(value) for name, value in row.items()}
