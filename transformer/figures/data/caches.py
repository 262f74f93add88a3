"""What a key/value cache costs, counted from specs and allocated for real, and how its slots are used."""

import dataclasses
from dataclasses import dataclass

import jax
import numpy as np

from transformer import spec
from transformer.figures.data import published
from transformer.ops import cache as caches
from transformer.planning.caches import cache_numbers

NORM = spec.Norm(kind="rms", eps=1e-6, offset=0.0, bias=False, scale_in_float32=True)


@dataclass(frozen=True)
class CacheSize:
    """What decoding keeps of one text.

    Attributes:
      length: of the text, in tokens.
      numbers: that a token adds, over all layers.
      layers: of the model.
      bytes: of the text, counted from the spec.
      allocated: of the buffers that decoding makes for it.
    """

    name: str
    length: int
    numbers: int
    layers: int
    bytes: int
    allocated: int


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the calculator turns: GQA has `groups` key/value heads; MLA keeps `latent` + `rope_dim` numbers a token."""

    layers: int = 32
    heads: int = 32
    groups: int = 8
    head_dim: int = 128
    latent: int = 512
    rope_dim: int = 64

    @classmethod
    def of(cls, reference: str | spec.Model) -> "Shape":
        """That of a published decoder, as far as it says."""
        decoder = published.model(reference).decoder
        if decoder is None:
            raise ValueError(f"preset={reference!r}: an encoder alone keeps no cache")
        mixer = decoder.layers[-1].mixer
        if isinstance(mixer, spec.LatentAttention):
            sizes = dict(head_dim=mixer.nope_dim, latent=mixer.kv_rank, rope_dim=mixer.rope_dim)
        else:
            sizes = dict(head_dim=mixer.head_dim, groups=mixer.num_kv_heads)
        return cls(layers=decoder.num_layers, heads=mixer.num_heads, **sizes)


def schemes(shape: Shape, length: int, dtype: str) -> tuple[CacheSize, ...]:
    """MHA, GQA, MQA and MLA with all else equal."""
    kv_heads = {"MHA": shape.heads, "GQA": shape.groups, "MQA": 1}
    mixers = {name: _grouped(shape, number) for name, number in kv_heads.items()} | {"MLA": _latent(shape)}
    return tuple(size(name, _decoder(mixer, shape), length, dtype) for name, mixer in mixers.items())


def size(name: str, model: spec.Model, length: int, dtype: str) -> CacheSize:
    """What a decoder keeps of `length` tokens, or of as many as its context has."""
    length = min(length, model.max_length)
    numbers = cache_numbers(model, length)
    per_token = sum(numbers.per_token) + (sum(numbers.source.per_token) if numbers.source else 0)
    layers = model.decoder.num_layers
    return CacheSize(name, length, per_token, layers, numbers.bytes(dtype), allocated(model.decoder, length, dtype))


def allocated(stack: spec.Stack, length: int, dtype: str) -> int:
    """Bytes of the keys, the values and their scales that `ops.cache.init` makes for one row; nothing is made."""
    held = jax.eval_shape(lambda: caches.init(stack, 1, length, dtype, source_length=length))
    held = held.map(lambda layer: dataclasses.replace(layer, positions=None))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held))


@dataclass(frozen=True)
class Latent:
    """What latent attention keeps of a token in a layer, and what it makes of that.

    Attributes:
      width: features of the token.
      heads: query heads.
      latent, rope: numbers kept: the latent vector, and the rotary key that all heads share.
      key, value: numbers that each head's key and value get from the latent vector.
    """

    width: int
    heads: int
    latent: int
    rope: int
    key: int
    value: int

    @property
    def kept(self) -> int:
        """Numbers of a token that are cached."""
        return self.latent + self.rope

    @property
    def made(self) -> int:
        """Numbers in the keys and values of all heads, the shared part of the keys counted once for each."""
        return self.heads * (self.key + self.rope + self.value)

    @property
    def weights(self) -> int:
        """Of the matrices that make keys and values of the latent vector."""
        return self.latent * self.heads * (self.key + self.value)


def latent(reference: str | spec.Model, heads: int | None = None) -> Latent:
    """That of a published decoder, were it of so many heads.

    Raises:
      ValueError: its attention has no latent vector.
    """
    model = published.model(reference)
    mixer = model.layers[-1].mixer
    if not isinstance(mixer, spec.LatentAttention):
        raise ValueError(f"reference={reference!r}: its attention keeps no latent; use deepseek_v3:671b, for one")
    sizes = mixer.kv_rank, mixer.rope_dim, mixer.nope_dim, mixer.v_dim
    return Latent(model.d_model, heads or mixer.num_heads, *sizes)


def _grouped(shape: Shape, kv_heads: int) -> spec.Attention:
    rope = spec.Rope(theta=1e4, dim=shape.head_dim, interleaved=False)
    return spec.Attention(
        num_heads=shape.heads, num_kv_heads=kv_heads, head_dim=shape.head_dim, mask=spec.Mask(causal=True),
        scale=shape.head_dim**-0.5, rope=rope, qkv_bias=False, out_bias=False,
    )  # fmt: skip


def _latent(shape: Shape) -> spec.LatentAttention:
    return spec.LatentAttention(
        num_heads=shape.heads, q_rank=None, kv_rank=shape.latent, nope_dim=shape.head_dim, rope_dim=shape.rope_dim,
        v_dim=shape.head_dim, mask=spec.Mask(causal=True), scale=(shape.head_dim + shape.rope_dim) ** -0.5,
        rope=spec.Rope(theta=1e4, dim=shape.rope_dim, interleaved=False), latent_norm=NORM, bias=False,
    )  # fmt: skip


def _decoder(mixer: spec.Attention | spec.LatentAttention, shape: Shape) -> spec.Model:
    width = shape.heads * shape.head_dim
    ffn = spec.FeedForward(d_ff=4 * width, activation="silu", gated=False, bias=False)
    block = spec.Block(mixer=mixer, ffn=ffn, norm=NORM, placement="pre")
    return spec.Model(
        vocab_size=2, d_model=width, max_length=1 << 20, embedding=spec.Embedding(scale=None, positions=None),
        decoder=spec.Stack(body=(block,), repeats=shape.layers, final_norm=NORM), head=None,
    )  # fmt: skip


def slots(mask: spec.Mask, steps: int) -> np.ndarray:
    """[steps, S]: the position that each slot of a layer's cache holds after each token (-1: empty).

    Tokens are written one at a time by `ops.cache` itself.
    """
    stack = _decoder(dataclasses.replace(_grouped(Shape(layers=1, heads=1, head_dim=2), 1), mask=mask), Shape(layers=1))
    layer = jax.tree.map(lambda x: x[0], caches.init(stack.decoder, 1, steps, "float32").body[0].mixer)
    held = []
    for position in range(steps):
        at = np.full((1, 1), position, np.int32)
        layer = layer.write(np.zeros((1, 1, 1, 2), np.float32), np.zeros((1, 1, 1, 2), np.float32), at)
        held.append(np.asarray(layer.positions[0]))
    return np.stack(held)
