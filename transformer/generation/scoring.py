"""How well a model foretells a text: the loss of every token, each with a window of what comes before it."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from transformer.generation.prompts import check_alone, check_writes
from transformer.nn.model import Transformer
from transformer.ops.experts import products
from transformer.settings import check
from transformer.spec import Model


class Window(NamedTuple):
    """One row: it reads tokens of a text from `start` on, and is asked for all that follow but the first `known`."""

    text: int
    start: int
    targets: int
    known: int


@dataclass(frozen=True)
class Scores:
    """Of every token of a text but the first.

    Attributes:
      nats: [N - 1], negative log-likelihoods.
      context: [N - 1], how many tokens the model had before each.
    """

    nats: np.ndarray
    context: np.ndarray


def windows(lengths: Sequence[int], length: int, stride: int) -> list[Window]:
    """Rows of at most `length` tokens that ask for every token of every text but the first, each exactly once.

    A row begins `stride` tokens after the one before it; it is asked only for what that one wasn't, so that a token
    beyond the first row has at least length - stride tokens before it, and at most `length`.
    """
    rows = []
    for text, count in enumerate(lengths):
        asked = 0  # targets that earlier rows were asked for
        for start in range(0, max(count - 1, 0), stride):
            targets = min(length, count - 1 - start)
            rows.append(Window(text, start, targets, asked - start))
            asked = start + targets
            if asked == count - 1:
                break
    return rows


def check_rows(spec: Model, length: int, stride: int | None = None, batch_size: int = 1) -> int:
    """The stride that `score` uses.

    Raises:
      SettingsError: as `score`, but for the ids.
    """
    check_writes(spec)
    check_alone(spec, "a text is scored by itself")
    limit = spec.length_limit
    check(length >= 1, "length", length, "use at least 1 token")
    remedy = f"the model's learned positions end at {limit}; use at most that"
    check(limit is None or length <= limit, "length", length, remedy)
    stride = max(length // 2, 1) if stride is None else stride
    check(1 <= stride <= length, "stride", stride, f"use 1 to length={length}: with more, tokens would be left out")
    check(batch_size >= 1, "batch_size", batch_size, "use at least 1 row")
    return stride


def score(
    model: Transformer,
    params: dict,
    texts: Sequence[Sequence[int]],
    *,
    length: int,
    stride: int | None = None,
    batch_size: int = 8,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Scores]:
    """The scores of each text's tokens, in order.

    Args:
      texts: token ids; the first of each is only read, so begin with BOS where the model was trained with it.
      length: T of the rows, tokens that the model reads at once.
      stride: tokens that a row has ahead of the one before it; `length` (rows side by side) is quickest, 1 gives every
        token as much context as there is. By default half of `length`.
      progress: told how many tokens were scored since the last time.

    Raises:
      SettingsError: the model writes no text or reads two, an option is out of range, or an id is none of the model's.
    """
    stride = check_rows(model.spec, length, stride, batch_size)
    ids = [np.asarray(text, np.int32) for text in texts]
    for text in ids:
        inside = not text.size or (text.min() >= 0 and text.max() < model.spec.vocab_size)
        check(inside, "texts", text.tolist()[:8], f"ids must lie in 0 to {model.spec.vocab_size - 1}")
    scores = [Scores(*(np.zeros(max(len(text) - 1, 0), kind) for kind in (np.float32, np.int32))) for text in ids]
    rows, program = windows([len(text) for text in ids], length, stride), _program(model)
    for first in range(0, len(rows), batch_size):
        chosen = rows[first : first + batch_size]
        nats = np.asarray(program(params, *_batch(ids, chosen, length, batch_size)))
        for row, window in zip(nats, chosen, strict=False):
            new = slice(window.known, window.targets)
            there = slice(window.start + window.known, window.start + window.targets)
            scores[window.text].nats[there] = row[new]
            scores[window.text].context[there] = np.arange(1, window.targets + 1)[new]
        progress(sum(window.targets - window.known for window in chosen))
    return scores


def _batch(ids: list[np.ndarray], chosen: list[Window], length: int, batch_size: int) -> tuple[np.ndarray, ...]:
    """Tokens, targets and positions [B, T]; padding has position -1."""
    tokens, targets = np.zeros((2, batch_size, length), np.int32)
    positions = np.full((batch_size, length), -1, np.int32)
    for row, window in enumerate(chosen):
        count, text = window.targets, ids[window.text][window.start :]
        tokens[row, :count], targets[row, :count] = text[:count], text[1 : count + 1]
        positions[row, :count] = range(count)
    return tokens, targets, positions


@functools.cache
def _program(model: Transformer):
    def run(params, tokens, targets, positions):
        return model.apply({"params": params}, tokens, targets, positions, method="token_losses")

    return jax.jit(run, compiler_options=products.compiler_options())
