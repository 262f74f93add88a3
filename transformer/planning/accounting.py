"""Parameters and FLOPs of a model, counted from its spec alone: no arrays, no jax.

Counts are of what the spec says is computed, not of how a program happens to compute it: the FLOPs here are the
"model FLOPs" of MFU (Chowdhery et al. 2022, PaLM, appendix B), except that a masked score is not counted.
"""

import dataclasses
from collections import Counter
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
    cross: int
    ffn: int
    norms: int
    idle: int

    @property
    def total(self) -> int:
        """Parameters stored."""
        return self.attention + self.cross + self.ffn + self.norms

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.total - self.idle


@dataclass(frozen=True, kw_only=True)
class Count:
    """Parameters of a model; a tied table is counted once, in `embedding`.

    Attributes:
      embedding: token table, learned positions, token types, norm.
      blocks: one entry a layer, in the order in which they run: the encoder's, then the decoder's.
      relative: tables of relative biases, one a stack.
      final_norm: of all stacks.
      head: what the head owns itself: an untied table, a bias, a transform.
      pooler: with its classifier.
      mtp: modules of multi-token prediction, which the model's logits don't need; in neither sum.
    """

    embedding: int
    blocks: tuple[BlockCount, ...]
    relative: int
    final_norm: int
    head: int
    pooler: int
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
        return self.embedding + self.relative + self.final_norm + self.head + self.pooler


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs a token, by mechanism; a multiply-add counts two, and only matrix products count.

    Attributes:
      projections: query, key, value and output projections.
      scores: q·k and probabilities·v over the visible keys.
      cross: all of cross-attention.
      head: with its transform. A pooler, which sees one token of a text, is not counted.
      mtp: all of multi-token prediction; in training alone.
    """

    projections: float = 0.0
    scores: float = 0.0
    cross: float = 0.0
    ffn: float = 0.0
    head: float = 0.0
    mtp: float = 0.0

    @property
    def total(self) -> float:
        """Sum over the mechanisms."""
        return sum(getattr(self, f.name) for f in dataclasses.fields(self))

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)})

    def __mul__(self, factor: float) -> "Flops":
        return Flops(**{f.name: getattr(self, f.name) * factor for f in dataclasses.fields(self)})


def parameters(model: spec.Model) -> Count:
    """Number of parameters of a model."""
    width, tables = model.d_model, (stack.relative_bias for stack in model.stacks.values())
    return Count(
        embedding=_embedding(model),
        blocks=tuple(block_parameters(block, width) for block in model.layers),
        relative=sum(table[0].num_buckets * table[1] for table in tables if table),
        final_norm=sum(_norm(stack.final_norm, width) for stack in model.stacks.values()),
        head=_head(model) if model.head else 0,
        pooler=_pooler(model.pooler, width) if model.pooler else 0,
        mtp=_multi_token(model.mtp, width) if model.mtp else 0,
    )


def _embedding(model: spec.Model) -> int:
    e, positions = model.embedding, model.embedding.positions
    learned = positions.max_length if isinstance(positions, spec.LearnedPositions) else 0
    return (model.vocab_size + learned + (e.token_types or 0)) * model.d_model + _norm(e.norm, model.d_model)


def _head(model: spec.Model) -> int:
    h, width = model.head, model.d_model
    transform = width * width + width + _norm(h.transform.norm, width) if h.transform else 0
    return model.vocab_size * ((0 if h.tied else width) + h.bias) + transform


def _pooler(pooler: spec.Pooler, d_model: int) -> int:
    return (d_model + 1) * (d_model + (pooler.classes or 0))


def _multi_token(mtp: spec.MultiToken, d_model: int) -> int:
    inputs = 2 * _norm(mtp.norm, d_model) + 2 * d_model * d_model
    layers = sum(block_parameters(block, d_model).total for block in mtp.decoder.layers)
    return mtp.depth * (inputs + layers + _norm(mtp.decoder.final_norm, d_model))


def block_parameters(block: spec.Block, d_model: int) -> BlockCount:
    """Number of parameters of one block of width `d_model`."""
    norms = {"pre": 1, "post": 1, "after": 1, "sandwich": 2}[block.placement]  # a residual branch
    return BlockCount(
        attention=_mixer(block.mixer, d_model),
        cross=_attention(block.cross, d_model) if block.cross else 0,
        ffn=_ffn(block.ffn, d_model),
        idle=_idle(block.ffn, d_model),
        norms=(3 if block.cross else 2) * norms * _norm(block.norm, d_model),
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
    # A projection of distances, and what is added to a query for content and for distance.
    distances = (d_model + 2) * outward if isinstance(a.relative, spec.RelativeKeys) else 0
    return kernels + biases + _norm(a.qk_norm, normed) + a.sinks * a.num_heads + distances


def _feed_forward(f: spec.FeedForward, d_model: int) -> int:
    inward = 2 if f.gated else 1
    return (inward + 1) * d_model * f.d_ff + f.bias * (inward * f.d_ff + d_model)


def _norm(norm: spec.Norm | None, width: int) -> int:
    return width * (1 + norm.bias) if norm else 0


def flops_per_token(model: spec.Model, seq_len: int, *, training: bool, source_len: int | None = None) -> Flops:
    """FLOPs a token of rows of `seq_len` tokens, on average over the row.

    Args:
      training: forward and backward, three times the forward: each product has one gradient for either factor.
        Nothing is computed twice (no remat), and the optimiser is not counted.
      source_len: tokens that the encoder reads for each row of the decoder's, which bear its cost; as many by default.

    Raises:
      ValueError: a length is not positive, or a source for a model without an encoder and a decoder.
    """
    both = model.encoder is not None and model.decoder is not None
    if source_len is not None and (not both or source_len < 1):
        remedy = "use at least 1 token" if both else "only a model with an encoder and a decoder has one"
        raise ValueError(f"source_len={source_len}: {remedy}")
    source, width = source_len or seq_len, model.d_model
    head = _head_flops(model)
    total = Flops(head=head)
    for name, stack in model.stacks.items():
        length = source if name == "encoder" else seq_len
        for block in stack.layers:
            total = total + block_flops(block, width, length, source) * (length / seq_len)
    if model.mtp and training:
        layers = sum(block_flops(block, width, seq_len).total for block in model.mtp.decoder.layers)
        total = total + Flops(mtp=model.mtp.depth * (layers + 2 * 2.0 * width * width + head))
    return total * 3 if training else total


def flops_by_layer(model: spec.Model, seq_len: int) -> dict[spec.Block, tuple[int, Flops]]:
    """Of each kind of layer, how many there are, and the forward FLOPs a token of all of them together."""
    counts = Counter(model.layers)
    return {block: (n, block_flops(block, model.d_model, seq_len) * n) for block, n in counts.items()}


def _head_flops(model: spec.Model) -> float:
    if model.head is None:
        return 0.0
    return 2.0 * model.d_model * (model.vocab_size + (model.d_model if model.head.transform else 0))


def block_flops(block: spec.Block, d_model: int, seq_len: int, source_len: int | None = None) -> Flops:
    """Forward FLOPs a token of one block of width `d_model`, on average over rows of `seq_len` tokens.

    Its cross-attention looks at `source_len` tokens, by default as many.
    """
    a, seen = block.mixer, mean_visible(block.mixer.mask, seq_len)
    if isinstance(a, spec.LatentAttention):
        projections = 2.0 * _latent_kernels(a, d_model)
        scores = 2 * a.num_heads * (a.nope_dim + a.rope_dim + a.v_dim) * seen
    else:
        heads = 2 * a.num_heads + 2 * a.num_kv_heads  # query, key, value, out
        # Distances are compared in the model's width, after a projection of the query.
        distance = isinstance(a.relative, spec.RelativeKeys)
        projections = 2.0 * d_model * (heads + distance * a.num_heads) * a.head_dim
        scores = 2 * a.num_heads * (2 * a.head_dim + distance * d_model) * seen
    cross = _cross_flops(block.cross, d_model, seq_len, source_len or seq_len) if block.cross else 0.0
    return Flops(projections=projections, scores=scores, cross=cross, ffn=_ffn_flops(block.ffn, d_model))


def _cross_flops(a: spec.Attention, d_model: int, seq_len: int, source_len: int) -> float:
    """Keys and values are made once a token of the source."""
    heads = 2 * a.num_heads + 2 * a.num_kv_heads * source_len / seq_len
    return 2.0 * d_model * heads * a.head_dim + 2 * 2 * a.num_heads * a.head_dim * source_len


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
