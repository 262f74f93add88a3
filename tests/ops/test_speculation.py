"""Speculative sampling by itself: what is kept and replaced is distributed as the model's own draws."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from transformer.ops import speculation

VOCAB, GUESSES, ROWS = 4, 2, 40_000
# No test fails by chance more often than once in a million runs; the seeds are fixed.
UNLIKELY = 1e-6


def tables(seed: int, sharpness: float) -> np.ndarray:
    """Logits after every prefix of up to two tokens: [1 + V, V] of none and of one, in base V."""
    return np.random.default_rng(seed).standard_normal((1 + VOCAB, VOCAB)) * sharpness


def rounds(p_logits: np.ndarray, q_logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(kept [ROWS], tokens [ROWS, 2]) of one round of two guesses each; what isn't kept is drawn plainly in the end."""
    keys = jax.random.split(jax.random.key(1), ROWS)
    positions = jnp.broadcast_to(jnp.arange(GUESSES + 1), (ROWS, GUESSES + 1))
    guess, accept, replace = (speculation.stream(keys, positions, use) for use in speculation.STREAMS)
    p, q = jnp.asarray(p_logits, jnp.float32), jnp.asarray(q_logits, jnp.float32)

    def after(table, first):
        return table[1 + first]

    first = speculation.guess(jnp.broadcast_to(q[0], (ROWS, VOCAB)), guess[:, 0])
    second = speculation.guess(after(q, first), guess[:, 1])
    q_of = jnp.stack([jnp.broadcast_to(q[0], (ROWS, VOCAB)), after(q, first)], axis=1)
    # After two tokens the law is that after the second.
    p_of = jnp.stack([jnp.broadcast_to(p[0], (ROWS, VOCAB)), after(p, first), after(p, second)], axis=1)
    guesses = jnp.stack([first, second], axis=1)
    room = jnp.full(ROWS, GUESSES)
    kept, token = jax.jit(speculation.verify)(p_of, guesses, q_of, room, accept[:, :-1], replace)
    # A row that kept nothing has one token; another round would go on from it, here a plain draw does.
    one = jnp.where(kept > 0, first, token)
    more = jax.vmap(jax.random.categorical)(jax.random.split(jax.random.key(2), ROWS), after(p, one))
    two = jnp.where(kept == 0, more, jnp.where(kept == 1, token, second))
    return np.asarray(kept), np.stack([one, two], axis=1)


def law(logits: np.ndarray) -> np.ndarray:
    """Probability of each pair of tokens."""
    p = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    return np.array([p[0, a] * p[1 + a, b] for a, b in itertools.product(range(VOCAB), repeat=2)])


@pytest.mark.parametrize("filtered", [False, True])
def test_two_tokens_are_distributed_as_without_a_draft(filtered):
    p, q = tables(0, 1.0), tables(1, 2.0)
    if filtered:  # tokens that only one of them may draw
        p[:, 0], q[:, 1] = -np.inf, -np.inf
    kept, tokens = rounds(p, q)
    assert {0, 1, 2} == set(kept.tolist())
    counts, want = np.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB**2), law(p) * ROWS
    assert counts[want == 0].sum() == 0
    assert stats.chisquare(counts[want > 0], want[want > 0]).pvalue > UNLIKELY
    # The test has power: the draft's own law is far off.
    other = law(q) + 1e-9
    assert stats.chisquare(counts, other / other.sum() * ROWS).pvalue < UNLIKELY


def test_share_kept_is_the_overlap_of_the_laws():
    """Leviathan et al., theorem 3.5: the first guess is kept with probability sum of min(p, q)."""
    p, q = tables(0, 1.0), tables(1, 2.0)
    kept, _ = rounds(p, q)
    first = np.minimum(*(np.exp(x[0] - np.logaddexp.reduce(x[0])) for x in (p, q))).sum()
    assert abs((kept > 0).mean() - first) < 5 * np.sqrt(first * (1 - first) / ROWS)


def test_a_draft_of_the_same_law_is_always_right():
    p = tables(0, 3.0)
    assert (rounds(p, p)[0] == GUESSES).all()


def test_greedy_keeps_the_leading_guesses_that_are_the_models_choice_and_no_more_than_fit():
    logits = jax.nn.one_hot(jnp.array([[3, 1, 2, 0]] * 4), VOCAB)
    guesses = jnp.array([[3, 1, 2], [3, 0, 2], [1, 1, 2], [3, 1, 2]])
    kept, token = speculation.verify_greedy(logits, guesses, jnp.array([3, 3, 3, 1]))
    np.testing.assert_array_equal(kept, [3, 1, 0, 1])
    np.testing.assert_array_equal(token, [0, 1, 3, 1])


def test_streams_of_a_position_differ_and_are_the_rows_own():
    keys = jax.random.split(jax.random.key(0), 2)
    drawn = {
        np.asarray(jax.random.key_data(speculation.stream(keys, jnp.array([[5, 6], [5, 6]]), use)))[at].tobytes()
        for use in speculation.STREAMS
        for at in itertools.product(range(2), repeat=2)
    }
    assert len(drawn) == 12
