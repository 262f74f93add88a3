"""Prompts longer and shorter than every tiny window (8), and what each family makes of them."""

import functools
import types

import jax
import numpy as np

from tests import common
from transformer import api
from transformer.checkpoints import source
from transformer.generation import Completion, generate
from transformer.ops.sampling import Sampling

GREEDY = Sampling(temperature=0.0)
LENGTHS = (3, 30, 9, 17)
NEW = 24
# Guesses of a draft a pass, and a family without and with a module of its own to guess.
GUESSES = 3
PLAIN = "llama3"
WITH_MODULE = next(family for family in common.DECODERS if common.tiny_spec(family).mtp)
# Prompts and what follows them.
TOTAL = max(LENGTHS) + NEW


def stand_in(monkeypatch, loaded: tuple) -> None:
    """Lets (model, parameters, tokenizer) stand for what any training workdir holds."""
    run = types.SimpleNamespace(spec=loaded[0].spec, tokenizer_name=lambda: "bytes")
    monkeypatch.setattr(source, "TrainedRun", lambda workdir: run)
    monkeypatch.setattr(api, "load", lambda workdir: loaded)


def prompts(family: str, seed: int = 0) -> list[list[int]]:
    """Ragged prompts of `LENGTHS`."""
    rows = common.random_tokens(family, len(LENGTHS), max(LENGTHS), seed)
    return [row[:length].tolist() for row, length in zip(rows, LENGTHS, strict=True)]


@functools.cache
def greedy(family: str) -> list[Completion]:
    """Greedy completions of the prompts."""
    return generate(common.model(family), common.params(family), prompts(family), max_new_tokens=NEW, sampling=GREEDY)


def full_forward(family: str, rows: list[list[int]]) -> np.ndarray:
    """Logits [len(LENGTHS), TOTAL, V] without a cache; causality makes the padding on the right harmless."""
    tokens = np.zeros((len(LENGTHS), TOTAL), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return np.asarray(_forward(common.model(family))(common.params(family), tokens))


@functools.cache
def _forward(model):
    return jax.jit(lambda params, tokens: model.apply({"params": params}, tokens))


def assert_close(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Equal up to rounding, relative to the largest value."""
    limit = 2e-5 * np.abs(want).max()
    worst = np.abs(got - want).max()
    assert worst <= limit, f"{what}: differs by {worst:.1e}, limit {limit:.1e}"
