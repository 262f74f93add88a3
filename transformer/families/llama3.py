"""Llama 3 (Grattafiori et al. 2024): pre-RMSNorm decoder, rotary positions, grouped queries, SwiGLU."""

from dataclasses import dataclass

from transformer import spec as s


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Numbers of the published configs; `rope_scaling` is None in 3.0 and piecewise from 3.1 on."""

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    max_length: int
    rope_theta: float
    rope_scaling: s.PiecewiseScaling | s.LinearScaling | s.YarnScaling | None = None
    norm_eps: float
    tied: bool


def spec(dims: Dims) -> s.Model:
    """The decoder of Llama 3, without any bias."""
    norm = s.Norm(kind="rms", eps=dims.norm_eps, offset=0.0, bias=False, scale_in_float32=False)
    rope = s.Rope(theta=dims.rope_theta, dim=dims.head_dim, interleaved=False, scaling=dims.rope_scaling)
    attention = s.Attention(
        num_heads=dims.num_heads,
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        mask=s.Mask(causal=True),
        scale=dims.head_dim**-0.5,
        rope=rope,
        qkv_bias=False,
        out_bias=False,
    )
    ffn = s.FeedForward(d_ff=dims.d_ff, activation="silu", gated=True, bias=False)
    layer = s.Block(mixer=attention, ffn=ffn, norm=norm, placement="pre")
    return s.Model(
        vocab_size=dims.vocab_size,
        d_model=dims.d_model,
        max_length=dims.max_length,
        embedding=s.Embedding(scale=None, positions=None),
        decoder=s.Stack.of((layer,) * dims.num_layers, 1, norm),
        head=s.Head(tied=dims.tied, bias=False),
    )
