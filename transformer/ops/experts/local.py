"""Tokens through the experts of the same device."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer.ops.experts import products, slots
from transformer.ops.experts.call import Call, ExpertWeights
from transformer.sharding import platform


def grouped(
    call: Call,
    x: Float[Array, "N D"],
    index: Int[Array, "N k"],
    w: ExpertWeights,
    expected: int,
    most: int | None = None,
) -> Float[Array, "N k D"]:
    """What each assignment's expert makes of its token, exact.

    The cost is that of the assignments; on CPUs, of `expected` ones at least.

    Args:
      index: among the experts in `w`; their number and above: none, the result is zero.
      expected: assignments that have an expert here where loads are even.
      most: an upper bound of those that have one, where they may be far fewer than N·k.
    """
    num_experts = w.up.shape[0]
    if platform() == "cpu":
        tile, room = products.tile_rows(expected, num_experts), products.room(expected, num_experts)
        seats = slots.grouped(index, num_experts, tile, most, room)
        rows = products.tiled(call.expert, slots.spread(x, seats), seats, w, room)
    else:
        seats = slots.grouped(index, num_experts, 1, most)
        rows = products.ragged(call.expert, slots.spread(x, seats), seats, w)
    return slots.collect(rows, seats)


def combine(parts: Float[Array, "N k D"], weight: Float[Array, "N k"]) -> Float[Array, "N D"]:
    """The weighted sum over each token's experts, in float32 before the cast back."""
    return jnp.einsum("nkd,nk->nd", parts.astype(jnp.float32), weight).astype(parts.dtype)
