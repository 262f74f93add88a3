"""Laws of sampling: the filters keep what their definitions say, and draws follow the exact distribution."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer.ops.sampling import Sampling, filter_logits, penalize, sample

VOCAB = 12
filter_jitted = jax.jit(filter_logits)
sample_jitted = jax.jit(sample)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def distribution(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Probabilities [V] token by token from the definitions, in float64; without ties."""
    x = np.asarray(logits, np.float64) / sampling.temperature
    order = np.argsort(-x)
    kept = list(order[: sampling.top_k or len(x)])
    p = softmax(np.where(np.isin(np.arange(len(x)), kept), x, -np.inf))
    nucleus, mass = [], 0.0
    for token in kept:
        if mass >= sampling.top_p:
            break
        nucleus.append(token)
        mass += p[token]
    if sampling.top_p == 1:
        nucleus = kept
    best = p[nucleus].max()
    survivors = [token for token in nucleus if p[token] >= sampling.min_p * best]
    return softmax(np.where(np.isin(np.arange(len(x)), survivors), x, -np.inf))


METHODS = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=1.7),
    Sampling(top_k=3),
    Sampling(top_k=1),
    Sampling(top_p=0.6),
    Sampling(min_p=0.2),
    Sampling(temperature=0.8, top_k=8, top_p=0.9, min_p=0.05),
]


# A draw of distinct logits 1/4 apart: no ties, and no probability within rounding of a threshold by chance.
@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.integers(-20, 20), min_size=VOCAB, max_size=VOCAB, unique=True),
    sampling=st.sampled_from([*METHODS, Sampling(top_k=VOCAB), Sampling(top_k=100), Sampling(top_p=0.05)]),
)
def test_filters_keep_what_their_definitions_say(steps, sampling):
    logits = np.array(steps, np.float32) / 4
    got = np.asarray(jax.nn.softmax(filter_jitted(logits[None], sampling.method())))[0]
    want = distribution(logits, sampling)
    np.testing.assert_array_equal(got > 0, want > 0)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_ties_with_the_last_kept_token_are_kept():
    logits = jnp.array([[2.0, 1.0, 1.0, 0.0]])
    for sampling in (Sampling(top_k=2), Sampling(top_p=0.6)):
        kept = np.isfinite(np.asarray(filter_logits(logits, sampling.method())))[0]
        assert kept.tolist() == [True, True, True, False]


@pytest.mark.parametrize("sampling", METHODS, ids=str)
def test_draws_follow_the_distribution(sampling):
    logits = np.random.default_rng(3).normal(0, 1.5, VOCAB).astype(np.float32)
    want = distribution(logits, sampling)
    draws = 40_000
    # Half of the draws differ by key, half by position.
    seeds = jnp.arange(draws) // 2
    keys = jax.vmap(jax.random.key)(seeds)
    tokens = sample_jitted(jnp.broadcast_to(logits, (draws, VOCAB)), keys, jnp.arange(draws) % 2, sampling.method())
    counts = np.bincount(np.asarray(tokens), minlength=VOCAB)
    assert counts[want == 0].sum() == 0
    expected = draws * want[want > 0]
    chi_square = ((counts[want > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    # Mean k, variance 2k: five standard deviations, and room for one degree of freedom.
    assert chi_square <= freedom + 5 * np.sqrt(2 * freedom) + 5 * (freedom > 0)


def test_greedy_takes_the_largest_logit_and_needs_no_key():
    logits = jnp.array([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    draw = functools.partial(sample, logits, positions=jnp.arange(2), method=Sampling(temperature=0.0).method())
    assert draw(keys=jax.random.split(jax.random.key(0), 2)).tolist() == [1, 0]
    assert draw(keys=jax.random.split(jax.random.key(1), 2)).tolist() == [1, 0]


def test_a_draw_depends_on_its_own_key_and_position_only():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, VOCAB)).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), 6)
    positions = jnp.arange(6) * 7
    order = jnp.array([4, 2, 0, 5, 1, 3])
    whole = sample(logits, keys, positions, Sampling().method())
    mixed = sample(logits[order], keys[order], positions[order], Sampling().method())
    assert mixed.tolist() == whole[order].tolist()
    many = sample(jnp.zeros((64, VOCAB)), keys[jnp.zeros(64, int)], jnp.arange(64), Sampling().method())
    assert len(set(many.tolist())) > 6, "the position does not reach the draw"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
    ],
)
def test_values_without_a_meaning_are_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field}="):
        Sampling(**{field: value})


def test_a_penalty_makes_seen_tokens_less_likely_whatever_their_sign():
    logits = jnp.array([[2.0, -2.0, 2.0, -2.0]])
    got = penalize(logits, Sampling(repetition_penalty=2.0).method(), jnp.array([[True, True, False, False]]))
    assert got.tolist() == [[1.0, -4.0, 2.0, -2.0]]


def test_numbers_are_no_part_of_a_program():
    a, b = Sampling(temperature=0.5, top_p=0.9, min_p=0.1), Sampling(temperature=1.5, top_p=0.3, min_p=0.2)
    assert jax.tree.structure(a.method()) == jax.tree.structure(b.method())
    assert jax.tree.structure(a.method()) != jax.tree.structure(Sampling(top_p=0.9).method())
    greedy = Sampling(temperature=0.0, top_k=3, top_p=0.5).method()
    assert jax.tree.structure(greedy) == jax.tree.structure(Sampling(temperature=0.0).method())
