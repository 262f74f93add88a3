"""Choosing the next token from logits."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

FILTERED = -jnp.inf


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn; the filters apply in the order temperature, top_k, top_p, min_p.

    Attributes:
      temperature: logits are divided by it; 0 is greedy.
      top_k: keep the k most probable tokens (0: all).
      top_p: keep the smallest set whose probability reaches p (Holtzman et al. 2020; 1: all).
      min_p: drop tokens less probable than min_p times the most probable one (Nguyen et al. 2024; 0: none).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature}: use 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: use 0 (all tokens) or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: use a probability in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p}: use a fraction in [0, 1]")


def filter_logits(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Logits after temperature, with the tokens that the filters drop at -inf. Ties with the last kept are kept."""
    logits = logits.astype(jnp.float32) / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][..., -1:]
        logits = jnp.where(logits < least, FILTERED, logits)
    if sampling.top_p < 1:
        ranked = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        kept = before < sampling.top_p  # the first token always is
        least = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, FILTERED, logits)
    if sampling.min_p > 0:
        least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(sampling.min_p)
        logits = jnp.where(logits < least, FILTERED, logits)
    return logits


def sample(
    logits: Float[Array, "B V"], keys: Key[Array, " B"], positions: Int[Array, " B"], sampling: Sampling
) -> Int[Array, " B"]:
    """One token a row. The draw depends on the row's key and position only, not on its batch mates."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = filter_logits(logits, sampling)
    keys = jax.vmap(jax.random.fold_in)(keys, positions)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
