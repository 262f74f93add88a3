"""What the activations of a layer take on a device: what its backward pass keeps of it, and what it needs meanwhile.

Counted by mechanism from the spec. Where a number is not one of the architecture's own, it says how many arrays of a
kind the TPU compiler was seen to hold at once (libtpu 0.0.50; docs/estimates.md compares what comes out with what it
used). Heads lie in tiles of 128 features, whatever they need.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformer import spec
from transformer.planning.accounting import BYTES
from transformer.planning.traffic import expert_exchange
from transformer.settings import Compute

LANES = 128
# Points whose products have no batch dimension in their weights: what remat="dots" keeps.
DOTS = ("q", "k", "v", "attention_out", "cross_out", "ffn_gate", "ffn_up")


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one device has of the work of a microbatch.

    Attributes:
      tokens: of its rows, by the part of their length that it has.
      source: tokens that its encoder reads, likewise.
      width: the model's.
      tensor: devices that share heads and hidden features.
      experts: devices over which experts lie.
      context: devices that share the length of a row.
      gathered: whether weights are split over axes that split tokens, too, and must be gathered to be used.
      device_kind: of the devices.
    """

    tokens: float
    source: float
    width: int
    tensor: int
    experts: int
    context: int
    gathered: bool
    compute: Compute
    device_kind: str

    @property
    def item(self) -> int:
        """Bytes of a number."""
        return BYTES[self.compute.dtype]

    @property
    def stream(self) -> float:
        """Bytes of the residual stream."""
        parts = self.tensor if self.compute.rules == "sequence" else 1
        return self.tokens * self.width * self.item / parts


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes of a layer, while its gradient is computed.

    Attributes:
      kept: by point, what its backward pass reads of its forward pass.
      other: likewise, of what has no name: the stream before each branch and behind norms.
      backward: gradients that are alive beside all of that.
      weights: copies of its weights for use, gathered ones among them, and one gradient of them before it is summed.
      rows: of experts: tokens and hidden features as they lie by expert, kept like the others.
      rows_backward: likewise, and gradients.
    """

    kept: dict[str, float]
    other: float
    backward: float
    weights: float
    rows: float
    rows_backward: float


def points(block: spec.Block, share: Share) -> dict[str, float]:
    """Bytes of each named point of a layer that there is (`settings.POINTS`), as they are kept from layer to layer."""
    n, k, key, value = heads(block.mixer)
    of_heads = share.tokens * share.item / share.tensor
    whole = share.tokens * share.width * share.item
    found = {
        "q": n * key * of_heads, "k": k * key * of_heads, "v": k * value * of_heads, "attended": n * value * of_heads,
        "attention_out": whole, "ffn_out": whole, "residual": share.stream,
    }  # fmt: skip
    if block.cross is not None:
        found["cross_out"] = whole
    dense = block.ffn if isinstance(block.ffn, spec.FeedForward) else block.ffn.shared
    if dense is not None:
        found["ffn_up"] = dense.d_ff * of_heads
        if dense.gated:
            found["ffn_gate"] = dense.d_ff * of_heads
    return found


def heads(mixer: spec.Attention | spec.LatentAttention) -> tuple[int, int, int, int]:
    """Query heads, key and value heads, features of a key, of a value: as training computes them."""
    if isinstance(mixer, spec.LatentAttention):
        return mixer.num_heads, mixer.num_heads, mixer.nope_dim + mixer.rope_dim, mixer.v_dim
    return mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.head_dim


def saved(block: spec.Block, share: Share) -> dict[str, float]:
    """Bytes by point that remat lets a layer keep from the forward to the backward pass, its input apart."""
    compute, found = share.compute, points(block, share)
    match compute.remat:
        case "full":
            return {}
        case "names":
            return {name: size for name, size in found.items() if name in compute.remat_names}
        case "dots":
            return {name: size for name, size in found.items() if name in DOTS}
    # Each norm keeps its input in float32, twice; an activation function keeps what its gradient is made of.
    norms = {"pre": 2, "post": 2, "after": 2, "sandwich": 4}[block.placement] + 2 * (block.cross is not None)
    wide = norms * share.tokens * share.width * (2 * BYTES["float32"] + share.item)
    hidden = found.get("ffn_up", 0) * (3 if "ffn_gate" in found else 2)
    experts = 0.0
    if isinstance(block.ffn, spec.MoE):
        rows, _ = expert_rows(block.ffn, share)
        experts = rows * (2 * share.width + 4 * block.ffn.expert.d_ff / share.tensor) * share.item
    extra = {"attended": found["attended"] * 2, "residual": wide + share.stream, "ffn_out": hidden + experts}
    kept = {name: found[name] for name in ("q", "k", "v", "ffn_up", "ffn_gate") if name in found}
    return kept | extra


def need(block: spec.Block, share: Share) -> Need:
    """What a layer needs while its gradient is computed, its forward pass repeated first unless that was kept."""
    ffn, t = block.ffn, share.tensor
    branches = [_attention(block.mixer, share, share.tokens)]
    if block.cross is not None:
        branches.append(_attention(block.cross, share, share.source))
    kept = {name: sum(branch[name] for branch in branches) for name in branches[0]}
    norms = len(branches) + 1
    hidden, rows, rows_backward = 0.0, 0.0, 0.0
    dense = ffn if isinstance(ffn, spec.FeedForward) else ffn.shared
    if dense is not None:
        hidden = share.tokens * dense.d_ff / t * share.item
        kept["ffn_up"] = hidden
        kept |= {"ffn_gate": hidden} if dense.gated else {}
    weights = _weights(block, share)
    if isinstance(ffn, spec.MoE):
        rows, rows_backward = _experts(ffn, share)
    # The gradients of both factors of a gate; or of what attention gave, and then of queries or of keys and values.
    gradients = [b["attended"] + max(b["q"], b["k"] + b["v"]) + 2 * share.stream for b in branches]
    backward = max(2 * hidden, *gradients)
    # Behind a branch there is a norm, which reads what the branch returned.
    behind = 0 if block.placement == "pre" else norms
    # Where rows are split, what comes out of norms is kept as well, and a copy of the input.
    behind += norms + 1 if share.context > 1 else 0
    return Need(
        kept=kept,
        other=(norms + behind) * share.stream,
        backward=backward,
        weights=weights,
        rows=rows,
        rows_backward=rows_backward,
    )


def _attention(mixer: spec.Attention | spec.LatentAttention, share: Share, keys: float) -> dict[str, float]:
    """Queries, keys, values and what attention made of them, in whole tiles; `keys` tokens are looked at."""
    n, k, key, value = heads(mixer)
    one = share.item / share.tensor
    times = 2 if getattr(mixer, "qk_norm", None) else 1  # before the norm, too
    found = {
        "q": share.tokens * n * _padded(key) * one * times, "k": keys * k * _padded(key) * one * times,
        "v": keys * k * _padded(value) * one, "attended": share.tokens * n * _padded(value) * one,
    }  # fmt: skip
    if isinstance(mixer, spec.LatentAttention):
        # Queries and keys in two parts, and latents, which no tensor axis splits.
        latents = (mixer.q_rank or 0) + mixer.kv_rank + mixer.rope_dim
        found["q"] *= 2
        found["k"] += share.tokens * latents * share.item
    return found


def _padded(features: int) -> int:
    return math.ceil(features / LANES) * LANES


def _weights(block: spec.Block, share: Share) -> float:
    """Two of the largest kernel of a layer as they are used, and its gradient; of experts, kernels and gradients."""
    width, t, ffn = share.width, share.tensor, block.ffn
    n, _, _, value = heads(block.mixer)
    largest = n * value / t
    if isinstance(ffn, spec.MoE):
        kernel = ffn.num_experts / share.experts * ffn.expert.d_ff / t
        return (5 * kernel + 2 * largest * share.gathered) * width * share.item
    largest = max(largest, ffn.d_ff / t)
    return (3 if share.gathered else 1) * largest * width * share.item


def gathered_weights(block: spec.Block, share: Share) -> float:
    """Bytes of the weights of a layer that are alive at once beside those that the device has, forwards."""
    if not share.gathered:
        return 0.0
    n, _, _, value = heads(block.mixer)
    ffn = block.ffn
    dense = ffn if isinstance(ffn, spec.FeedForward) else ffn.shared
    return 2 * share.width * max(n * value, dense.d_ff if dense else 0) / share.tensor * share.item


def expert_rows(ffn: spec.MoE, share: Share) -> tuple[float, bool]:
    """Rows that the experts of a device have room for, and whether tokens travel to them by all-to-all."""
    compute, near = share.compute, ffn.num_experts // share.experts
    if compute.experts == "capacity":
        room = math.ceil(compute.expert_capacity * share.tokens * ffn.top_k / ffn.num_experts)
        return ffn.num_experts * min(room, share.tokens), False
    most = share.tokens * min(ffn.top_k, near)
    if share.experts == 1:
        return most, False
    if expert_exchange(compute, share.tokens, ffn.top_k, share.experts, share.device_kind) == "all_gather":
        return most * share.experts, False
    return min(math.ceil(compute.expert_buffer * share.tokens * ffn.top_k), share.experts * most), True


def _experts(ffn: spec.MoE, share: Share) -> tuple[float, float]:
    """Bytes of experts' rows that are kept for the gradient, and of what its computation takes beside them."""
    rows, travel = expert_rows(ffn, share)
    width, hidden, near = share.width, ffn.expert.d_ff / share.tensor, ffn.num_experts // share.experts
    everyone = share.tokens * share.experts * width
    if not travel:
        # Gathered tokens are summed in float32 before they are scattered.
        summed = everyone * BYTES["float32"] if share.experts > 1 and share.compute.experts != "capacity" else 0
        biases = 2 * hidden if ffn.expert.bias else 0  # each row's own
        kept = rows * (2 * width + 2.5 * hidden + biases) * share.item
        return kept, 2 * rows * width * share.item + summed
    in_turns = 3 * everyone + share.tokens * min(ffn.top_k, near) * (5 * width + 3 * hidden)
    ends = 2 * rows * width + share.tokens * ffn.top_k * width
    if share.compute.remat == "full":
        # Each branch of the exchange makes its rows again, and is over before the other's place in the program.
        return max(ends + 6 * rows * hidden, in_turns) * share.item, 0.0
    # What one branch kept for its gradient lies beside the other's work, which goes through the tokens of one device
    # after another.
    return (ends + 7 * rows * hidden) * share.item, in_turns * share.item


def pattern(blocks: Sequence[spec.Block], share: Share) -> Need:
    """The same of layers that are computed again together: what they keep adds up, the rest is of the largest."""
    needs = [need(block, share) for block in blocks]
    kept: dict[str, float] = {}
    for one in needs:
        for name, size in one.kept.items():
            kept[name] = kept.get(name, 0) + size
    return Need(
        kept=kept,
        other=sum(one.other for one in needs) - share.stream,  # the first's input was kept as it is
        backward=max(one.backward for one in needs),
        weights=max(one.weights for one in needs),
        rows=sum(one.rows for one in needs),
        rows_backward=max(one.rows_backward for one in needs),
    )
