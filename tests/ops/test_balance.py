"""What is measured of a routing, and the losses and corrections made of it, against sums by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.ops import balance
from transformer.spec import Router

ROWS, LENGTH, E, K = 3, 10, 5, 2
SIGMOID = Router(
    score="sigmoid", normalize=True, scale=1.0, bias=False, correction=True, groups=1, top_groups=1, group_score="max"
)


def routing(seed: int = 0):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((ROWS, LENGTH, E)).astype(np.float32) * 2
    segments = np.array([[1] * 4 + [2] * 6, [3] * 3 + [1] * 1 + [0] * 6, [0] * 2 + [7] * 8], np.int32)
    return logits, np.argsort(-logits, axis=-1)[..., :K], segments


def measured(logits, index, segments, router=SIGMOID, rows=slice(None)):
    probability = balance.probabilities(router, jnp.asarray(logits))
    return jax.device_get(
        balance.measure(logits[rows], probability[rows], index[rows], segments[rows] > 0, segments[rows], jnp.zeros(()))
    )


@pytest.mark.parametrize("score", ["softmax", "softmax_picked", "sigmoid"])
def test_probabilities_sum_to_one(score):
    router = dataclasses.replace(SIGMOID, score=score, correction=False, normalize=False)
    logits = routing()[0]
    got = balance.probabilities(router, logits.astype(jnp.bfloat16))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got.sum(axis=-1), 1, atol=1e-6)
    np.testing.assert_array_equal(got.argmax(axis=-1), logits.astype(jnp.bfloat16).astype(np.float32).argmax(axis=-1))


def test_sums_are_over_real_tokens_by_hand():
    logits, index, segments = routing()
    load, p = measured(logits, index, segments), np.asarray(balance.probabilities(SIGMOID, logits), np.float64)
    real = segments > 0
    assert load.tokens == real.sum()
    np.testing.assert_array_equal(load.picks, np.bincount(index[real].reshape(-1), minlength=E))
    np.testing.assert_allclose(load.probability, p[real].sum(axis=0), rtol=1e-5)
    np.testing.assert_allclose(load.z, np.sum(np.log(np.exp(logits[real]).sum(axis=-1)) ** 2), rtol=1e-5)
    np.testing.assert_allclose(load.entropy, -np.sum(p[real] * np.log(p[real])), rtol=1e-5)
    by_document = 0.0
    for row in range(ROWS):
        for name in set(segments[row]) - {0}:
            here = segments[row] == name
            chosen = np.bincount(index[row][here].reshape(-1), minlength=E)
            f, mean = E / (K * here.sum()) * chosen, p[row][here].mean(axis=0)
            by_document += here.sum() * np.sum(f * mean)
    np.testing.assert_allclose(load.sequence, by_document, rtol=1e-5)


def test_rows_without_segments_are_one_document():
    logits, index, _ = routing()
    ones = np.ones((ROWS, LENGTH), np.int32)
    probability = balance.probabilities(SIGMOID, jnp.asarray(logits))
    got = balance.measure(logits, probability, index, ones > 0, None, jnp.zeros(()))
    np.testing.assert_allclose(got.sequence, measured(logits, index, ones).sequence, rtol=1e-6)


def test_parts_add_up_to_the_whole():
    """Every sum, and the auxiliary loss and its gradient once the whole batch's shares are given."""
    logits, index, segments = routing()
    whole = measured(logits, index, segments)
    parts = [measured(logits, index, segments, rows=slice(i, i + 1)) for i in range(ROWS)]
    jax.tree.map(lambda *x: np.testing.assert_allclose(x[0], sum(x[1:]), rtol=1e-5), whole, *parts)
    share = balance.shares(whole.picks)
    np.testing.assert_allclose(
        balance.auxiliary(whole, share), sum(balance.auxiliary(p, share) for p in parts), rtol=1e-5
    )


def test_auxiliary_loss_is_one_a_token_when_even_and_most_when_collapsed():
    def load(picks, probability):
        zero = jnp.zeros(())
        return balance.Load(jnp.float32(8), jnp.asarray(picks), 8 * jnp.asarray(probability), zero, zero, zero, zero)

    even, one = load([4.0] * 4, [0.25] * 4), load([16.0, 0, 0, 0], [1.0, 0, 0, 0])
    for got, want in ((even, 1), (one, 4)):
        np.testing.assert_allclose(balance.auxiliary(got, balance.shares(got.picks)) / 8, want)
    assert balance.summary(even)["violation"] == 1 and balance.summary(one)["violation"] == 4


def test_correction_moves_by_the_rate_against_the_load():
    start = jnp.asarray([[0.5, 0.0, -1.0, 0.0]] * 2)
    picks = jnp.asarray([[9.0, 1.0, 5.0, 5.0], [0.0, 0.0, 0.0, 4.0]])
    np.testing.assert_allclose(
        balance.corrected(start, picks, 0.1) - start, [[-0.1, 0.1, 0, 0], [0.1, 0.1, 0.1, -0.1]], atol=1e-6
    )


def test_nothing_routed_is_no_division_by_zero():
    logits, index, segments = routing()
    load = measured(logits, index, 0 * segments)
    assert all(np.all(x == 0) for x in jax.tree.leaves(load))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(balance.summary(load)))
