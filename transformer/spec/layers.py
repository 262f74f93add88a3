"""The parts of one layer."""

from dataclasses import dataclass
from typing import Literal

from transformer.spec.check import require
from transformer.spec.positions import Mask, RelativeBias, RelativeKeys, Rope


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
class CacheDims:
    """What a layer keeps of a token: `heads` keys of `key` features and as many values of `value` features."""

    heads: int
    key: int
    value: int

    @property
    def numbers(self) -> int:
        """Numbers a token a layer."""
        return self.heads * (self.key + self.value)

    @property
    def vectors(self) -> int:
        """Keys and values a token a layer."""
        return self.heads * (1 + (self.value > 0))


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Multi-head attention; MHA, GQA and MQA differ in `num_kv_heads` only.

    Attributes:
      scale: multiplies q·k (usually head_dim ** -0.5).
      qkv_bias, out_bias: biases of the projections.
      qk_norm: norm of q and k before the rotation: over each head's features, or `qk_norm_joint`.
      qk_norm_joint: the norm runs over the features of all heads at once, with a scale for each (OLMo-2).
      softcap: scores become c·tanh(scores / c), before the mask.
      sinks: one learned logit a query head joins the softmax and its probability is dropped (gpt-oss).
      relative: what the distance of query and key adds to their score.
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
    qk_norm_joint: bool = False
    softcap: float | None = None
    sinks: bool = False
    relative: RelativeBias | RelativeKeys | None = None

    def __post_init__(self):
        heads, kv_heads = self.num_heads, self.num_kv_heads
        require(kv_heads >= 1, f"num_kv_heads={kv_heads}: use at least 1")
        require(heads % kv_heads == 0, f"num_heads={heads}: must be a multiple of num_kv_heads={kv_heads}")
        require(self.head_dim >= 1, f"head_dim={self.head_dim}: use at least 1")
        dim = self.rope.dim if self.rope else 0
        require(dim <= self.head_dim, f"rope.dim={dim}: can't exceed head_dim={self.head_dim}")
        require(self.softcap is None or self.softcap > 0, f"softcap={self.softcap}: must be positive")
        joint = self.qk_norm_joint
        require(self.qk_norm is not None or not joint, f"qk_norm_joint={joint}: needs a qk_norm to run jointly")
        cut = self.relative is not None and self.mask.sinks
        require(
            not cut, f"mask.sinks={self.mask.sinks}: distances cut short have no meaning with relative={self.relative}"
        )

    @property
    def cache_dims(self) -> CacheDims:
        """A key and a value of every kv head."""
        return CacheDims(heads=self.num_kv_heads, key=self.head_dim, value=self.head_dim)


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention, MLA (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Keys and values of all heads come from one latent vector a token; a rotary key of its own is shared by all heads.

    Attributes:
      q_rank: width of the query's latent; None projects queries straight from the residual stream.
      kv_rank: width of the key/value latent. The cache keeps kv_rank + rope_dim numbers a token.
      nope_dim, rope_dim: features of a query or key head without and with rotation.
      v_dim: features of a value head.
      scale: multiplies q·k, whatever the rope's scaling adds included.
      latent_norm: norm of both latents.
      bias: of the projections down to the latents, and out; the ones up from the latents have none.
    """

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    mask: Mask
    scale: float
    rope: Rope
    latent_norm: Norm
    bias: bool

    def __post_init__(self):
        for name in ("num_heads", "kv_rank", "nope_dim", "v_dim"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)}: use at least 1")
        require(self.q_rank is None or self.q_rank >= 1, f"q_rank={self.q_rank}: use at least 1, or None")
        require(self.rope.dim == self.rope_dim, f"rope.dim={self.rope.dim}: must be rope_dim={self.rope_dim}")

    @property
    def cache_dims(self) -> CacheDims:
        """The latent and the rotary key, once for all heads; values are made from the latent."""
        return CacheDims(heads=1, key=self.kv_rank + self.rope_dim, value=0)


ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")


@dataclass(frozen=True, kw_only=True)
class ClampedGate:
    """gpt-oss's gate: g·sigmoid(alpha·g)·(u + offset) with g at most `limit` and u within ±`limit`."""

    limit: float
    alpha: float
    offset: float


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """Position-wise layer: down(act(up x)), or down(act(gate x) · up x) when gated (Shazeer 2020).

    Attributes:
      clamp: replaces act(gate) · up.
    """

    d_ff: int
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"]
    gated: bool
    bias: bool
    clamp: ClampedGate | None = None

    def __post_init__(self):
        require(self.d_ff >= 1, f"d_ff={self.d_ff}: use at least 1")
        require(self.activation in ACTIVATIONS, f"activation={self.activation!r}: use one of {ACTIVATIONS}")
        clamped = self.clamp is not None
        require(not clamped or (self.gated and self.activation == "silu"), "clamp: needs gated=True and silu")


@dataclass(frozen=True, kw_only=True)
class Router:
    """How a token's experts are picked and weighed.

    Attributes:
      score: softmax over all experts, softmax over the picked ones only, or a sigmoid of each.
      normalize: divide the picked scores by their sum.
      scale: multiplies the weights in the end.
      bias: a learned bias of the logits.
      correction: a bias added to the scores for picking only, never to the weights (loss-free balancing).
      groups, top_groups: experts lie in `groups` equal groups, and only the best `top_groups` are picked from.
      group_score: a group counts by its best expert, or by the sum of its best two.
    """

    score: Literal["softmax", "softmax_picked", "sigmoid"]
    normalize: bool
    scale: float
    bias: bool
    correction: bool
    groups: int
    top_groups: int
    group_score: Literal["max", "top2"]

    def __post_init__(self):
        known = ("softmax", "softmax_picked", "sigmoid")
        require(self.score in known, f"router.score={self.score!r}: use one of {known}")
        require(self.group_score in ("max", "top2"), f"router.group_score={self.group_score!r}: use max or top2")
        groups, top = self.groups, self.top_groups
        require(1 <= top <= groups, f"router.top_groups={top}: use 1 to groups={groups}")
        picked = self.score == "softmax_picked"
        require(
            not picked or not (self.normalize or self.correction), "router.score=softmax_picked: sums to 1 as it is"
        )


@dataclass(frozen=True, kw_only=True)
class MoE:
    """A mixture of experts: each token goes to `top_k` of `num_experts` feed-forward layers, and to `shared`.

    Attributes:
      expert: one routed expert.
      shared: a feed-forward that every token passes, added unweighted.
    """

    num_experts: int
    top_k: int
    expert: FeedForward
    router: Router
    shared: FeedForward | None

    def __post_init__(self):
        experts, groups = self.num_experts, self.router.groups
        require(1 <= self.top_k <= experts, f"top_k={self.top_k}: use 1 to num_experts={experts}")
        require(experts % groups == 0, f"num_experts={experts}: must be a multiple of router.groups={groups}")
        reach = experts // groups * self.router.top_groups
        require(self.top_k <= reach, f"top_k={self.top_k}: only {reach} experts lie in router.top_groups")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One layer: a mixer of positions and a feed-forward, each on its residual branch.

    Attributes:
      cross: attention over what an encoder made, on a branch between the two; the decoder of an encoder–decoder model.
      placement: where the norm sits. pre: x + F(norm x); post: norm(x + F x); after: x + norm'(F x);
        sandwich: x + norm'(F(norm x)).
    """

    mixer: Attention | LatentAttention
    ffn: FeedForward | MoE
    norm: Norm
    placement: Literal["pre", "post", "after", "sandwich"]
    cross: Attention | None = None

    def __post_init__(self):
        known = ("pre", "post", "after", "sandwich")
        require(self.placement in known, f"placement={self.placement!r}: use one of {known}")
        if self.cross is not None:
            # Positions of two texts have no distance.
            placed = self.cross.rope or self.cross.relative or self.cross.mask != Mask(causal=False)
            require(not placed, "block.cross: sees all of the other text; use Mask(causal=False), no rope, no relative")
