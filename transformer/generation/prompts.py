"""Prompts to arrays: checked, padded to a bucket of lengths, one seed a row."""

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transformer import axes as ax
from transformer import sharding
from transformer.nn.context import Source
from transformer.nn.model import Transformer
from transformer.settings import check
from transformer.spec import Model

# The shortest bucket, in tokens.
SHORTEST = 16


@dataclass(frozen=True)
class Batch:
    """Prompts ready for prefill; rows beyond the prompts are empty and fill up the mesh.

    Attributes:
      index: which prompt each row is.
      tokens: [B, P] padded on the right: the prompts; behind an encoder, how the decoder's texts begin.
      lengths: [B] tokens of each of them, 0 in a row that only fills up.
      seeds: [B, 3] uint32: the row's seed, a hash of its prompt, which of several equal prompts it is.
      capacity: positions that the cache must hold, rounded up to a bucket.
      source: the prompts, where an encoder reads them.
    """

    index: tuple[int, ...]
    tokens: np.ndarray
    lengths: np.ndarray
    seeds: np.ndarray
    capacity: int
    source: Source | None = None


def bucket(length: int) -> int:
    """The least of 16, 24, 32, 48, 64, 96 … that holds `length`: lengths within one share a compiled program."""
    size = SHORTEST
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def make_batches(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    seed: int | Sequence[int],
    size: int,
    chunk: int,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> list[Batch]:
    """Checks the prompts against the model and lays them out, `size` a batch, those of like lengths together.

    Raises:
      SettingsError: a model without a decoder, an empty prompt, an id outside the vocabulary, a prompt that leaves too
        little room in a learned position table, fewer than 1 new token, seeds that are no uint32 or not one a prompt,
        or prefixes that are not one a prompt or have no encoder before them.
    """
    check_writes(model.spec)
    check(max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "use at least 1")
    check(size >= 1, "batch_size", size, "use at least 1")
    check(chunk >= 1, "prefill_chunk", chunk, "use at least 1")
    vocab_size, limit = model.spec.vocab_size, model.spec.length_limit
    rows = [_row(f"prompts[{i}]", prompt, vocab_size) for i, prompt in enumerate(prompts)]
    begins = _begins(model, len(rows), prefixes)
    seeds = np.array(_seeds([row.tobytes() for row in rows], seed), np.uint32)
    written = begins or rows
    _check_room(limit, max(map(len, written)), max_new_tokens, "prefix" if begins else "prompt")
    longest = max(map(len, rows))
    room = f"the learned position table ends at {limit}; shorten the longest prompt"
    check(not begins or limit is None or longest <= limit, "prompts", f"{longest} tokens", room)
    # The longest first: what needs the most memory is known at once.
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i])) if len(rows) > size else list(range(len(rows)))
    parts = sharding.ways(ax.BATCH, model.compute.rules)
    height = -(-min(size, len(rows)) // parts) * parts
    batches = []
    for group in (order[i : i + size] for i in range(0, len(order), size)):
        tokens, lengths = _pad([written[i] for i in group], height, limit, chunk)
        source = None
        if begins:
            # An encoder reads all of a text at once.
            read, sizes = _pad([rows[i] for i in group], height, limit, chunk=longest)
            places = np.arange(read.shape[1], dtype=np.int32)
            source = Source(read, np.where(places < sizes[:, None], places, -1))
        capacity = _within(bucket(int(lengths.max()) + max_new_tokens), limit)
        padded = np.pad(seeds[group], ((0, height - len(group)), (0, 0)))
        batches.append(Batch(tuple(group), tokens, lengths, padded, capacity, source))
    return batches


def check_writes(model: Model) -> None:
    """Raises `SettingsError` for a model that writes no text."""
    remedy = "it reads in both directions and writes nothing; `generation.fill_mask` guesses hidden tokens"
    check(model.decoder is not None, "model", "an encoder alone", remedy)
    check(model.head is not None, "model", "a decoder without a head", "it has features and no tokens")


def check_alone(model: Model, what: str) -> None:
    """Raises `SettingsError` for a model with an encoder, in front of what only a decoder alone can do."""
    check(model.encoder is None, "model", "an encoder and a decoder", f"{what}; use a model of a decoder alone")


def _begins(model: Transformer, count: int, prefixes: Sequence[Sequence[int]] | None) -> list[np.ndarray] | None:
    """What the decoder's texts begin with behind an encoder; None without one."""
    start, vocab_size = model.spec.decoder_start, model.spec.vocab_size
    if model.spec.encoder is None:
        check(prefixes is None, "prefixes", prefixes, "a decoder alone goes on with its prompts; put them there")
        return None
    prefixes = [()] * count if prefixes is None else prefixes
    check(len(prefixes) == count, "prefixes", prefixes, f"use one for each of {count} prompts")
    return [_row(f"prefixes[{i}]", [start, *prefix], vocab_size) for i, prefix in enumerate(prefixes)]


def _check_room(limit: int | None, longest: int, max_new_tokens: int, what: str) -> None:
    if limit is not None:
        room = f"the learned position table ends at {limit}: with the longest {what} ({longest} tokens) at most"
        check(longest + max_new_tokens <= limit, "max_new_tokens", max_new_tokens, f"{room} {limit - longest} fit")


def _pad(rows: list[np.ndarray], height: int, limit: int | None, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [height, P] padded on the right, lengths [height])."""
    longest = max(map(len, rows))
    # More than one chunk is padded to whole ones, which are one program.
    padded = _within(bucket(longest), limit) if longest <= chunk else -(-longest // chunk) * chunk
    tokens = np.zeros((height, padded), np.int32)
    lengths = np.zeros(height, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
        lengths[i] = len(row)
    return tokens, lengths


def _within(length: int, limit: int | None) -> int:
    return length if limit is None else min(length, limit)


def _row(name: str, prompt: Sequence[int], vocab_size: int) -> np.ndarray:
    check(len(prompt) > 0, name, list(prompt), "has no tokens; start it with the beginning-of-text token")
    row = np.asarray(prompt)
    integers = row.ndim == 1 and np.issubdtype(row.dtype, np.integer)
    check(integers, name, prompt, "expected a sequence of token ids")
    for token in row[(row < 0) | (row >= vocab_size)][:1].tolist():
        check(False, name, token, f"token id outside the model's vocabulary of {vocab_size}")
    return row.astype(np.int32)


def _seeds(rows: list[bytes], seed: int | Sequence[int]) -> list[tuple[int, int, int]]:
    """What a row draws depends on its seed and its prompt, never on its place in the batch or on other prompts."""
    shared = isinstance(seed, int | np.integer)
    values = [seed] * len(rows) if shared else list(seed)
    check(len(values) == len(rows), "seed", values, f"use one seed, or one for each of {len(rows)} prompts")
    seen: Counter[bytes] = Counter()
    seeds = []
    for value, prompt in zip(values, rows, strict=True):
        check(0 <= value < 2**32, "seed", value, "use an integer in [0, 2**32)")
        # Equal prompts under one seed are several samples; a seed of the row's own says itself what it wants.
        seeds.append((int(value), zlib.crc32(prompt), seen[prompt] if shared else 0))
        seen[prompt] += 1
    return seeds
