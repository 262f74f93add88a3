"""Parameters, FLOPs and cache of a model, counted from its spec alone: no arrays, no jax.

Counts are of what the spec says is computed, not of how a program happens to compute it: the FLOPs here are the
"model FLOPs" of MFU (Chowdhery et al. 2022, PaLM, appendix B), except that a masked score is not counted.
"""

import dataclasses
from dataclasses import dataclass

from transformer import spec

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True, kw_only=True)
class BlockCount:
    """Parameters of one block.

    Attributes:
      idle: those of `ffn` that one token does not use: the experts that it is not routed to.
    """

    attention: int
    ffn: int
    norms: int
    idle: int

    @property
    def total(self) -> int:
        """Parameters stored."""
        return self.attention + self.ffn + self.norms

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.total - self.idle


@dataclass(frozen=True, kw_only=True)
class Count:
    """Parameters of a model; a tied table is counted once, in `embedding`.

    Attributes:
      embedding: token table and learned positions.
      blocks: one entry a layer, in the order in which they run.
      head: what the head owns itself: an untied table, a bias.
      mtp: modules of multi-token prediction, which the model's logits don't need; in neither sum.
    """

    embedding: int
    blocks: tuple[BlockCount, ...]
    final_norm: int
    head: int
    mtp: int

    @property
    def total(self) -> int:
        """Parameters stored, as published: multi-token prediction apart."""
        return self._around + sum(block.total for block in self.blocks)

    @property
    def active(self) -> int:
        """Parameters that one token uses, whole tables included."""
        return self._around + sum(block.active for block in self.blocks)

    @property
    def _around(self) -> int:
        return self.embedding + self.final_norm + self.head


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs a token, by mechanism; a multiply-add counts two, and only matrix products count.

    Attributes:
      projections: query, key, value and output projections.
      scores: q·k and probabilities·v over the visible keys.
      mtp: all of multi-token prediction; in training alone.
    """

    projections: float = 0.0
    scores: float = 0.0
    ffn: float = 0.0
    head: float = 0.0
    mtp: float = 0.0

    @property
    def total(self) -> float:
        """Sum over the mechanisms."""
        return self.projections + self.scores + self.ffn + self.head + self.mtp

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)})

    def __mul__(self, factor: float) -> "Flops":
        return Flops(**{f.name: getattr(self, f.name) * factor for f in dataclasses.fields(self)})


@dataclass(frozen=True, kw_only=True)
class CacheNumbers:
    """Keys and values that one row keeps; slot positions (one int32 a slot and layer) are not counted.

    Attributes:
      per_token: numbers that a token adds to each layer: 2·K·H, or kv_rank + rope_dim of a latent.
      vectors: how many vectors these are; kept in int8, each has a float32 scale.
      slots: tokens that each layer holds, its sinks and window at most.
    """

    per_token: tuple[int, ...]
    vectors: tuple[int, ...]
    slots: tuple[int, ...]

    @property
    def total(self) -> int:
        """Numbers of all layers together."""
        return sum(n * slots for n, slots in zip(self.per_token, self.slots, strict=True))

    def bytes(self, dtype: str) -> int:
        """Bytes of one row in "float32", "bfloat16" or "int8"."""
        scales = sum(n * slots for n, slots in zip(self.vectors, self.slots, strict=True)) if dtype == "int8" else 0
        return self.total * BYTES[dtype] + scales * BYTES["float32"]


def parameters(model: spec.Model) -> Count:
    """Number of parameters of a model."""
    positions, width = model.embedding.positions, model.d_model
    learned = positions.max_length if isinstance(positions, spec.LearnedPositions) else 0
    final = model.decoder.final_norm
    return Count(
        embedding=(model.vocab_size + learned) * width,
        blocks=tuple(block_parameters(block, width) for block in model.decoder.layers),
        final_norm=_norm(final, width) if final else 0,
        head=model.vocab_size * ((0 if model.head.tied else width) + model.head.bias),
        mtp=_multi_token(model.mtp, width) if model.mtp else 0,
    )


def _multi_token(mtp: spec.MultiToken, d_model: int) -> int:
    final = mtp.decoder.final_norm
    inputs = 2 * _norm(mtp.norm, d_model) + 2 * d_model * d_model
    layers = sum(block_parameters(block, d_model).total for block in mtp.decoder.layers)
    return mtp.depth * (inputs + layers + (_norm(final, d_model) if final else 0))


def block_parameters(block: spec.Block, d_model: int) -> BlockCount:
    """Number of parameters of one block of width `d_model`."""
    norms = {"pre": 1, "post": 1, "after": 1, "sandwich": 2}[block.placement]  # a residual branch
    return BlockCount(
        attention=_mixer(block.mixer, d_model),
        ffn=_ffn(block.ffn, d_model),
        idle=_idle(block.ffn, d_model),
        norms=2 * norms * _norm(block.norm, d_model),
    )


def _mixer(mixer: spec.Attention | spec.LatentAttention, d_model: int) -> int:
    return _latent(mixer, d_model) if isinstance(mixer, spec.LatentAttention) else _attention(mixer, d_model)


def _latent(a: spec.LatentAttention, d_model: int) -> int:
    latents = [a.kv_rank] if a.q_rank is None else [a.kv_rank, a.q_rank]
    down = a.rope_dim + sum(latents)  # the rotary key comes with the latent
    biases = a.bias * (down + d_model)
    return _latent_kernels(a, d_model) + biases + sum(_norm(a.latent_norm, width) for width in latents)


def _latent_kernels(a: spec.LatentAttention, d_model: int) -> int:
    query, out = a.num_heads * (a.nope_dim + a.rope_dim), a.num_heads * a.v_dim * d_model
    queries = d_model * query if a.q_rank is None else a.q_rank * (d_model + query)
    return queries + d_model * (a.kv_rank + a.rope_dim) + a.kv_rank * a.num_heads * (a.nope_dim + a.v_dim) + out


def _ffn(f: spec.FeedForward | spec.MoE, d_model: int) -> int:
    if isinstance(f, spec.FeedForward):
        return _feed_forward(f, d_model)
    router = d_model * f.num_experts + f.num_experts * (f.router.bias + f.router.correction)
    shared = _feed_forward(f.shared, d_model) if f.shared else 0
    return router + f.num_experts * _feed_forward(f.expert, d_model) + shared


def _idle(f: spec.FeedForward | spec.MoE, d_model: int) -> int:
    """Parameters of the experts that a token does not visit."""
    return (f.num_experts - f.top_k) * _feed_forward(f.expert, d_model) if isinstance(f, spec.MoE) else 0


def _attention(a: spec.Attention, d_model: int) -> int:
    inward = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    outward = a.num_heads * a.head_dim
    kernels = d_model * (inward + outward)
    biases = a.qkv_bias * inward + a.out_bias * d_model
    # A scale for each head of q and k, or one that all of q's share and one for k's.
    normed = (a.num_heads + a.num_kv_heads if a.qk_norm_joint else 2) * a.head_dim
    qk_norms = _norm(a.qk_norm, normed) if a.qk_norm else 0
    return kernels + biases + qk_norms + a.sinks * a.num_heads


def _feed_forward(f: spec.FeedForward, d_model: int) -> int:
    inward = 2 if f.gated else 1
    return (inward + 1) * d_model * f.d_ff + f.bias * (inward * f.d_ff + d_model)


def _norm(norm: spec.Norm, width: int) -> int:
    return width * (1 + norm.bias)


def flops_per_token(model: spec.Model, seq_len: int, *, training: bool) -> Flops:
    """FLOPs a token of rows of `seq_len` tokens, on average over the row.

    Args:
      training: forward and backward, three times the forward: each product has one gradient for either factor.
        Nothing is computed twice (no remat), and the optimiser is not counted.

    Raises:
      ValueError: `seq_len` is not positive.
    """
    width, head = model.d_model, 2.0 * model.vocab_size * model.d_model
    total = Flops(head=head)
    for block in model.decoder.layers:
        total = total + block_flops(block, width, seq_len)
    if model.mtp and training:
        layers = sum(block_flops(block, width, seq_len).total for block in model.mtp.decoder.layers)
        total = total + Flops(mtp=model.mtp.depth * (layers + 2 * 2.0 * width * width + head))
    return total * 3 if training else total


def block_flops(block: spec.Block, d_model: int, seq_len: int) -> Flops:
    """Forward FLOPs a token of one block of width `d_model`, on average over rows of `seq_len` tokens."""
    a, seen = block.mixer, mean_visible(block.mixer.mask, seq_len)
    if isinstance(a, spec.LatentAttention):
        projections = 2.0 * _latent_kernels(a, d_model)
        scores = 2 * a.num_heads * (a.nope_dim + a.rope_dim + a.v_dim) * seen
    else:
        heads = 2 * a.num_heads + 2 * a.num_kv_heads  # query, key, value, out
        projections = 2.0 * d_model * heads * a.head_dim
        scores = 2 * 2 * a.num_heads * a.head_dim * seen
    return Flops(projections=projections, scores=scores, ffn=_ffn_flops(block.ffn, d_model))


def _ffn_flops(f: spec.FeedForward | spec.MoE, d_model: int) -> float:
    if isinstance(f, spec.FeedForward):
        return 2.0 * d_model * f.d_ff * (3 if f.gated else 2)
    shared = _ffn_flops(f.shared, d_model) if f.shared else 0
    return 2.0 * d_model * f.num_experts + f.top_k * _ffn_flops(f.expert, d_model) + shared


def mean_visible(mask: spec.Mask, seq_len: int) -> float:
    """Number of keys that a query of a row of `seq_len` tokens sees, on average: the mean of `ops.mask.visible`.

    Raises:
      ValueError: `seq_len` is not positive.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len}: use at least 1 token")
    window = min(mask.window or seq_len, seq_len)
    # The first `window` queries look back at 1, 2 … window keys, the others at `window` each.
    behind = window * (window + 1) / 2 + (seq_len - window) * window
    # Sinks come into sight again one by one, as the window leaves them behind.
    beyond = seq_len - window
    rising = min(mask.sinks, beyond)
    behind += rising * (rising + 1) / 2 + (beyond - rising) * mask.sinks
    # Looking both ways mirrors that, and the query's own position is one key.
    return (behind if mask.causal else 2 * behind - seq_len) / seq_len


def cache_numbers(model: spec.Model, length: int) -> CacheNumbers:
    """Keys and values that decoding keeps for one row of `length` tokens, as `ops.cache.init` lays them out."""
    mixers = [block.mixer for block in model.decoder.layers]
    return CacheNumbers(
        per_token=tuple(m.cache_dims.numbers for m in mixers),
        vectors=tuple(m.cache_dims.vectors for m in mixers),
        slots=tuple(min(length, m.mask.sinks + m.mask.window if m.mask.window else length) for m in mixers),
    )
