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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def activate(name: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Applies the named activation, in float32; dtype in = dtype out. Its gradient keeps nothing but x."""
    return _activate(name, x)


def _activate(name: str, x: Array) -> Array:
    # In float32, what it is made of is rounded once, and XLA:CPU takes a quarter of bfloat16's time.
    return ACTIVATIONS[name](x.astype(jnp.float32)).astype(x.dtype)


activate.defvjp(
    lambda name, x: (_activate(name, x), x), lambda name, x, d: jax.vjp(functools.partial(_activate, name), x)[1](d)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gate(spec: FeedForward, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
    """What a gated layer projects down: act(gate) · up, or its clamped form (openai/gpt-oss, torch/model.py)."""
    return _gate(spec, gate, up)


def _gate(spec: FeedForward, gate: Array, up: Array) -> Array:
    dtype, gate, up = up.dtype, gate.astype(jnp.float32), up.astype(jnp.float32)
    if spec.clamp is None:
        return (ACTIVATIONS[spec.activation](gate) * up).astype(dtype)
    gate = jnp.minimum(gate, spec.clamp.limit)
    up = jnp.clip(up, -spec.clamp.limit, spec.clamp.limit)
    return (gate * jax.nn.sigmoid(spec.clamp.alpha * gate) * (up + spec.clamp.offset)).astype(dtype)


def _gate_backward(spec: FeedForward, kept: tuple[Array, Array], d: Array) -> tuple[Array, Array]:
    # Three products make these, and four take what is made of them.
    *kept, d = alone((*kept, d))
    return alone(jax.vjp(functools.partial(_gate, spec), *kept)[1](d))


gate.defvjp(lambda spec, gate, up: (_gate(spec, gate, up), (gate, up)), _gate_backward)
