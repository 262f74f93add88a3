"""Laws of a draft against full forwards: whose distribution its tokens have, and what it guesses from."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from scipy import stats

from tests import common
from tests.generation.common import GREEDY, GUESSES, PLAIN, WITH_MODULE
from transformer.generation.speculative import Statistics, speculate
from transformer.nn import initial
from transformer.nn.model import Transformer
from transformer.ops.sampling import Sampling, filter_logits
from transformer.settings import Compute

VOCAB, ROWS = 5, 1500


@functools.cache
def small(family: str, seed: int) -> tuple[Transformer, dict]:
    """A model of five tokens whose parameters are large enough for its logits to differ."""
    few = dataclasses.replace(common.tiny_spec(family), vocab_size=VOCAB)
    model = Transformer(few, Compute(attention="reference"))
    sharper = jax.tree.map_with_path(
        lambda path, x: x * 1.5 if path[0].key in ("head", "embedding") else x, initial.params(model, seed)
    )
    return model, sharper


@functools.partial(jax.jit, static_argnums=0, static_argnames="method")
def apply(model: Transformer, params: dict, tokens: np.ndarray, method: str = "__call__"):
    return model.apply({"params": params}, tokens, method=method)


def law(model: Transformer, params: dict, prompt: list[int], sampling: Sampling) -> np.ndarray:
    """Exact probability [V ** 3] of the next three tokens, from full forwards over every prefix."""
    ends = list(itertools.product(range(VOCAB), repeat=2))
    rows = np.array([[*prompt, *end] for end in ends], np.int32)
    logits = apply(model, params, rows)[:, len(prompt) - 1 :]
    filtered = [filter_logits(logits[:, i], sampling.method()) for i in range(3)]
    p = np.stack([jax.nn.softmax(x) for x in filtered], axis=1).astype(np.float64)
    pairs = np.array([p[row, 0, one] * p[row, 1, two] for row, (one, two) in enumerate(ends)])
    triples = (pairs[:, None] * p[:, 2]).reshape(-1)
    return triples / triples.sum()


@pytest.mark.parametrize(
    ("sampling", "own"),
    [(Sampling(), False), (Sampling(temperature=0.7, top_k=4, top_p=0.95, min_p=0.02), False), (Sampling(), True)],
)
def test_three_tokens_are_distributed_as_the_models_own(sampling, own):
    prompt = [1, 4, 2, 0]
    model, params = small(WITH_MODULE if own else PLAIN, 0)
    draft = None if own else small("gpt2", 1)
    options = dict(draft_tokens=2, max_new_tokens=3, sampling=sampling, draft=draft)
    completions, statistics = speculate(model, params, [prompt] * ROWS, **options)
    assert 0.1 < statistics.acceptance < 0.9
    tokens = np.array([c.tokens for c in completions])
    counts = np.bincount(tokens @ [VOCAB**2, VOCAB, 1], minlength=VOCAB**3)
    want = law(model, params, prompt, sampling) * ROWS
    assert counts[want == 0].sum() == 0
    # Rare triples together, so that every cell of the statistic has some.
    rare = want < 5
    pooled, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, want))
    kept = expected > 0
    assert kept.sum() >= 20 and stats.chisquare(pooled[kept], expected[kept]).pvalue > 1e-6


def test_a_module_guesses_what_it_foretells_from_the_models_features_and_then_from_its_own():
    """By full forwards: its guesses are right as often as in the loop, with its cache and after refused guesses."""
    (model, params), prompt, new = small(WITH_MODULE, 0), [1, 4, 2, 0, 3, 3], 24
    (done,), got = speculate(
        model, params, [prompt], draft_tokens=GUESSES, max_new_tokens=new, sampling=GREEDY, draft=None
    )
    text = np.array([*prompt, *done.tokens, *[0] * GUESSES], np.int32)[None]
    features, _ = apply(model, params, text, method="features")
    index = np.arange(text.shape[1], dtype=np.int32)[None]

    @jax.jit
    def foretell(features, after):
        x, _ = model.apply({"params": params}, 0, features, after, index, method="further")
        return x, model.apply({"params": params}, x, method="logits").argmax(-1)

    last, left, want = len(prompt), new - 1, Statistics()
    while left:
        x, after = np.array(features), np.roll(text, -1, axis=1)
        for i in range(GUESSES):
            further, tokens = foretell(x, after)
            if i + last < text.shape[1]:
                x[:, last + i], after[:, last + i] = further[:, last + i - 1], tokens[:, last + i - 1]
        right = after[0, last : last + GUESSES] == text[0, last + 1 : last + 1 + GUESSES]
        room = min(GUESSES, left)
        kept = int(np.cumprod(right[:room]).sum())
        drawn = min(kept + 1, left)
        want += Statistics(passes=1, rounds=1, guessed=room, kept=kept, drawn=drawn)
        last, left = last + drawn, left - drawn
    assert got == want and 0 < got.kept < got.guessed
