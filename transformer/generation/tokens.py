"""Generation from token ids: the loop that keeps the device busy and knows when each row is done."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from transformer.generation.decode import MAX_STEPS, NOTHING, Drawn, Plan, decode, prefill
from transformer.generation.prompts import make_batch
from transformer.nn.model import Transformer
from transformer.ops.sampling import Sampling
from transformer.settings import DType, check

# Tokens a row between two looks at them, while somebody watches.
STREAM_STEPS = 8

# Draws from the model's own distribution.
PLAIN = Sampling()

# Called with (index of the prompt, token); True ends that row after this token.
OnToken = Callable[[int, int], bool | None]


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
    cache_dtype: DType | None = None,
    on_token: OnToken | None = None,
) -> list[Completion]:
    """Continues each prompt, of any length, independently of its batch mates.

    Draws depend on the row's seed, its prompt and the position only. Equal prompts under one seed differ: the n-th of
    them draws the same in every batch. With one seed a row, equal seeds and prompts draw the same.
    Runs on the mesh in force (`jax.set_mesh`), where one is.

    Args:
      cache_dtype: of cached keys and values; the model's compute dtype by default.
      on_token: sees the tokens of each row in order, in chunks of a few, the end token excluded.

    Raises:
      SettingsError: an empty prompt, an id outside the vocabulary, more tokens than a learned position table has,
        fewer than 1 new token, bad seeds, or an unknown cache dtype.
    """
    if len(prompts) == 0:
        return []
    batch = make_batch(model, prompts, max_new_tokens, seed)
    vocab_size = model.spec.vocab_size
    for token in eos_ids:
        check(0 <= token < vocab_size, "eos_ids", token, f"outside the model's vocabulary of {vocab_size}")
    ends = frozenset(int(token) for token in eos_ids)
    # None and one are the same program.
    end_array = np.array(sorted(ends) or [NOTHING], np.int32)
    cache_dtype = cache_dtype or model.compute.dtype
    check(cache_dtype in get_args(DType), "cache_dtype", cache_dtype, f"use one of {list(get_args(DType))}")
    plan = Plan(sampling, batch.capacity, cache_dtype)
    left = np.where(batch.lengths > 0, max_new_tokens, 0).astype(np.int32)
    rows = [Row(i, ends, max_new_tokens, on_token) for i in range(len(prompts))]
    steps = MAX_STEPS if on_token is None else STREAM_STEPS

    state, drawn = prefill(model, params, batch.tokens, batch.lengths, left, batch.seeds, end_array, plan)
    asked = 1
    while True:
        # The next chunk is under way while this one is looked at.
        ahead = None
        if asked < max_new_tokens:
            count = min(steps, max_new_tokens - asked)
            ahead, asked = decode(model, params, state, np.int32(count), end_array, plan), asked + count
        stopped = record(rows, drawn)
        if ahead is None or all(row.reason for row in rows):
            return [row.completion() for row in rows]
        state, drawn = ahead
        if stopped:
            alive = np.zeros_like(left)
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
        for row in rows:
            if row.reason is None and tokens[row.index][step] != NOTHING:
                row.add(tokens[row.index][step], logprobs[row.index][step])
                stopped |= row.reason == "stop"
    return stopped
