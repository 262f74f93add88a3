"""Speculative generation from token ids: `tokens.generate` with a draft, and how well the draft did."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transformer.generation.decode import MAX_STEPS, Plan
from transformer.generation.drafts import Draft, OtherModel, OwnModule
from transformer.generation.layout import for_decoding
from transformer.generation.prompts import Batch, check_alone, check_writes, make_batches
from transformer.generation.rounds import prefill, run
from transformer.generation.tokens import (
    BATCH_SIZE,
    PLAIN,
    STREAM_STEPS,
    Completion,
    OnBatch,
    OnToken,
    Row,
    choose_cache_dtype,
    end_ids,
    make_rows,
    record,
)
from transformer.nn.model import Transformer
from transformer.ops.cache import CacheDType
from transformer.ops.sampling import Method, Sampling
from transformer.settings import check


@dataclass(frozen=True)
class Statistics:
    """How a draft did.

    Attributes:
      passes: of the model over all rows at once, the prompts' not counted: plain decoding needs one a token.
      rounds: passes that a row took part in, summed over the rows.
      guessed, kept: tokens of the draft, and those of them that the model kept.
      drawn: tokens of all rounds, those that ended a row included.
    """

    passes: int = 0
    rounds: int = 0
    guessed: int = 0
    kept: int = 0
    drawn: int = 0

    @property
    def acceptance(self) -> float:
        """Share of the guesses that were kept."""
        return self.kept / max(self.guessed, 1)

    @property
    def mean_length(self) -> float:
        """Tokens that a row gains by one pass: 1 without a draft, at most 1 + draft_tokens."""
        return self.drawn / max(self.rounds, 1)

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __str__(self) -> str:
        return (
            f"draft: kept {self.kept:,} of {self.guessed:,} guesses ({self.acceptance:.0%}), "
            f"{self.mean_length:.2f} tokens a pass, {self.passes:,} passes of the model"
        )


def speculate(
    model: Transformer,
    params: dict,
    prompts: Sequence[Sequence[int]],
    *,
    draft: tuple[Transformer, dict] | None = None,
    draft_tokens: int = 4,
    max_new_tokens: int,
    sampling: Sampling = PLAIN,
    seed: int | Sequence[int] = 0,
    eos_ids: Sequence[int] = (),
    cache_dtype: CacheDType | None = None,
    batch_size: int = BATCH_SIZE,
    on_token: OnToken | None = None,
    on_batch: OnBatch | None = None,
) -> tuple[list[Completion], Statistics]:
    """`tokens.generate`, several tokens a pass: the same tokens where greedy, else draws from the same distribution.

    Draws are others than those of `generate` under the same seed, and depend on `draft` and `draft_tokens`, too.

    Args:
      draft: (model, parameters) of the same vocabulary; None: the model's own module of multi-token prediction.
      draft_tokens: guesses a pass.

    Raises:
      SettingsError: a draft of another vocabulary or with too short a table of positions, a model that has no module of
        its own, fewer than 1 guess, or what `generate` refuses.
    """
    check_writes(model.spec)
    check_alone(model.spec, "a draft guesses what follows a text")
    model = for_decoding(model)
    guesser, draft_params = _draft(model, params, draft)
    check(draft_tokens >= 1, "draft_tokens", draft_tokens, "use at least 1")
    penalty = sampling.repetition_penalty
    check(penalty == 1, "repetition_penalty", penalty, "a draft can't know what it changes; use 1, or no draft")
    if len(prompts) == 0:
        return [], Statistics()
    longest = max(map(len, prompts)) + max_new_tokens
    limit = guesser.model.spec.length_limit
    check(limit is None or longest <= limit, "draft", f"a model of {limit} positions", f"{longest} are needed")
    # Prompts are read whole: the draft wants the features before every token.
    batches = make_batches(model, prompts, max_new_tokens, seed, batch_size, chunk=longest)
    cache_dtype = choose_cache_dtype(model, cache_dtype)
    rows = make_rows(model, len(prompts), max_new_tokens, eos_ids, on_token)
    models, statistics, done = (model, params, guesser, draft_params), Statistics(), 0
    for batch in batches:
        plan = Plan(batch.capacity, cache_dtype, chunk=batch.tokens.shape[1], slack=draft_tokens)
        some = [rows[i] for i in batch.index]
        statistics += _run(models, batch, some, max_new_tokens, sampling.method(), plan)
        done += len(batch.index)
        if on_batch is not None:
            on_batch(done, sum(len(row.tokens) for row in rows))
    return [row.completion() for row in rows], statistics


def _draft(model: Transformer, params: dict, draft: tuple[Transformer, dict] | None) -> tuple[Draft, dict]:
    """Who guesses, and with which parameters."""
    if draft is None:
        check(model.spec.mtp is not None, "draft", None, "the model has no module of multi-token prediction; give one")
        return OwnModule(model), params
    alone = draft[0].spec.encoder is None
    check(alone, "draft", "a model with an encoder", "use one of a decoder alone, as the model is")
    other, size = draft[0].spec.vocab_size, model.spec.vocab_size
    check(other == size, "draft", f"a model of {other} tokens", f"use one of the model's own vocabulary of {size}")
    return OtherModel(for_decoding(draft[0])), draft[1]


def _run(models: tuple, batch: Batch, rows: list[Row], limit: int, method: Method, plan: Plan) -> Statistics:
    """Continues one batch until all of its rows are done."""
    ends = end_ids(rows)
    left = np.where(batch.lengths > 0, limit, 0).astype(np.int32)
    steps = MAX_STEPS if rows[0].on_token is None else STREAM_STEPS
    count = np.int32(max(steps // (plan.slack + 1), 1))
    progress, drawn = prefill(*models, batch.tokens, batch.lengths, left, batch.seeds, ends, method, plan)
    statistics, tally = Statistics(), None
    while True:
        # The next rounds are under way while the last ones are looked at.
        ahead = run(*models, progress, count, ends, method, plan) if limit > 1 else None
        stopped = record(rows, drawn)
        if tally is not None:
            statistics += Statistics(*map(int, dataclasses.astuple(tally)))
        if ahead is None or all(row.reason for row in rows):
            return statistics
        progress, drawn, tally = ahead
        if stopped:
            alive = np.zeros_like(left)
            alive[: len(rows)] = [row.reason is None for row in rows]
            target = dataclasses.replace(progress.target, left=progress.target.left * alive)
            progress = dataclasses.replace(progress, target=target)
