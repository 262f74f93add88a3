"""What every attention body is told."""

from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer.ops.mask import visible
from transformer.spec import Mask, RelativeBias


@dataclass(frozen=True)
class Call:
    """The static part of a call: hashable, the same for every layer of a kind.

    Attributes:
      scale: multiplies q·k.
      softcap: scores become c·tanh(scores / c) before the mask.
      aligned: query i and key i are the same token (self-attention without a cache) and positions rise strictly
        along a row within each segment, so that row indices bound what the mask can show: |i - j| is at most
        the distance of positions. Lets a body skip blocks at trace time.
      relative: how the table of `Extra.bias` is read.
      block: rows of a query or key block, for bodies that work in blocks; None: the body's choice.
      rules: preset of `transformer.sharding`, for bodies that run on each device by themselves.
      exchange: how keys reach queries where the mesh splits rows along their length (`context.py`).
    """

    mask: Mask
    scale: float
    softcap: float | None = None
    aligned: bool = False
    relative: RelativeBias | None = None
    block: int | None = None
    rules: str = "default"
    exchange: Literal["auto", "gather", "ring"] = "auto"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Where:
    """Who and where the tokens are: absolute positions (negative: padding or empty), packed segments, and orders.

    Orders (`ops.mask.visible`) are those of a prefix that sees itself in both directions, or None.

    Attributes:
      zigzag: the tokens of both sides lie in the order of `ops.zigzag`; `Call.aligned` is of the order before.
    """

    q_positions: Int[Array, "B T"]
    k_positions: Int[Array, "B S"]
    q_segments: Int[Array, "B T"] | None = None
    k_segments: Int[Array, "B S"] | None = None
    q_orders: Int[Array, "B T"] | None = None
    k_orders: Int[Array, "B S"] | None = None
    zigzag: bool = field(metadata={"static": True}, default=False)

    def visible(self, mask: Mask) -> Bool[Array, "B T S"]:
        """`ops.mask.visible` of these tokens."""
        positions, segments = (self.q_positions, self.k_positions), (self.q_segments, self.k_segments)
        return visible(mask, *positions, *segments, self.q_orders, self.k_orders)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Extra:
    """Learned terms of the softmax besides q·k.

    Attributes:
      sinks: a logit a query head of a key without a value (gpt-oss).
      bias: the table of relative biases, a row a bucket (`Call.relative`).
    """

    sinks: Float[Array, " N"] | None = None
    bias: Float[Array, "R N"] | None = None


NOTHING = Extra()


def deltas(out: Float[Array, "B T N H"], d_out: Float[Array, "B T N H"]) -> Float[Array, "B N T"]:
    """The mean of each query's d_weights under its weights, in float32 (FlashAttention, arXiv:2205.14135, B.2)."""
    return jnp.einsum("btnh,btnh->bnt", out, d_out, preferred_element_type=jnp.float32)


def gradients_of_extra(
    extra: Extra, log_total: Float[Array, "B N T"], delta: Float[Array, "B N T"], d_table: Float[Array, "B N R"] | None
) -> Extra:
    """Of the learned terms: a sink weighs what its logit is worth in each query's softmax, and its value is 0."""
    d_sinks = None
    if extra.sinks is not None:
        weights = jnp.exp(extra.sinks.astype(jnp.float32)[:, None] - log_total)
        d_sinks = -jnp.sum(weights * delta, axis=(0, 2)).astype(extra.sinks.dtype)
    if d_table is not None:
        d_table = jnp.sum(d_table, axis=0).T.astype(extra.bias.dtype)
    return Extra(d_sinks, d_table)
