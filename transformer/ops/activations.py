"""Activation functions of the feed-forward layers."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
}


def activate(name: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Applies the named activation; dtype in = dtype out."""
    return ACTIVATIONS[name](x)
