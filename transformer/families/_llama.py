"""What many families share: Llama's decoder of equal pre-RMSNorm layers, without biases."""

from dataclasses import dataclass
from typing import Any

from transformer import spec as s


@dataclass(frozen=True, kw_only=True)
class Dims:
    """The numbers that nearly every decoder's config states; a family adds its own to them."""

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    max_length: int
    rope_theta: float
    norm_eps: float


def rms_norm(eps: float) -> s.Norm:
    """RMSNorm as Llama casts it: rounded to the activation dtype before the scale."""
    return s.Norm(kind="rms", eps=eps, offset=0.0, bias=False, scale_in_float32=False)


def swiglu(d_ff: int) -> s.FeedForward:
    """SwiGLU without biases."""
    return s.FeedForward(d_ff=d_ff, activation="silu", gated=True, bias=False)


def attention(
    dims: Dims, *, window: int | None = None, rope_scaling: s.Scaling | None = None, **mechanisms: Any
) -> s.Attention:
    """Causal attention with rotary positions and no biases, but for `mechanisms`: further fields of `Attention`."""
    plain = dict(scale=dims.head_dim**-0.5, qkv_bias=False, out_bias=False)
    return s.Attention(
        num_heads=dims.num_heads,
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        mask=s.Mask(causal=True, window=window),
        rope=s.Rope(theta=dims.rope_theta, dim=dims.head_dim, interleaved=False, scaling=rope_scaling),
        **(plain | mechanisms),
    )


def decoder(dims: Any, layers: tuple[s.Block, ...], *, tied: bool, head: int = 0, period: int = 1) -> s.Model:
    """A decoder of `layers`, the first `head` of them irregular, normed in the end as its layers are.

    Args:
      dims: a family's, of which vocab_size, d_model and max_length are read.
      period: with which the other layers repeat.
    """
    return s.Model(
        vocab_size=dims.vocab_size,
        d_model=dims.d_model,
        max_length=dims.max_length,
        embedding=s.Embedding(scale=None, positions=None),
        decoder=s.Stack.of(layers, period, layers[0].norm, head),
        head=s.Head(tied=tied, bias=False),
    )
