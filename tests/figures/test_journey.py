"""The journey's stages add up to what the model computes, and the model learns its example."""

import functools

import numpy as np
import pytest

from tests import common
from transformer.figures.data import captured, journey


@functools.cache
def learned():
    return journey.learn()


def test_the_tiny_model_learns_the_lesson_s_example():
    model, params, losses = learned()
    found = journey.follow(model, params)
    assert found.probabilities.argmax() == journey.ANSWER and found.probabilities[journey.ANSWER] > 0.8
    assert losses[-1] < 0.5 < losses[0]
    slept = journey.follow(model, params, journey.SENTENCES[1][:-1])
    assert slept.probabilities.argmax() == 19, "another deed, another state: it read the context"


@pytest.mark.parametrize("family", ["learned", "gpt2"])  # RMSNorm and no biases; LayerNorm with biases
def test_stages_add_up(family):
    if family == "learned":
        (model, params, _), tokens = learned(), journey.PROMPT
    else:
        model, params, tokens = common.model(family), common.params(family), (3, 1, 4, 1, 5)
    found = journey.follow(model, params, tokens)
    _, seen = captured.run(model, params, np.array(tokens)[None])
    inner = captured.layers(model.spec.decoder, seen["decoder"])
    stages = list(found.stages)
    x = stages.pop(0).vector
    np.testing.assert_array_equal(x, seen["embedded"][0, -1])
    for layer, (block, points) in enumerate(zip(model.spec.decoder.layers, inner, strict=True)):
        names = ["norm", *["head"] * block.mixer.num_heads, "attended", "norm", "ffn", "residual"]
        own, stages = stages[: len(names)], stages[len(names) :]
        assert [stage.key.removeprefix("stage ") for stage in own] == names
        assert {stage.values["layer"] for stage in own} == {layer}
        heads = sum(stage.vector for stage in own if stage.key == "stage head")
        if block.mixer.out_bias:
            bias = captured.layers(model.spec.decoder, params["decoder"])[layer]["attention"]["out"]["bias"]
            heads = heads + bias
        attended, residual = own[-4].vector, own[-1].vector
        np.testing.assert_allclose(x + heads, attended, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(attended + own[-2].vector, residual, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(residual, points["residual"][0, -1])
        x = residual
    (final,) = stages
    table = params["head"]["kernel"] if not model.spec.head.tied else params["embedding"]["token"]
    np.testing.assert_allclose(final.vector @ np.asarray(table).T, found.logits, rtol=1e-3, atol=1e-4)


def test_softmax_of_the_lesson():
    powers, weights = journey.softmax((2, 1, 0))
    assert weights.round(2).tolist() == pytest.approx([0.67, 0.24, 0.09])
    np.testing.assert_allclose(powers / powers.sum(), weights, rtol=1e-6)


def test_other_placements_are_refused():
    with pytest.raises(ValueError, match="pre-norm decoder"):
        journey.follow(common.model("gemma2"), common.params("gemma2"), (1, 2))
