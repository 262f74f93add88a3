"""Generation from token ids: the loop that keeps the device busy and knows when each row is done."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from transformer.generation.decode import MAX_STEPS, NOTHING, Drawn, Plan, State, decode, prefill
from transformer.generation.layout import for_decoding
from transformer.generation.prompts import Batch, check_alone, make_batches
from transformer.nn.model import Transformer
from transformer.ops.cache import CACHE_DTYPES, CacheDType
from transformer.ops.sampling import Method, Sampling
from transformer.settings import check

# Tokens a row between two looks at them, while somebody watches.
STREAM_STEPS = 8
# Prompts that run together, and tokens of them that are read at once, unless the caller says otherwise.
BATCH_SIZE, PREFILL_CHUNK = 64, 2048

# Draws from the model's own distribution.
PLAIN = Sampling()

# Called with (index of the prompt, token); True ends that row after this token.
OnToken = Callable[[int, int], bool | None]
# Called with (prompts done, tokens drawn).
OnBatch = Callable[[int, int], None]


@dataclass(frozen=True)
class Completion:
    """What a prompt was continued with.

    Attributes:
      tokens: the new tokens, without the one that ended the row.
      reason: why the row ended: an end token, `on_token`, or the number of tokens asked for.
      logprobs: natural log of the model's probability of each token, before temperature and filters.
    """

    tokens: tuple[int, ...]
    reason: Literal["eos", "stop", "length"]
    logprobs: tuple[float, ...]


def generate(
    model: Transformer,
    params: dict,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = PLAIN,
    seed: int | Sequence[int] = 0,
    eos_ids: Sequence[int] = (),
    prefixes: Sequence[Sequence[int]] | None = None,
    both_ways: bool = False,
    cache_dtype: CacheDType | None = None,
    batch_size: int = BATCH_SIZE,
    prefill_chunk: int = PREFILL_CHUNK,
    on_token: OnToken | None = None,
    on_batch: OnBatch | None = None,
) -> list[Completion]:
    """Continues each prompt, of any length, independently of its batch mates; or answers it, behind an encoder.

    Draws depend on the row's seed, its prompt and the position only. Equal prompts under one seed differ: the n-th of
    them draws the same in every batch. With one seed a row, equal seeds and prompts draw the same.
    Runs on the mesh in force (`jax.set_mesh`), where one is.

    Args:
      prefixes: what the answer to each prompt begins with, for a decoder behind an encoder; nothing by default.
      both_ways: the tokens of a prompt see each other, for a decoder that was trained so (`training.objectives`).
      cache_dtype: of cached keys and values; the model's compute dtype by default.
      batch_size: prompts that run together; more of them are sorted by length and run one batch after the other.
      prefill_chunk: tokens of a prompt that are read at once; what a longer one needs for its activations is bounded.
      on_token: sees the tokens of each row in order, in chunks of a few, the end token excluded.
      on_batch: called after each batch with the numbers of prompts done and of tokens drawn for them.

    Raises:
      SettingsError: a model without a decoder, an empty prompt, an id outside the vocabulary, more tokens than a
        learned position table has, fewer than 1 new token, bad seeds, or an unknown cache dtype.
    """
    if len(prompts) == 0:
        return []
    model = for_decoding(model)
    batches = make_batches(model, prompts, max_new_tokens, seed, batch_size, prefill_chunk, prefixes)
    check_whole(model, prompts, both_ways, prefill_chunk)
    cache_dtype = choose_cache_dtype(model, cache_dtype)
    rows = make_rows(model, len(prompts), max_new_tokens, eos_ids, on_token)
    done = 0
    for batch in batches:
        plan = Plan(batch.capacity, cache_dtype, prefill_chunk, both_ways=both_ways)
        _run(model, params, batch, [rows[i] for i in batch.index], max_new_tokens, sampling.method(), plan)
        done += len(batch.index)
        if on_batch is not None:
            on_batch(done, sum(len(row.tokens) for row in rows))
    return [row.completion() for row in rows]


def check_whole(model: Transformer, prompts: Sequence[Sequence[int]], both_ways: bool, chunk: int) -> None:
    """Raises `SettingsError` where prompts can't see both ways."""
    if both_ways:
        check_alone(model.spec, "both_ways: its encoder sees both ways already")
        longest = max(map(len, prompts))
        check(longest <= chunk, "prefill_chunk", chunk, f"both_ways: a prompt is read whole; use at least {longest}")


def choose_cache_dtype(model: Transformer, cache_dtype: CacheDType | None) -> CacheDType:
    """The one asked for, or the model's compute dtype."""
    cache_dtype = cache_dtype or model.compute.dtype
    check(cache_dtype in CACHE_DTYPES, "cache_dtype", cache_dtype, f"use one of {list(CACHE_DTYPES)}")
    return cache_dtype


def make_rows(
    model: Transformer, count: int, limit: int, eos_ids: Sequence[int], on_token: OnToken | None
) -> "list[Row]":
    """Rows without tokens yet; the end tokens are checked against the model."""
    vocab_size = model.spec.vocab_size
    for token in eos_ids:
        check(0 <= token < vocab_size, "eos_ids", token, f"outside the model's vocabulary of {vocab_size}")
    ends = frozenset(int(token) for token in eos_ids)
    return [Row(i, ends, limit, on_token) for i in range(count)]


def _run(model, params: dict, batch: Batch, rows: "list[Row]", limit: int, method: Method, plan: Plan) -> None:
    """Continues one batch until all of its rows are done."""
    left, ends = np.where(batch.lengths > 0, limit, 0).astype(np.int32), end_ids(rows)
    args = batch.tokens, batch.lengths, left, batch.seeds, ends, method, plan, batch.source
    state, drawn = prefill(model, params, *args)
    finish(model, params, state, drawn, rows, limit, method)


def end_ids(rows: "list[Row]") -> np.ndarray:
    """What `decode` takes as ends: none and one are the same program."""
    return np.array(sorted(rows[0].ends) or [NOTHING], np.int32)


def finish(
    model: Transformer, params: dict, state: State, drawn: Drawn, rows: "list[Row]", limit: int, method: Method
) -> State:
    """Draws on from the first tokens until all rows are done; the last state, which is used up otherwise.

    Its cache may hold up to 2 · STREAM_STEPS tokens after a row that its watcher stopped.
    """
    ends = end_ids(rows)
    steps = MAX_STEPS if rows[0].on_token is None else STREAM_STEPS
    asked = 1
    while True:
        # The next chunk is under way while this one is looked at.
        ahead = None
        if asked < limit:
            count = min(steps, limit - asked)
            ahead, asked = decode(model, params, state, np.int32(count), ends, method), asked + count
        stopped = record(rows, drawn)
        if ahead is None:
            return state
        state, drawn = ahead
        if all(row.reason for row in rows):
            return state
        if stopped:
            alive = np.zeros(state.left.shape, np.int32)
            alive[: len(rows)] = [row.reason is None for row in rows]
            state = dataclasses.replace(state, left=state.left * alive)


class Row:
    """Collects the tokens of one prompt."""

    def __init__(self, index: int, ends: frozenset[int], limit: int, on_token: OnToken | None):
        self.index, self.ends, self.limit, self.on_token = index, ends, limit, on_token
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.reason: Literal["eos", "stop", "length"] | None = None

    def add(self, token: int, logprob: float) -> None:
        """Takes the next token, unless it is the one that ends the row."""
        if token in self.ends:
            self.reason = "eos"
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.on_token is not None and self.on_token(self.index, token):
            self.reason = "stop"
        elif len(self.tokens) == self.limit:
            self.reason = "length"

    def completion(self) -> Completion:
        """What there is of the row."""
        return Completion(tuple(self.tokens), self.reason, tuple(self.logprobs))


def record(rows: list[Row], drawn: Drawn) -> bool:
    """Hands a chunk to its rows; True if one of them was stopped by its watcher, which the device can't know."""
    tokens, logprobs = np.asarray(drawn.tokens).tolist(), np.asarray(drawn.logprobs).tolist()
    stopped = False
    # Column by column, so that a watcher sees all rows grow together.
    for step in range(len(tokens[0])):
        for place, row in enumerate(rows):
            if row.reason is None and tokens[place][step] != NOTHING:
                row.add(tokens[place][step], logprobs[place][step])
                stopped |= row.reason == "stop"
    return stopped
