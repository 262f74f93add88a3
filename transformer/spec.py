"""WHAT a model is: frozen specs of mechanisms, composed by the families.

A spec is pure data and says nothing of how it runs: no dtype, kernel, mesh or remat (those are `settings.py`).
A value that a paper or a published config states has no default here: a default would be a silent wrong model.
`None` and `False` mean that the mechanism is absent.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal


class SpecError(ValueError):
    """A spec contradicts itself; the message names the field, its value and the remedy."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SpecError(message)


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Which keys a query may see; `ops.mask.visible` is its only meaning.

    Attributes:
      causal: a query sees no key of a later position.
      window: number of keys a query sees, its own position included (None: all of them). Without `causal` it
        reaches `window - 1` positions to either side.
    """

    causal: bool
    window: int | None = None

    def __post_init__(self):
        _require(self.window is None or self.window >= 1, f"mask.window={self.window}: use at least 1 visible key")


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Piecewise frequency scaling of Llama 3.1: long waves divided by `factor`, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_length: int

    def __post_init__(self):
        low, high = self.low_freq_factor, self.high_freq_factor
        _require(low < high, f"low_freq_factor={low}: must be below high_freq_factor={high}")


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): frequencies ramped by wavelength, and rotations stretched.

    Attributes:
      attention_factor: multiplies cos and sin (so scores by its square); None derives it from the mscales.
      mscale, mscale_all_dim: DeepSeek's two terms; the factor is m(mscale) / m(mscale_all_dim) if both are set,
        else m(1), with m(k) = 0.1 k ln(factor) + 1.
      truncate: round the ramp's ends to whole dimensions (False in gpt-oss).
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_length: int
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864).

    Attributes:
      theta: base of the geometric row of frequencies.
      dim: leading features of a head that rotate, even; the rest passes through (partial rotary).
      interleaved: pairs are (2i, 2i+1), else (i, i + dim/2), "rotate half".
    """

    theta: float
    dim: int
    interleaved: bool
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None

    def __post_init__(self):
        _require(self.dim >= 2 and self.dim % 2 == 0, f"rope.dim={self.dim}: rotations need an even dimension")
        _require(self.theta > 1, f"rope.theta={self.theta}: must exceed 1")


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
        _require(self.kind in ("layer", "rms"), f'norm.kind={self.kind!r}: use "layer" or "rms"')
        _require(self.eps > 0, f"norm.eps={self.eps}: must be positive")
        _require(not (self.bias and self.kind == "rms"), "norm.bias=True: RMSNorm has no bias")


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
        _require(kv_heads >= 1, f"num_kv_heads={kv_heads}: use at least 1")
        _require(heads % kv_heads == 0, f"num_heads={heads}: must be a multiple of num_kv_heads={kv_heads}")
        _require(self.head_dim >= 1, f"head_dim={self.head_dim}: use at least 1")
        dim = self.rope.dim if self.rope else 0
        _require(dim <= self.head_dim, f"rope.dim={dim}: can't exceed head_dim={self.head_dim}")
        _require(self.softcap is None or self.softcap > 0, f"softcap={self.softcap}: must be positive")


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """Position-wise layer: down(act(up x)), or down(act(gate x) · up x) when gated (Shazeer 2020)."""

    d_ff: int
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"]
    gated: bool
    bias: bool

    def __post_init__(self):
        _require(self.d_ff >= 1, f"d_ff={self.d_ff}: use at least 1")
        known = ("relu", "gelu", "gelu_tanh", "silu")
        _require(self.activation in known, f"activation={self.activation!r}: use one of {known}")


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
        _require(self.placement in known, f"placement={self.placement!r}: use one of {known}")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Blocks in order: `head`, then `body` repeated `repeats` times, then `tail`.

    `body` is the repeating pattern (Gemma 3: five local blocks and a global one); it runs under a scan and its
    parameters are stored stacked. `head` and `tail` are the irregular layers at either end.
    """

    body: tuple[Block, ...]
    repeats: int
    head: tuple[Block, ...] = ()
    tail: tuple[Block, ...] = ()
    final_norm: Norm | None

    def __post_init__(self):
        _require(self.repeats >= 0, f"repeats={self.repeats}: use 0 or more")
        _require(bool(self.body) == (self.repeats > 0), "stack.body: a body needs repeats, and repeats a body")
        _require(self.num_layers >= 1, "stack: needs at least one block")

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.head) + len(self.body) * self.repeats + len(self.tail)

    @property
    def layers(self) -> tuple[Block, ...]:
        """Every block in the order in which it runs."""
        return self.head + self.body * self.repeats + self.tail

    @classmethod
    def of(cls, layers: tuple[Block, ...], period: int, final_norm: Norm | None) -> "Stack":
        """A stack of `layers` that repeat with `period`; what the last period leaves over becomes the tail."""
        repeats, rest = divmod(len(layers), period)
        body = tuple(layers[:period]) if repeats else ()
        expected = body * repeats + tuple(layers[:period])[:rest]
        _require(expected == tuple(layers), f"period={period}: the layers don't repeat with it")
        return cls(body=body, repeats=repeats, tail=tuple(layers[len(layers) - rest :]), final_norm=final_norm)


@dataclass(frozen=True, kw_only=True)
class LearnedPositions:
    """A trained table of `max_length` position vectors, added to the token vectors (GPT-2, BERT)."""

    max_length: int

    def __post_init__(self):
        _require(self.max_length >= 1, f"positions.max_length={self.max_length}: use at least 1")


@dataclass(frozen=True, kw_only=True)
class SinusoidalPositions:
    """Fixed sines and cosines added to the token vectors (Vaswani et al. 2017, section 3.5).

    Attributes:
      interleaved: sin and cos alternate (the paper), else all sines come first (Marian, tensor2tensor).
    """

    base: float
    interleaved: bool


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Token ids to vectors.

    Attributes:
      scale: multiplies token vectors (sqrt(d_model) in Gemma and the 2017 model), rounded to the activation dtype.
      positions: absolute positions added after scaling; None where rotary or relative ones serve.
    """

    scale: float | None
    positions: LearnedPositions | SinusoidalPositions | None


@dataclass(frozen=True, kw_only=True)
class Head:
    """Vectors to logits.

    Attributes:
      tied: the head is the token table.
      softcap: logits become c·tanh(logits / c) (Gemma 2).
    """

    tied: bool
    bias: bool
    softcap: float | None = None


@dataclass(frozen=True, kw_only=True)
class Model:
    """A whole model.

    Attributes:
      max_length: longest sequence that the published model was trained for, in tokens; a hard limit only where
        positions are a learned table.
    """

    vocab_size: int
    d_model: int
    max_length: int
    embedding: Embedding
    decoder: Stack
    head: Head

    def __post_init__(self):
        _require(self.vocab_size >= 2, f"vocab_size={self.vocab_size}: use at least 2")
        _require(self.d_model >= 1, f"d_model={self.d_model}: use at least 1")
        positions = self.embedding.positions
        if isinstance(positions, SinusoidalPositions):
            _require(self.d_model % 2 == 0, f"d_model={self.d_model}: sinusoidal positions need an even dimension")

    @property
    def length_limit(self) -> int | None:
        """Longest sequence that can run at all (None: any)."""
        positions = self.embedding.positions
        return positions.max_length if isinstance(positions, LearnedPositions) else None

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct rotary embeddings of the layers, in order of first use."""
        return tuple(dict.fromkeys(b.mixer.rope for b in self.decoder.layers if b.mixer.rope))


def replace[T](spec: T, **changes) -> T:
    """A copy of a frozen spec with some fields changed (`dataclasses.replace`)."""
    return dataclasses.replace(spec, **changes)
