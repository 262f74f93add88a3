"""What every attention body is told."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Int

from transformer.spec import Mask


@dataclass(frozen=True)
class Call:
    """The static part of a call: hashable, the same for every layer of a kind.

    Attributes:
      scale: multiplies q·k.
      softcap: scores become c·tanh(scores / c) before the mask.
      aligned: query i and key i are the same token (self-attention without a cache) and positions rise strictly
        along a row within each segment, so that row indices bound what the mask can show: |i - j| is at most
        the distance of positions. Lets a body skip blocks at trace time.
      block: rows of a query or key block, for bodies that work in blocks.
    """

    mask: Mask
    scale: float
    softcap: float | None = None
    aligned: bool = False
    block: int = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Where:
    """Who and where the tokens are: absolute positions (negative: padding or empty) and packed segments."""

    q_positions: Int[Array, "B T"]
    k_positions: Int[Array, "B S"]
    q_segments: Int[Array, "B T"] | None = None
    k_segments: Int[Array, "B S"] | None = None
