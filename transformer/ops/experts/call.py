"""What every body of an expert layer is told."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxtyping import Array, Float

from transformer import axes as ax
from transformer.ops.activations import activate, gate
from transformer.ops.products import product, shift
from transformer.spec import FeedForward


@dataclass(frozen=True)
class Call:
    """The static part of a call: hashable, the same for every layer of a kind.

    Attributes:
      expert: the feed-forward of one expert.
      num_experts: E, over all devices.
      capacity: slots of an expert in the body `capacity`, as a multiple of an even share of the assignments.
      exchange: how tokens reach experts on other devices.
      buffer: rows that a device holds room for in an all-to-all, as a multiple of an even share.
      rules: preset of `sharding.py`.
      remat: what is exchanged is computed again in the backward pass, not kept.
      reduce_dtype: in which gradients of weights are summed over devices; None: that of the tokens.
    """

    expert: FeedForward
    num_experts: int
    capacity: float = 1.25
    exchange: Literal["auto", "all_to_all", "all_gather"] = "auto"
    buffer: float = 2.0
    rules: str = "default"
    remat: bool = False
    reduce_dtype: str | None = None


class ExpertWeights(NamedTuple):
    """Kernels [E, in, out] and biases [E, out] of all experts; a missing part is None."""

    up: Float[Array, "E D F"]
    gate: Float[Array, "E D F"] | None
    down: Float[Array, "E F D"]
    up_bias: Float[Array, "E F"] | None = None
    gate_bias: Float[Array, "E F"] | None = None
    down_bias: Float[Array, "E D"] | None = None


# Logical axes of each part.
AXES = ExpertWeights(
    up=(ax.EXPERTS, ax.EXPERT_EMBED, ax.MLP),
    gate=(ax.EXPERTS, ax.EXPERT_EMBED, ax.MLP),
    down=(ax.EXPERTS, ax.MLP, ax.EXPERT_EMBED),
    up_bias=(ax.EXPERTS, ax.MLP),
    gate_bias=(ax.EXPERTS, ax.MLP),
    down_bias=(ax.EXPERTS, ax.EXPERT_EMBED),
)


class Hidden(NamedTuple):
    """What comes before the activation; `gate` is None where the feed-forward has none."""

    gate: Float[Array, "*B F"] | None
    up: Float[Array, "*B F"]


def one_expert(spec: FeedForward, x: Float[Array, "*B D"], w: ExpertWeights) -> Float[Array, "*B D"]:
    """The feed-forward of a single expert, whose weights have no expert axis."""
    return leave(spec, enter(x, w), w)


def enter(x: Float[Array, "*B D"], w: ExpertWeights) -> Hidden:
    """The first half of `one_expert`."""
    return Hidden(None if w.gate is None else _linear(x, w.gate, w.gate_bias), _linear(x, w.up, w.up_bias))


def leave(spec: FeedForward, hidden: Hidden, w: ExpertWeights) -> Float[Array, "*B D"]:
    """The second half of `one_expert`."""
    return _linear(activated(spec, hidden), w.down, w.down_bias)


def activated(spec: FeedForward, hidden: Hidden) -> Float[Array, "*B F"]:
    """What goes into the down projection."""
    return gate(spec, *hidden) if spec.gated else activate(spec.activation, hidden.up)


def _linear(x, kernel, bias):
    y = product(x, kernel, 1)
    return y if bias is None else shift(y, bias)
