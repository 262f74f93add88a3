"""Choosing the next token from logits."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

FILTERED = -jnp.inf


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn; applied in the order repetition_penalty, temperature, top_k, top_p, min_p.

    Attributes:
      temperature: logits are divided by it; 0 is greedy.
      top_k: keep the k most probable tokens (0: all).
      top_p: keep the smallest set whose probability reaches p (Holtzman et al. 2020; 1: all).
      min_p: drop tokens less probable than min_p times the most probable one (Nguyen et al. 2024; 0: none).
      repetition_penalty: logits of tokens that the row has already, prompt included, are divided by it where they are
        positive, else multiplied (Keskar et al. 2019, arXiv:1909.05858, section 4.1; 1: none).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature}: use 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: use 0 (all tokens) or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: use a probability in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p}: use a fraction in [0, 1]")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty={self.repetition_penalty}: use 1 (none) or a positive number")

    def method(self) -> "Method":
        """What a program is compiled for, and the numbers that it is then given."""

        def number(value: float, nothing: float) -> np.float32 | None:
            return None if value == nothing else np.float32(value)

        # A greedy draw is the same under every filter.
        greedy = self.temperature == 0
        return Method(
            temperature=None if greedy else np.float32(self.temperature),
            top_p=None if greedy else number(self.top_p, 1),
            min_p=None if greedy else number(self.min_p, 0),
            repetition_penalty=number(self.repetition_penalty, 1),
            top_k=0 if greedy else self.top_k,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Method:
    """`Sampling` for a compiled program: None where a step is left out, so that another number is no other program.

    Attributes:
      temperature: None draws greedily.
    """

    temperature: Float[Array, ""] | None
    top_p: Float[Array, ""] | None
    min_p: Float[Array, ""] | None
    repetition_penalty: Float[Array, ""] | None
    top_k: int = field(metadata={"static": True})


def penalize(logits: Float[Array, "B V"], method: Method, seen: Bool[Array, "B V"]) -> Float[Array, "B V"]:
    """Logits with those of the tokens seen made less likely."""
    penalty = method.repetition_penalty
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def filter_logits(logits: Float[Array, "B V"], method: Method) -> Float[Array, "B V"]:
    """Logits after temperature, with the tokens that the filters drop at -inf. Ties with the last kept are kept."""
    logits = logits.astype(jnp.float32) / method.temperature
    if 0 < method.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, method.top_k)[0][..., -1:]
        logits = jnp.where(logits < least, FILTERED, logits)
    if method.top_p is not None:
        ranked = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        kept = before < method.top_p  # the first token always is
        least = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, FILTERED, logits)
    if method.min_p is not None:
        least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(method.min_p)
        logits = jnp.where(logits < least, FILTERED, logits)
    return logits


def sample(
    logits: Float[Array, "B V"], keys: Key[Array, " B"], positions: Int[Array, " B"], method: Method
) -> Int[Array, " B"]:
    """One token a row. The draw depends on the row's key and position only, not on its batch mates."""
    if method.temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = filter_logits(logits, method)
    keys = jax.vmap(jax.random.fold_in)(keys, positions)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
