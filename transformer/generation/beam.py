"""Beam search: the texts that the model finds most probable, as far as keeping a few at a time can tell.

The rules are those of Hugging Face's `generate` (transformers 5, `_beam_search`): a text's score is the sum of its log
probabilities, that of the token that ends it included, over length ** length_penalty, where length counts the same new
tokens. A finished text takes a place among the best only if it was among the `num_beams` best continuations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np

from transformer.generation.beam_steps import Rules, Texts, search
from transformer.generation.decode import NOTHING, Plan, read_all
from transformer.generation.layout import for_decoding
from transformer.generation.prompts import Batch, bucket, make_batches
from transformer.generation.tokens import (
    BATCH_SIZE,
    PREFILL_CHUNK,
    Completion,
    OnBatch,
    check_whole,
    choose_cache_dtype,
    end_ids,
    make_rows,
)
from transformer.nn.model import Transformer
from transformer.ops.cache import CacheDType
from transformer.settings import check


@dataclass(frozen=True, kw_only=True)
class Beams:
    """How a beam search runs.

    Attributes:
      num_beams: texts that are kept at a time.
      length_penalty: power of the length that divides a text's log probability: above 0 long texts are favoured.
      early_stopping: when a prompt is done. True: with `num_beams` finished texts. False: also when the best unfinished
        one, were it finished now, would be worse than all of them. "never": only when it could not become better
        either, at the greatest length where the penalty is positive.
    """

    num_beams: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self):
        check(self.num_beams >= 1, "num_beams", self.num_beams, "use at least 1")
        check(np.isfinite(self.length_penalty), "length_penalty", self.length_penalty, "use a finite number")
        stopping = self.early_stopping
        known = isinstance(stopping, bool) or stopping == "never"
        check(known, "early_stopping", stopping, 'use True, False or "never"')


@dataclass(frozen=True)
class Hypothesis(Completion):
    """A text that was found.

    Attributes:
      score: by which it was found better than others; counts the token that ended it, which `tokens` does not.
    """

    score: float


def beam_search(
    model: Transformer,
    params: dict,
    prompts: Sequence[Sequence[int]],
    *,
    beams: Beams = Beams(),
    num_return_sequences: int = 1,
    max_new_tokens: int,
    eos_ids: Sequence[int] = (),
    prefixes: Sequence[Sequence[int]] | None = None,
    both_ways: bool = False,
    cache_dtype: CacheDType | None = None,
    batch_size: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    on_batch: OnBatch | None = None,
) -> list[list[Hypothesis]]:
    """The best texts after each prompt, the best first, independently of its batch mates.

    Args:
      num_return_sequences: texts of each prompt; fewer where there are no more (a tiny vocabulary).
      batch_size: prompts that run together, each `num_beams` rows wide; by default as many rows as `generate` has.

    The others are as in `generate`.

    Raises:
      SettingsError: more texts wanted than beams, or what `generate` refuses.
    """
    most = beams.num_beams
    remedy = f"use 1 to num_beams={most}"
    check(1 <= num_return_sequences <= most, "num_return_sequences", num_return_sequences, remedy)
    if len(prompts) == 0:
        return []
    size = max(1, BATCH_SIZE // most) if batch_size is None else batch_size
    model = for_decoding(model)
    batches = make_batches(model, prompts, max_new_tokens, 0, size, prefill_chunk, prefixes)
    check_whole(model, prompts, both_ways, prefill_chunk)
    ends = end_ids(make_rows(model, 1, max_new_tokens, eos_ids, None))
    cache_dtype = choose_cache_dtype(model, cache_dtype)
    found: list[list[Hypothesis]] = [[] for _ in prompts]
    done = 0
    for batch in batches:
        plan = Plan(batch.capacity, cache_dtype, prefill_chunk, both_ways=both_ways)
        texts = _run(model, params, batch, beams, max_new_tokens, ends, plan)
        for row, index in enumerate(batch.index):
            found[index] = _hypotheses(texts, row, ends)[:num_return_sequences]
        done += len(batch.index)
        if on_batch is not None:
            on_batch(done, sum(len(text.tokens) for texts in found for text in texts))
    return found


def _run(
    model: Transformer, params: dict, batch: Batch, beams: Beams, limit: int, ends: np.ndarray, plan: Plan
) -> Texts:
    """What was found for each row of a batch."""
    read = read_all(model, params, batch.tokens, batch.lengths, plan, batch.source)
    left = np.where(batch.lengths > 0, limit, 0).astype(np.int32)
    stopping = beams.early_stopping
    rules = Rules(np.float32(beams.length_penalty), np.bool_(stopping is True), np.bool_(stopping == "never"))
    sizes = dict(num_beams=beams.num_beams, columns=bucket(limit))
    return jax.device_get(search(model, params, read, batch.lengths, left, ends, rules, **sizes))


def _hypotheses(texts: Texts, row: int, ends: np.ndarray) -> list[Hypothesis]:
    found = []
    for score, tokens, logprobs in zip(texts.scores[row], texts.tokens[row], texts.logprobs[row], strict=True):
        if np.isfinite(score):
            count = int(np.sum(tokens != NOTHING))
            ended = tokens[count - 1] in ends
            kept = slice(count - ended)
            reason = "eos" if ended else "length"
            found.append(Hypothesis(tuple(tokens[kept].tolist()), reason, tuple(logprobs[kept].tolist()), float(score)))
    return found
