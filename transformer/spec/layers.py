"""The parts of one layer."""

from dataclasses import dataclass
from typing import Literal

from transformer.spec.check import require
from transformer.spec.positions import Mask, Rope


@dataclass(frozen=True, kw_only=True)
class Norm:
    """LayerNorm (mean and variance) or RMSNorm (root mean square), statistics always in float32.

    Attributes:
      offset: added to the stored scale (1.0 where a checkpoint keeps scales centred on zero, as Gemma's does).
      bias: a learned shift; LayerNorm only.
      scale_in_float32: multiply by the scale before the cast back to the activation dtype, else after it
        (families differ; it shows in bfloat16 only).
    """

    kind: Literal["layer", "rms"]
    eps: float
    offset: float
    bias: bool
    scale_in_float32: bool

    def __post_init__(self):
        require(self.kind in ("layer", "rms"), f'norm.kind={self.kind!r}: use "layer" or "rms"')
        require(self.eps > 0, f"norm.eps={self.eps}: must be positive")
        require(not (self.bias and self.kind == "rms"), "norm.bias=True: RMSNorm has no bias")


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Multi-head attention; MHA, GQA and MQA differ in `num_kv_heads` only.

    Attributes:
      scale: multiplies q·k (usually head_dim ** -0.5).
      qkv_bias, out_bias: biases of the projections.
      qk_norm: norm over each head of q and k, before the rotation.
      softcap: scores become c·tanh(scores / c), before the mask.
      sinks: one learned logit a query head joins the softmax and its probability is dropped (gpt-oss).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    mask: Mask
    scale: float
    rope: Rope | None
    qkv_bias: bool
    out_bias: bool
    qk_norm: Norm | None = None
    softcap: float | None = None
    sinks: bool = False

    def __post_init__(self):
        heads, kv_heads = self.num_heads, self.num_kv_heads
        require(kv_heads >= 1, f"num_kv_heads={kv_heads}: use at least 1")
        require(heads % kv_heads == 0, f"num_heads={heads}: must be a multiple of num_kv_heads={kv_heads}")
        require(self.head_dim >= 1, f"head_dim={self.head_dim}: use at least 1")
        dim = self.rope.dim if self.rope else 0
        require(dim <= self.head_dim, f"rope.dim={dim}: can't exceed head_dim={self.head_dim}")
        require(self.softcap is None or self.softcap > 0, f"softcap={self.softcap}: must be positive")


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """Position-wise layer: down(act(up x)), or down(act(gate x) · up x) when gated (Shazeer 2020)."""

    d_ff: int
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"]
    gated: bool
    bias: bool

    def __post_init__(self):
        require(self.d_ff >= 1, f"d_ff={self.d_ff}: use at least 1")
        known = ("relu", "gelu", "gelu_tanh", "silu")
        require(self.activation in known, f"activation={self.activation!r}: use one of {known}")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One layer: a mixer of positions and a feed-forward, each on its residual branch.

    Attributes:
      placement: where the norm sits. pre: x + F(norm x); post: norm(x + F x); sandwich: x + norm'(F(norm x)).
    """

    mixer: Attention
    ffn: FeedForward
    norm: Norm
    placement: Literal["pre", "post", "sandwich"]

    def __post_init__(self):
        known = ("pre", "post", "sandwich")
        require(self.placement in known, f"placement={self.placement!r}: use one of {known}")
