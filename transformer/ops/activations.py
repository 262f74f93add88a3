"""Activation functions of the feed-forward layers."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer.sharding import alone
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gate(spec: FeedForward, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
    """What a gated layer projects down: act(gate) · up, or its clamped form (openai/gpt-oss, torch/model.py)."""
    return _gate(spec, gate, up)


def _gate(spec: FeedForward, gate: Array, up: Array) -> Array:
    if spec.clamp is None:
        return activate(spec.activation, gate) * up
    gate = jnp.minimum(gate, spec.clamp.limit)
    up = jnp.clip(up, -spec.clamp.limit, spec.clamp.limit)
    return gate * jax.nn.sigmoid(spec.clamp.alpha * gate) * (up + spec.clamp.offset)


def _gate_backward(spec: FeedForward, kept: tuple[Array, Array], d: Array) -> tuple[Array, Array]:
    # Three products make these, and four take what is made of them.
    *kept, d = alone((*kept, d))
    return alone(jax.vjp(functools.partial(_gate, spec), *kept)[1](d))


gate.defvjp(lambda spec, gate, up: (_gate(spec, gate, up), (gate, up)), _gate_backward)
