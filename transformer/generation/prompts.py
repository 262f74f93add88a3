"""Prompts to arrays: checked, padded to a bucket of lengths, one seed a row."""

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transformer import axes as ax
from transformer import sharding
from transformer.nn.model import Transformer
from transformer.settings import check

# The shortest bucket, in tokens.
SHORTEST = 16


@dataclass(frozen=True)
class Batch:
    """Prompts ready for prefill; rows beyond the prompts are empty and fill up the mesh.

    Attributes:
      index: which prompt each row is.
      tokens: [B, P] padded on the right.
      lengths: [B] tokens of each prompt, 0 in a row that only fills up.
      seeds: [B, 3] uint32: the row's seed, a hash of its prompt, which of several equal prompts it is.
      capacity: positions that the cache must hold, rounded up to a bucket.
    """

    index: tuple[int, ...]
    tokens: np.ndarray
    lengths: np.ndarray
    seeds: np.ndarray
    capacity: int


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
) -> list[Batch]:
    """Checks the prompts against the model and lays them out, `size` a batch, those of like lengths together.

    Raises:
      SettingsError: an empty prompt, an id outside the vocabulary, a prompt that leaves too little room in a learned
        position table, fewer than 1 new token, or seeds that are no uint32 or not one a prompt.
    """
    check(max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "use at least 1")
    check(size >= 1, "batch_size", size, "use at least 1")
    check(chunk >= 1, "prefill_chunk", chunk, "use at least 1")
    rows = [_row(i, prompt, model.spec.vocab_size) for i, prompt in enumerate(prompts)]
    seeds = np.array(_seeds(rows, seed), np.uint32)
    longest = max(len(row) for row in rows)
    limit = model.spec.length_limit
    if limit is not None:
        room = f"the learned position table ends at {limit}: with the longest prompt ({longest} tokens) at most"
        check(longest + max_new_tokens <= limit, "max_new_tokens", max_new_tokens, f"{room} {limit - longest} fit")
    # The longest first: what needs the most memory is known at once.
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i])) if len(rows) > size else list(range(len(rows)))
    parts = sharding.ways(ax.BATCH, model.compute.rules)
    height = -(-min(size, len(rows)) // parts) * parts
    groups = [order[i : i + size] for i in range(0, len(order), size)]
    return [_lay_out([rows[i] for i in g], g, seeds[g], height, max_new_tokens, limit, chunk) for g in groups]


def _lay_out(rows, index, seeds, height: int, max_new_tokens: int, limit: int | None, chunk: int) -> Batch:
    longest = max(len(row) for row in rows)
    capacity = _within(bucket(longest + max_new_tokens), limit)
    # More than one chunk is padded to whole ones, which are one program.
    padded = _within(bucket(longest), limit) if longest <= chunk else -(-longest // chunk) * chunk
    tokens = np.zeros((height, padded), np.int32)
    lengths = np.zeros(height, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
        lengths[i] = len(row)
    seeds = np.pad(seeds, ((0, height - len(rows)), (0, 0)))
    return Batch(index=tuple(index), tokens=tokens, lengths=lengths, seeds=seeds, capacity=capacity)


def _within(length: int, limit: int | None) -> int:
    return length if limit is None else min(length, limit)


def _row(i: int, prompt: Sequence[int], vocab_size: int) -> np.ndarray:
    check(len(prompt) > 0, f"prompts[{i}]", list(prompt), "has no tokens; start it with the beginning-of-text token")
    row = np.asarray(prompt)
    integers = row.ndim == 1 and np.issubdtype(row.dtype, np.integer)
    check(integers, f"prompts[{i}]", prompt, "expected a sequence of token ids")
    for token in row[(row < 0) | (row >= vocab_size)][:1].tolist():
        check(False, f"prompts[{i}]", token, f"token id outside the model's vocabulary of {vocab_size}")
    return row.astype(np.int32)


def _seeds(rows: list[np.ndarray], seed: int | Sequence[int]) -> list[tuple[int, int, int]]:
    """What a row draws depends on its seed and its prompt, never on its place in the batch or on other prompts."""
    shared = isinstance(seed, int | np.integer)
    values = [seed] * len(rows) if shared else list(seed)
    check(len(values) == len(rows), "seed", values, f"use one seed, or one for each of {len(rows)} prompts")
    seen: Counter[bytes] = Counter()
    seeds = []
    for value, row in zip(values, rows, strict=True):
        check(0 <= value < 2**32, "seed", value, "use an integer in [0, 2**32)")
        prompt = row.tobytes()
        # Equal prompts under one seed are several samples; a seed of the row's own says itself what it wants.
        seeds.append((int(value), zlib.crc32(prompt), seen[prompt] if shared else 0))
        seen[prompt] += 1
    return seeds
