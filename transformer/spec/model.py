"""A stack of layers and what surrounds it."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from transformer.spec.check import require
from transformer.spec.layers import ACTIVATIONS, Block, Norm
from transformer.spec.positions import LearnedPositions, Mask, RelativeBias, RelativeKeys, Rope, SinusoidalPositions


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
        require(self.repeats >= 0, f"repeats={self.repeats}: use 0 or more")
        require(bool(self.body) == (self.repeats > 0), "stack.body: a body needs repeats, and repeats a body")
        require(self.num_layers >= 1, "stack: needs at least one block")
        tables = {(b.mixer.relative, b.mixer.num_heads) for b in self.layers if _biased(b)}
        require(len(tables) <= 1, f"stack: layers share one table of relative biases, but want {len(tables)}")
        crossed = sum(b.cross is not None for b in self.layers)
        require(crossed in (0, self.num_layers), f"stack: {crossed} of {self.num_layers} blocks have cross-attention")

    @property
    def crosses(self) -> bool:
        """True where the blocks attend to what an encoder made."""
        return self.layers[0].cross is not None

    @property
    def relative_bias(self) -> tuple[RelativeBias, int] | None:
        """The relative bias that its layers share, and its number of heads."""
        return next(((b.mixer.relative, b.mixer.num_heads) for b in self.layers if _biased(b)), None)

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.head) + len(self.body) * self.repeats + len(self.tail)

    @property
    def layers(self) -> tuple[Block, ...]:
        """Every block in the order in which it runs."""
        return self.head + self.body * self.repeats + self.tail

    @property
    def unrolled(self) -> "Stack":
        """The same layers without repeats, so that each has parameters and a cache of its own."""
        return dataclasses.replace(self, head=self.layers, body=(), repeats=0, tail=())

    @property
    def uneven(self) -> bool:
        """Whether some layer lets late tokens look at more keys than early ones: causal masks without a window do."""
        return any(block.mixer.mask.causal and block.mixer.mask.window is None for block in self.layers)

    def map(self, function: Callable[[Block], Block]) -> "Stack":
        """The stack of `function` of each block."""
        parts = {name: tuple(map(function, getattr(self, name))) for name in ("head", "body", "tail")}
        return dataclasses.replace(self, **parts)

    @classmethod
    def of(cls, layers: tuple[Block, ...], period: int, final_norm: Norm | None, head: int = 0) -> "Stack":
        """A stack of `layers`: the first `head` irregular, the others with `period`; what is left over is the tail."""
        first, rest = tuple(layers[:head]), tuple(layers[head:])
        repeats, over = divmod(len(rest), period)
        body, tail = (rest[:period] if repeats else ()), rest[len(rest) - over :]
        require(body * repeats + rest[:period][:over] == rest, f"period={period}: the layers don't repeat with it")
        return cls(head=first, body=body, repeats=repeats, tail=tail, final_norm=final_norm)


def _biased(block: Block) -> bool:
    return isinstance(getattr(block.mixer, "relative", None), RelativeBias)


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Token ids to vectors; encoder and decoder share it.

    Attributes:
      scale: multiplies token vectors (sqrt(d_model) in Gemma and the 2017 model), rounded to the activation dtype.
      positions: absolute positions added after scaling; None where rotary or relative ones serve.
      token_types: number of learned vectors of which each token gets one, for the sentence that it is in (BERT).
      norm: of the sum.
    """

    scale: float | None
    positions: LearnedPositions | SinusoidalPositions | None
    token_types: int | None = None
    norm: Norm | None = None

    def __post_init__(self):
        types = self.token_types
        require(types is None or types >= 1, f"embedding.token_types={types}: use at least 1, or None")


@dataclass(frozen=True, kw_only=True)
class Transform:
    """A layer between features and logits: norm(activation(dense x)), with a bias (BERT's masked language model)."""

    activation: Literal["relu", "gelu", "gelu_tanh", "silu"]
    norm: Norm

    def __post_init__(self):
        require(self.activation in ACTIVATIONS, f"transform.activation={self.activation!r}: use one of {ACTIVATIONS}")


@dataclass(frozen=True, kw_only=True)
class Head:
    """Vectors to logits.

    Attributes:
      tied: the head is the token table.
      softcap: logits become c·tanh(logits / c) (Gemma 2).
      scale: multiplies the features first (d_model ** -0.5 in the first T5, whose table is not scaled for a head).
    """

    tied: bool
    bias: bool
    softcap: float | None = None
    scale: float | None = None
    transform: Transform | None = None


@dataclass(frozen=True, kw_only=True)
class Pooler:
    """One vector for a text: tanh(dense x) of its first token's features (BERT).

    Attributes:
      classes: logits of a classifier on top of it (2 for "is this the next sentence"), or None.
    """

    classes: int | None

    def __post_init__(self):
        classes = self.classes
        require(classes is None or classes >= 2, f"pooler.classes={classes}: use at least 2, or None")


@dataclass(frozen=True, kw_only=True)
class MultiToken:
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): modules that look beyond the next token.

    Module k reads the features behind each token (k = 1: the decoder's, normed as for the head; else module k - 1's)
    and the embedding of the k-th token after it, and predicts the one after that. Embedding and head are the model's.

    Attributes:
      depth: number of modules, in sequence.
      norm: of either input, before they are projected together.
      decoder: the layers of one module, its final norm included.
    """

    depth: int
    norm: Norm
    decoder: Stack

    def __post_init__(self):
        require(self.depth >= 1, f"mtp.depth={self.depth}: use at least 1, or no mtp")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Which family a model was made by, and from which dimensions: what its published form is written from."""

    family: str
    dims: Any


@dataclass(frozen=True, kw_only=True)
class Model:
    """A whole model: an encoder, a decoder, or both.

    Attributes:
      encoder: layers that read a text in both directions. Alone, its features are the model's.
      decoder: layers that read a text from the left; behind an encoder, its blocks have cross-attention.
      head: makes logits of the last stack's features; None where the features are all there is.
      decoder_start: id of the token with which a decoded text begins; behind an encoder alone.
      mtp: modules that predict further tokens, for training and as a draft; the model's own logits are without them.
      origin: where the spec comes from; says nothing about what the model is, and two models that differ in it only
        are equal.
      max_length: longest sequence that the published model was trained for, in tokens; a hard limit only where
        positions are a learned table.
    """

    vocab_size: int
    d_model: int
    max_length: int
    embedding: Embedding
    decoder: Stack | None
    head: Head | None
    encoder: Stack | None = None
    decoder_start: int | None = None
    pooler: Pooler | None = None
    mtp: MultiToken | None = None
    origin: Origin | None = field(default=None, compare=False, repr=False)

    def __post_init__(self):
        require(self.vocab_size >= 2, f"vocab_size={self.vocab_size}: use at least 2")
        require(self.max_length >= 1, f"max_length={self.max_length}: use at least 1")
        require(self.d_model >= 1, f"d_model={self.d_model}: use at least 1")
        positions = self.embedding.positions
        if isinstance(positions, SinusoidalPositions):
            require(self.d_model % 2 == 0, f"d_model={self.d_model}: sinusoidal positions need an even dimension")
        self._check_stacks()

    def _check_stacks(self) -> None:
        encoder, decoder, start = self.encoder, self.decoder, self.decoder_start
        require(bool(encoder or decoder), "model: needs an encoder, a decoder, or both")
        both = bool(encoder and decoder)
        require(
            not encoder or not encoder.crosses, "model.encoder: its blocks have cross-attention, which reads an encoder"
        )
        require(
            not decoder or decoder.crosses == both,
            "model.decoder: needs cross-attention in its blocks behind an encoder, and none without",
        )
        fits = 0 <= start < self.vocab_size if both and start is not None else start is None and not both
        remedy = f"use an id below vocab_size={self.vocab_size}" if both else "only a decoder behind an encoder has one"
        require(fits, f"model.decoder_start={start}: {remedy}")
        require(not encoder or not any(b.mixer.mask.causal for b in encoder.layers), "model.encoder: a mask is causal")
        require(not decoder or all(b.mixer.mask.causal for b in decoder.layers), "model.decoder: a mask isn't causal")
        require(self.pooler is None or decoder is None, "model.pooler: needs an encoder alone")
        require(self.mtp is None or encoder is None, "model.mtp: needs a decoder alone")
        keys = any(isinstance(getattr(b.mixer, "relative", None), RelativeKeys) for b in self.layers)
        require(
            not keys or self.d_model % 2 == 0, f"d_model={self.d_model}: sinusoidal distances need an even dimension"
        )

    @property
    def trunk(self) -> Stack:
        """The stack whose features are the model's: the decoder where there is one."""
        return self.decoder or self.encoder

    @property
    def stacks(self) -> dict[str, Stack]:
        """The stacks there are, by name, in the order in which they run."""
        return {name: stack for name in ("encoder", "decoder") if (stack := getattr(self, name))}

    @property
    def layers(self) -> tuple[Block, ...]:
        """Every block in the order in which it runs, without multi-token prediction."""
        return tuple(block for stack in self.stacks.values() for block in stack.layers)

    @property
    def length_limit(self) -> int | None:
        """Longest sequence that can run at all (None: any)."""
        positions = self.embedding.positions
        return positions.max_length if isinstance(positions, LearnedPositions) else None

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct rotary embeddings of the layers, in order of first use."""
        layers = self.layers + (self.mtp.decoder.layers if self.mtp else ())
        return tuple(dict.fromkeys(b.mixer.rope for b in layers if b.mixer.rope))


def streaming(model: Model, *, sinks: int, window: int) -> Model:
    """The model with StreamingLLM's attention: what sees everything sees `sinks` first tokens and a window instead.

    It generates on past its trained length at constant memory; layers that have a window keep it.

    Raises:
      SpecError: absolute positions, which have no meaning beyond the trained length; or sizes that don't fit it.
    """
    require(sinks >= 1, f"sinks={sinks}: use at least 1 (the paper uses 4)")
    require(window >= 1, f"window={window}: use at least 1")
    total, limit = sinks + window, model.max_length
    require(total <= limit, f"sinks + window={total}: must be at most the trained max_length={limit}")
    absolute = type(model.embedding.positions).__name__ if model.embedding.positions else None
    require(absolute is None, f"embedding.positions={absolute}: streaming needs rotary positions")
    require(model.encoder is None, "model.encoder: streaming is for a decoder alone")

    def stream(block: Block) -> Block:
        if block.mixer.mask.window is not None:
            return block
        mask = Mask(causal=True, window=window, sinks=sinks)
        return dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, mask=mask))

    mtp = model.mtp and dataclasses.replace(model.mtp, decoder=model.mtp.decoder.map(stream))
    return dataclasses.replace(model, decoder=model.decoder.map(stream), mtp=mtp)
