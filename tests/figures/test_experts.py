"""Picks, loads and drops of mixtures."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests import common
from transformer import spec
from transformer.figures.data import experts
from transformer.ops import experts as ops


@pytest.mark.parametrize(
    ("reference", "number", "top"),
    [("mixtral:8x7b", 8, 2), ("qwen3_moe:235b-a22b", 128, 8), ("deepseek_v3:671b", 256, 8)],
)
def test_routers_are_of_true_size(reference, number, top):
    mixture = experts.mixture(reference)
    index, weight = experts.random_picks(mixture, 64)
    assert (mixture.num_experts, index.shape) == (number, (64, top))
    assert all(len(set(row)) == top for row in index)
    np.testing.assert_allclose(weight.sum(axis=1), mixture.router.scale, rtol=1e-5)
    assert experts.counts(index, number).sum() == 64 * top
    if mixture.router.groups > 1:
        groups = index // (number // mixture.router.groups)
        assert max(len(set(row)) for row in groups) <= mixture.router.top_groups


def test_a_model_without_experts_is_refused():
    with pytest.raises(ValueError, match="llama3:8b"):
        experts.mixture("llama3:8b")


def test_drops_are_what_exceeds_the_room():
    """Six of eight assignments want expert 0, which has room for ceil(factor · 8 / 4) of them."""
    index = np.array([[0], [0], [1], [0], [0], [3], [0], [0]])
    np.testing.assert_allclose(experts.dropped(index, 4, np.array([0.5, 1, 2, 3])), np.array([5, 4, 2, 0]) / 8)


def test_drops_are_those_of_the_layer():
    index, _ = experts.random_picks(experts.mixture("mixtral:8x7b"), 40)
    ffn = spec.FeedForward(d_ff=1, activation="silu", gated=False, bias=False)
    weights = ops.ExpertWeights(up=jnp.ones((8, 1, 1)), gate=None, down=jnp.ones((8, 1, 1)))
    call, where = ops.Call(ffn, 8, capacity=0.8), jnp.asarray(index)[None]
    _, lost = ops.apply("capacity", call, jnp.zeros((1, 40, 1)), where, jnp.ones(where.shape), weights)
    assert experts.dropped(index, 8, np.array([0.8]))[0] * index.size == pytest.approx(float(lost)) != 0


def test_training_keeps_what_it_reports():
    run = experts.train("correction", steps=3)
    assert run.violation.shape == run.loss.shape == (3,) and np.isfinite(run.loss).all()
    for shares in (run.before, run.after):
        np.testing.assert_allclose(shares.sum(axis=-1), 1, rtol=1e-5)
    assert not np.array_equal(run.before, run.after)
    last = experts.counts(run.picks, 8) / run.picks.size
    np.testing.assert_allclose(last, run.after[-1], atol=1e-6)
    with pytest.raises(ValueError, match="remedy='luck'"):
        experts.train("luck")


def test_the_total_grows_with_the_experts_and_the_active_ones_with_the_visits():
    sizes = {top: experts.sizes("mixtral:8x7b", (8, 16), top) for top in (1, 2)}
    assert sizes[2][8] == (46_702_792_704, 12_879_925_248)
    one = 3 * 4096 * 14336 * 32  # parameters of an expert in every layer
    router = 4096 * 32
    assert sizes[2][16][0] - sizes[2][8][0] == 8 * (one + router)
    assert sizes[2][16][1] - sizes[2][8][1] == 8 * router
    assert sizes[2][8][1] - sizes[1][8][1] == one
    with pytest.raises(ValueError, match="top_k=9"):
        experts.sizes("mixtral:8x7b", (8,), 9)


def test_picks_of_a_model_are_those_by_which_its_experts_are_weighed():
    model, params = common.model("deepseek_v3"), common.params("deepseek_v3")
    tokens = common.random_tokens("deepseek_v3", 1, 6)[0]
    found = experts.picks(model, params, tokens)
    mixtures = [i for i, block in enumerate(model.spec.decoder.layers) if isinstance(block.ffn, spec.MoE)]
    assert list(found) == mixtures
    for layer, weights in found.items():
        ffn = model.spec.decoder.layers[layer].ffn
        assert weights.shape == (6, ffn.num_experts)
        assert ((weights > 0).sum(axis=1) == ffn.top_k).all()
        np.testing.assert_allclose(weights.sum(axis=1), ffn.router.scale, rtol=1e-5)
    with pytest.raises(ValueError, match="none of its layers has experts"):
        experts.picks(common.model("llama3"), common.params("llama3"), [1, 2])


@pytest.mark.slow
def test_a_remedy_makes_the_load_more_even():
    runs = {remedy: experts.train(remedy, steps=60) for remedy in experts.REMEDIES}
    uneven = {remedy: run.violation[-10:].mean() for remedy, run in runs.items()}
    assert min(uneven["auxiliary"], uneven["correction"]) < uneven["none"]
    assert all(run.loss[-1] < run.loss[0] for run in runs.values())
