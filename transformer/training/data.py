"""Documents or pairs to batches: a grain pipeline of packed rows whose state restores exactly.

A batch is a dict of arrays, B its rows: in a run of several processes, those that this one's devices hold. Of the side
that the head scores, [B, T]:

  tokens        int32    what the model reads
  targets       int32    what it is to say at each
  target_bytes  int32    UTF-8 bytes that a scored target accounts for; 0 for special tokens
  segment_ids   int32    1, 2, … per row, an example (or what is left of it) each; 0 = padding
  positions     int32    from 0 in each segment; -1 = padding
  weights       float32  1 where the target is scored; 0 elsewhere and in padding
  orders        int32    of prefix models: a key of the segment is visible if its order is at most the query's

and, where there are an encoder and a decoder, of what the encoder reads, [B, S]: `source_tokens`, `source_positions`
and `source_segment_ids`, whose segment k belongs to segment k of the other side.
"""

import logging
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from transformer.settings import PAIR_SOURCES, Data, check
from transformer.tokenizer import Tokenizer
from transformer.training import corpus, mixture, packing, pairs
from transformer.training.examples import COLUMNS, Shape
from transformer.training.mixture import Part, Turns
from transformer.training.objectives import Objective, make_objective

Batch = dict[str, np.ndarray]
log = logging.getLogger("transformer")

# A document fills many consecutive rows; shuffling rows within about so many tokens spreads it over batches.
WINDOW_TOKENS = 2**18
PREFETCH_BATCHES = 4
LOOKED_AT = 10_000  # pairs by which it is told how many don't fit


def train_iterator(
    data: Data, tokenizer: Tokenizer, shape: Shape, rows: Sequence[int] | None = None
) -> grain.DatasetIterator[Batch]:
    """Training batches [B, T], or of the given `rows` of them, reshuffled each epoch, by a background thread.

    They have no end but where every component of a mixture has its epochs.

    `get_state()` is plain JSON, the same in every process and for any number of `data.workers`; after `set_state` the
    next batches are bit-identical.
    Every process packs all rows and keeps those that its devices hold, so the sequence of global batches is a function
    of `data` alone: a run goes on with the same examples on another number of processes and on another mesh.

    Raises:
      SettingsError: the texts can't be read or split, or the objective doesn't fit the model or the tokenizer.
    """
    mine = _rows_held(data, rows)
    objective = make_objective(data, tokenizer, shape)
    parts = parts_of(data)
    for part in parts:
        packing.check_usable(part.items, objective)
        if data.objective == "pairs" and log.isEnabledFor(logging.WARNING):
            report_dropped(objective, part.items)
    if len(parts) > 1 or parts[0].epochs:
        names = [f"data.mixture[{i}] ({' '.join(c.paths) or c.source})" for i, c in enumerate(data.components)]
        log.info("data: %s", "; ".join(mixture.told(parts, names)))
    # Grain adds the epoch to the seed: plain consecutive seeds would share their epochs.
    seeds = [int(word) >> 1 for word in np.random.SeedSequence(data.seed).generate_state(2 + len(parts))]
    texts = mixture.in_order(parts, [seeds[0], *seeds[3:]])
    packed = grain.experimental.WindowShuffleIterDataset(
        packing.pack(texts, objective, seeds[2], data.workers), window_size=_window_rows(data), seed=seeds[1]
    )
    batches = packed.batch(data.batch_size, drop_remainder=True).map(lambda batch: _batch(batch, mine))
    return iter(grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=PREFETCH_BATCHES))


def validation_batches(
    data: Data, tokenizer: Tokenizer, shape: Shape, num_batches: int, rows: Sequence[int] | None = None
) -> list[Batch]:
    """At most `num_batches` (and at least one) batches [B, T], or of the given `rows` of each, the same at every call.

    Where there are more rows than asked for, they are taken evenly spaced from the first of a fixed random order of
    the texts. The last batch is filled up with rows of padding; all processes get the same number of batches.

    Raises:
      SettingsError: as `train_iterator`.
    """
    mine = _rows_held(data, rows)
    check(num_batches >= 1, "train.eval_batches", num_batches, "use at least 1")
    objective = make_objective(data, tokenizer, shape)
    items = held_out(data)
    packing.check_usable(items, objective)
    wanted = num_batches * data.batch_size
    packed = []
    for row in packing.pack(grain.MapDataset.source(items), objective):
        packed.append(row)
        if len(packed) >= max(wanted, _window_rows(data)):
            break
    if len(packed) > wanted:
        packed = [packed[i * len(packed) // wanted] for i in range(wanted)]
    padding = packing.empty_row(packed[0])
    packed += [padding] * (-len(packed) % data.batch_size)
    groups = [packed[i : i + data.batch_size] for i in range(0, len(packed), data.batch_size)]
    return [_batch({name: np.stack([row[name] for row in group]) for name in padding}, mine) for group in groups]


def parts_of(data: Data) -> list[Part]:
    """What is trained on, of each component.

    Raises:
      SettingsError: it can't be read, or one side is empty.
    """
    trained = [_sides(component)[0] for component in data.components]
    if data.source != "mixture":
        return [Part(trained[0])]
    return [Part(items, part.weight, part.epochs) for items, part in zip(trained, data.mixture, strict=True)]


def held_out(data: Data) -> Sequence[Any]:
    """The documents or pairs to validate on, those of all components together, in a fixed random order.

    Raises:
      SettingsError: they can't be read, or one side is empty.
    """
    each = [_sides(component)[1] for component in data.components]
    if len(each) == 1:
        return each[0]
    lengths = [len(items) for items in each]  # which take turns in proportion, each in its own random order
    return grain.MapDataset.select_from_datasets(
        [grain.MapDataset.source(items) for items in each], Turns(lengths, lengths)
    )


def _sides(data: Data) -> tuple[Sequence[Any], Sequence[Any]]:
    """Those to train on, and those to validate on in a fixed random order."""
    if data.source in PAIR_SOURCES:
        return pairs.sides(data)
    documents, validation = corpus.split(corpus.load(data), data.validation_fraction)
    return documents, validation.select(np.argsort(validation.hashes, kind="stable"))


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises `SettingsError` unless a model with `vocab_size` embeddings can read every id of `tokenizer`."""
    check(
        tokenizer.vocab_size <= vocab_size,
        "model.vocab_size",
        vocab_size,
        f"data.tokenizer has ids up to {tokenizer.vocab_size - 1}; use model.vocab_size={tokenizer.vocab_size} "
        "or more, or a data.tokenizer with fewer tokens",
    )


def report_dropped(objective: Objective, items: Sequence[Any]) -> None:
    """Logs in one line how many pairs, of all or of some evenly spaced ones, are too long to give an example."""
    step = -(-len(items) // LOOKED_AT)
    looked_at = [items[i] for i in range(0, len(items), step)]
    dropped = sum(not objective.pieces(item) for item in looked_at)
    if dropped:
        lengths = " and ".join(map(str, objective.lengths.values()))
        which = "pairs" if step == 1 else f"pairs looked at (of {len(items):,})"
        log.warning(
            "data: %d of %d %s don't fit into rows of %s tokens and are left out",
            dropped,
            len(looked_at),
            which,
            lengths,
        )


def _batch(rows: Batch, mine: np.ndarray) -> Batch:
    """The batch of the rows `mine` out of packed rows [B, T, …]."""
    rows = {name: value[mine] for name, value in rows.items()}
    columns, segment_ids = rows["columns"], rows["columns_segment_ids"]
    real = segment_ids > 0
    batch = {name: np.ascontiguousarray(columns[..., i]) for i, name in enumerate(COLUMNS[: columns.shape[-1]])}
    batch |= {
        "segment_ids": segment_ids,
        "positions": np.where(real, rows["columns_positions"], -1).astype(np.int32),
        "weights": batch["weights"].astype(np.float32),
    }
    if "orders" in batch:
        batch["orders"] = np.where(real, batch["orders"], -1).astype(np.int32)
    if "source" in rows:
        source_ids = rows["source_segment_ids"]
        batch |= {
            "source_tokens": rows["source"],
            "source_segment_ids": source_ids,
            "source_positions": np.where(source_ids > 0, rows["source_positions"], -1).astype(np.int32),
        }
    return batch


def _rows_held(data: Data, rows: Sequence[int] | None) -> np.ndarray:
    return np.arange(data.batch_size) if rows is None else np.asarray(rows)


def _window_rows(data: Data) -> int:
    # Pairs are small, and already in random order.
    return 2 * data.batch_size if data.objective == "pairs" else max(2 * data.batch_size, WINDOW_TOKENS // data.seq_len)
