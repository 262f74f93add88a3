"""What every attention body is told."""

from dataclasses import dataclass

import jax
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
    """

    mask: Mask
    scale: float
    softcap: float | None = None
    aligned: bool = False
    relative: RelativeBias | None = None
    block: int | None = None
    rules: str = "default"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Where:
    """Who and where the tokens are: absolute positions (negative: padding or empty), packed segments, and orders.

    Orders (`ops.mask.visible`) are those of a prefix that sees itself in both directions, or None.
    """

    q_positions: Int[Array, "B T"]
    k_positions: Int[Array, "B S"]
    q_segments: Int[Array, "B T"] | None = None
    k_segments: Int[Array, "B S"] | None = None
    q_orders: Int[Array, "B T"] | None = None
    k_orders: Int[Array, "B S"] | None = None

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
