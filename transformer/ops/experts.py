"""Expert layers: every token through the experts that its router picked."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer.ops.activations import activate, gate
from transformer.spec import FeedForward


class ExpertWeights(NamedTuple):
    """Kernels [E, in, out] and biases [E, out] of all experts; a missing part is None."""

    up: Float[Array, "E D F"]
    gate: Float[Array, "E D F"] | None
    down: Float[Array, "E F D"]
    up_bias: Float[Array, "E F"] | None = None
    gate_bias: Float[Array, "E F"] | None = None
    down_bias: Float[Array, "E D"] | None = None


def one_expert(spec: FeedForward, x: Float[Array, "*B D"], w: ExpertWeights) -> Float[Array, "*B D"]:
    """The feed-forward of a single expert, whose weights have no expert axis."""

    def linear(x, kernel, bias):
        y = jnp.einsum("...i,io->...o", x, kernel.astype(x.dtype))
        return y if bias is None else y + bias.astype(x.dtype)

    up = linear(x, w.up, w.up_bias)
    hidden = gate(spec, linear(x, w.gate, w.gate_bias), up) if spec.gated else activate(spec.activation, up)
    return linear(hidden, w.down, w.down_bias)


def dense(
    spec: FeedForward,
    x: Float[Array, "*B D"],
    index: Int[Array, "*B k"],
    weight: Float[Array, "*B k"],
    experts: ExpertWeights,
) -> Float[Array, "*B D"]:
    """Every expert on every token, one after the other, weighted by zero where it was not picked: the reference."""

    def add(total, expert):
        number, weights = expert
        share = jnp.sum(jnp.where(index == number, weight, 0), axis=-1, keepdims=True)
        return total + share * one_expert(spec, x, weights).astype(jnp.float32), None

    numbers = jnp.arange(experts.up.shape[0])
    total, _ = jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), (numbers, experts))
    return total.astype(x.dtype)
