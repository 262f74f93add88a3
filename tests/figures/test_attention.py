"""The steps of attention against the formula, of the toy and of heads of models."""

import jax
import numpy as np
import pytest

from tests import common
from transformer.figures.data import attention


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def check(steps: attention.Steps) -> None:
    """Each step follows from the one before, by the formula."""
    np.testing.assert_allclose(steps.scores, np.einsum("th,sh->ts", steps.q, steps.k), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(softmax(steps.masked), steps.weights, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(np.einsum("ts,sh->th", steps.weights, steps.v), steps.output, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_the_toy_follows_the_formula(causal):
    steps = attention.toy(causal)
    check(steps)
    ahead = np.triu(np.ones((6, 6), bool), 1)
    np.testing.assert_array_equal(np.isneginf(steps.masked), ahead & causal)


def test_the_toy_asks_for_the_lesson_s_scores():
    """很 scores 跑, 一天 and 小猫 with 2, 1 and 0: of these three alone 0.67, 0.24 and 0.09."""
    steps = attention.toy()
    row = steps.scaled[-1][[1, 3, 0]]
    np.testing.assert_array_equal(row, [2, 1, 0])
    np.testing.assert_allclose(softmax(row), [0.67, 0.24, 0.09], atol=0.006)


@pytest.mark.parametrize("family", ["llama3", "gemma2"])  # grouped heads in a stacked body; a softcap, and a tail
def test_heads_of_a_model_follow_the_formula(family):
    model, params = common.model(family), common.params(family)
    tokens = common.random_tokens(family, 1, 12)[0]
    for layer in (0, model.spec.trunk.num_layers - 1):
        weights = attention.heads(model, params, tokens, layer)
        for head in (0, len(weights) - 1):
            steps = attention.of_head(model, params, tokens, layer, head)
            check(steps)
            np.testing.assert_array_equal(steps.weights, weights[head])


def test_the_last_layer_is_the_last_layer():
    """Its output is made of these heads: rotated and grouped queries are those of the layer asked for."""
    model, params = common.model("llama3"), common.params("llama3")
    tokens = common.random_tokens("llama3", 1, 12)[0]
    last = model.spec.trunk.num_layers - 1
    first, second = (attention.heads(model, params, tokens, layer) for layer in (0, last))
    moved = jax.tree.map(np.copy, params)
    body = moved["decoder"]["body"]["block_0"]["attention"]["query"]["kernel"]
    body[-1] *= 2
    np.testing.assert_array_equal(attention.heads(model, moved, tokens, 0), first)
    assert np.abs(attention.heads(model, moved, tokens, last) - second).max() > 1e-3


def test_what_can_t_be_shown_is_refused():
    model, params = common.model("llama3"), common.params("llama3")
    with pytest.raises(ValueError, match="layer=9: use 0 to 2"):
        attention.heads(model, params, [1, 2], 9)
    with pytest.raises(ValueError, match="head=4: use 0 to 3"):
        attention.of_head(model, params, [1, 2], 0, 4)
