"""Every expert on every token, weighted by zero where it was not picked: the reference."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer.ops.experts.call import Call, ExpertWeights, one_expert


def apply(
    call: Call,
    x: Float[Array, "*B D"],
    index: Int[Array, "*B k"],
    weight: Float[Array, "*B k"],
    experts: ExpertWeights,
) -> Float[Array, "*B D"]:
    """One expert after the other, so that no more than one hidden layer is alive."""

    def add(total, expert):
        number, weights = expert
        share = jnp.sum(jnp.where(index == number, weight, 0), axis=-1, keepdims=True)
        return total + share * one_expert(call.expert, x, weights).astype(jnp.float32), None

    numbers = jnp.arange(call.num_experts)
    total, _ = jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), (numbers, experts))
    return total.astype(x.dtype)
