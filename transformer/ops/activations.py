"""Activation functions of the feed-forward layers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer.spec import FeedForward

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
}


def activate(name: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Applies the named activation; dtype in = dtype out."""
    return ACTIVATIONS[name](x)


def gate(spec: FeedForward, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
    """What a gated layer projects down: act(gate) · up, or its clamped form (openai/gpt-oss, torch/model.py)."""
    if spec.clamp is None:
        return activate(spec.activation, gate) * up
    gate = jnp.minimum(gate, spec.clamp.limit)
    up = jnp.clip(up, -spec.clamp.limit, spec.clamp.limit)
    return gate * jax.nn.sigmoid(spec.clamp.alpha * gate) * (up + spec.clamp.offset)
