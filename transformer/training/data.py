"""Documents to batches: a grain pipeline of packed rows whose state restores exactly.

A batch is a dict of arrays [B, T], B the rows of this process:

  tokens        int32    what the model reads
  targets       int32    the token that follows in the same document
  target_bytes  int32    UTF-8 bytes that the target accounts for; 0 for special tokens
  segment_ids   int32    1, 2, … per row, a document (or what is left of it) each; 0 = padding
  positions     int32    from 0 in each segment; -1 = padding
  weights       float32  1 where there is a target; 0 = padding
"""

from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from transformer.settings import Data, SettingsError, check
from transformer.tokenizer import Tokenizer
from transformer.training import corpus

Batch = dict[str, np.ndarray]

# A document fills many consecutive rows; shuffling rows within about so many tokens spreads it over batches.
WINDOW_TOKENS = 2**18
PREFETCH_BATCHES = 4
_COLUMNS = ("tokens", "targets", "target_bytes")


def train_iterator(
    data: Data, tokenizer: Tokenizer, process_index: int = 0, process_count: int = 1
) -> grain.DatasetIterator[Batch]:
    """Endless training batches [B / process_count, T], reshuffled each epoch, by a background thread.

    `get_state()` is plain JSON, the same in every process; after `set_state` the next batches are bit-identical.
    Every process packs all rows and keeps its own, so the global batch does not depend on `process_count`.

    Raises:
      SettingsError: the corpus can't be read or split, or the batch does not divide over the processes.
    """
    mine = _local_rows(data, process_index, process_count)
    check(data.seed >= 0, "data.seed", data.seed, "use 0 or more")
    documents, _ = corpus.split(corpus.load(data), data.validation_fraction)
    # Grain adds the epoch to the seed: plain consecutive seeds would share their epochs.
    order_seed, window_seed = (int(word) >> 1 for word in np.random.SeedSequence(data.seed).generate_state(2))
    rows = grain.experimental.WindowShuffleIterDataset(
        pack(documents, tokenizer, data.seq_len, order_seed), window_size=_window_rows(data), seed=window_seed
    )
    batches = rows.batch(data.batch_size, drop_remainder=True).map(lambda rows: _batch(rows, mine))
    return iter(grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=PREFETCH_BATCHES))


def validation_batches(
    data: Data, tokenizer: Tokenizer, num_batches: int, process_index: int = 0, process_count: int = 1
) -> list[Batch]:
    """At most `num_batches` (and at least one) batches [B / process_count, T], the same at every call.

    Where there are more rows than asked for, they are taken evenly spaced from the first of a fixed random order of
    the documents. The last batch is filled up with rows of padding; all processes get the same number of batches.

    Raises:
      SettingsError: the corpus can't be read or split, or the batch does not divide over the processes.
    """
    mine = _local_rows(data, process_index, process_count)
    check(num_batches >= 1, "train.eval_batches", num_batches, "use at least 1")
    _, documents = corpus.split(corpus.load(data), data.validation_fraction)
    documents = sorted(documents, key=corpus.content_hash)
    wanted = num_batches * data.batch_size
    rows = []
    for row in pack(documents, tokenizer, data.seq_len):
        rows.append(row)
        if len(rows) >= max(wanted, _window_rows(data)):
            break
    if len(rows) > wanted:
        rows = [rows[i * len(rows) // wanted] for i in range(wanted)]
    padding = {name: np.zeros_like(value) for name, value in rows[0].items()}
    rows += [padding] * (-len(rows) % data.batch_size)
    groups = [rows[i : i + data.batch_size] for i in range(0, len(rows), data.batch_size)]
    return [_batch({name: np.stack([row[name] for row in group]) for name in padding}, mine) for group in groups]


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises `SettingsError` unless a model with `vocab_size` embeddings can read every id of `tokenizer`."""
    check(
        tokenizer.vocab_size <= vocab_size,
        "model.vocab_size",
        vocab_size,
        f"data.tokenizer has ids up to {tokenizer.vocab_size - 1}; use model.vocab_size={tokenizer.vocab_size} "
        "or more, or a data.tokenizer with fewer tokens",
    )


def record(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """One document as int32 [L, 3]: token, target and target's bytes; bos and eos are added if there are such."""
    ids, num_bytes = tokenizer.encode_with_bytes(text)
    before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    after = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    ids = np.concatenate([before, ids, after]).astype(np.int32)
    num_bytes = np.concatenate([[0] * len(before), num_bytes, [0] * len(after)]).astype(np.int32)
    return np.stack([ids[:-1], ids[1:], num_bytes[1:]], axis=1)


def pack(
    documents: Sequence[str], tokenizer: Tokenizer, seq_len: int, shuffle_seed: int | None = None
) -> grain.IterDataset[Batch]:
    """Rows without a gap: {"columns": [T, 3], "columns_segment_ids": [T], "columns_positions": [T]}.

    Without `shuffle_seed` one pass over `documents` in order, the last row padded; else an endless one, reshuffled
    each epoch.

    Raises:
      SettingsError: no document has two tokens, so there is nothing to predict.
    """
    if not any(len(record(text, tokenizer)) for text in documents):
        raise SettingsError("data: every document is a single token; use longer texts or a tokenizer with bos or eos")
    source = grain.MapDataset.source(documents)
    if shuffle_seed is not None:
        source = source.shuffle(seed=shuffle_seed).repeat()
    records = source.map(lambda text: {"columns": record(text, tokenizer)}).filter(lambda r: len(r["columns"]) > 0)
    # Text is in memory and tokenised where it is used: threads that read ahead would only contend.
    stream = records.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    return _JsonState(grain.experimental.ConcatThenSplitIterDataset(stream, length_struct={"columns": seq_len}))


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


def _batch(rows: Batch, mine: slice) -> Batch:
    """The batch of the rows `mine` out of packed rows [B, T, …]."""
    rows = {name: value[mine] for name, value in rows.items()}
    segment_ids = rows["columns_segment_ids"]
    real = segment_ids > 0
    batch = {name: np.ascontiguousarray(rows["columns"][..., i]) for i, name in enumerate(_COLUMNS)}
    return batch | {
        "segment_ids": segment_ids,
        "positions": np.where(real, rows["columns_positions"], -1).astype(np.int32),
        "weights": real.astype(np.float32),
    }


def _local_rows(data: Data, process_index: int, process_count: int) -> slice:
    check(
        data.batch_size % process_count == 0, "data.batch_size", data.batch_size,
        f"must be a multiple of the {process_count} processes",
    )  # fmt: skip
    check(0 <= process_index < process_count, "process_index", process_index, f"must be in [0, {process_count})")
    rows = data.batch_size // process_count
    return slice(process_index * rows, (process_index + 1) * rows)


def _window_rows(data: Data) -> int:
    return max(2 * data.batch_size, WINDOW_TOKENS // data.seq_len)
