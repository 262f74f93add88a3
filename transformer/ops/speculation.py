"""Speculative sampling: which guesses of a draft a model keeps, so that what is kept is distributed as its own draws.

Leviathan et al. 2023 (arXiv:2211.17192, algorithm 1) and Chen et al. 2023 (arXiv:2302.01318, algorithm 2).
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

# What a position's randomness is spent on. A position may be guessed again after an earlier guess was refused; the
# first time then left no trace, so that its key is as good as new.
STREAMS = ("guess", "accept", "replace")


def stream(
    keys: Key[Array, " B"], positions: Int[Array, "B T"], use: Literal["guess", "accept", "replace"]
) -> Key[Array, "B T"]:
    """A key for each use of each position's randomness."""

    def one(key, position):
        return jax.random.fold_in(jax.random.fold_in(key, position), STREAMS.index(use))

    return jax.vmap(jax.vmap(one, (None, 0)))(keys, positions)


def guess(logits: Float[Array, "B V"], keys: Key[Array, " B"] | None) -> Int[Array, " B"]:
    """A draft's token from its filtered logits; without keys the most probable one."""
    if keys is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def verify_greedy(
    logits: Float[Array, "B T V"], guesses: Int[Array, "B K"], room: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """(guesses kept, token after them): those that are the model's own choice; T = K + 1, the rest as `verify`."""
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    kept = _leading(guesses == best[:, :-1], room)
    return kept, jnp.take_along_axis(best, kept[:, None], axis=1)[:, 0]


def verify(
    logits: Float[Array, "B T V"],
    guesses: Int[Array, "B K"],
    guess_logits: Float[Array, "B K V"],
    room: Int[Array, " B"],
    accept: Key[Array, "B K"],
    replace: Key[Array, "B T"],
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """(guesses kept, token after them), jointly distributed as draws from the model alone.

    Guess x is kept with probability min(1, p(x) / q(x)); in place of the first that isn't, a token is drawn from
    max(p - q, 0), normed. After K kept ones a token is drawn from p.

    Args:
      logits: the model's, filtered, before each guess and after the last: T = K + 1.
      guess_logits: the filtered logits that each guess was drawn from.
      room: the most guesses that a row may keep. One that keeps as many has no use for the token after them.
      accept, replace: keys of the positions guessed; those of `replace` include the position after the last.
    """
    p, q = jax.nn.softmax(logits, axis=-1), jax.nn.softmax(guess_logits, axis=-1)
    chosen_p, chosen_q = (jnp.take_along_axis(x, guesses[..., None], axis=-1)[..., 0] for x in (p[:, :-1], q))
    luck = jax.vmap(jax.vmap(jax.random.uniform))(accept)
    kept = _leading(luck * chosen_q < chosen_p, room)
    at = kept[:, None, None]
    # Nothing was guessed after the last guess.
    q = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
    p, q = (jnp.take_along_axis(x, at, axis=1)[:, 0] for x in (p, q))
    rest = jnp.maximum(p - q, 0)
    # Where p and q are equal but for rounding, nothing may be left of either.
    rest = jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0, rest, p)
    keys = jnp.take_along_axis(replace, kept[:, None], axis=1)[:, 0]
    return kept, jax.vmap(jax.random.categorical)(keys, jnp.log(rest)).astype(jnp.int32)


def _leading(good: Array, room: Int[Array, " B"]) -> Int[Array, " B"]:
    """How many guesses are good before the first that isn't, or for which there is no room."""
    within = jnp.arange(good.shape[1]) < room[:, None]
    return jnp.sum(jnp.cumprod((good & within).astype(jnp.int32), axis=1), axis=1)
