"""Mistral 7B (Jiang et al. 2023): Llama's layer with a sliding window in every layer."""

from dataclasses import dataclass

from transformer import spec as s


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Numbers of the published config; `window` None attends to everything (v0.2 on)."""

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    max_length: int
    window: int | None
    rope_theta: float
    norm_eps: float


def spec(dims: Dims) -> s.Model:
    """The decoder of Mistral 7B."""
    norm = s.Norm(kind="rms", eps=dims.norm_eps, offset=0.0, bias=False, scale_in_float32=False)
    attention = s.Attention(
        num_heads=dims.num_heads,
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        mask=s.Mask(causal=True, window=dims.window),
        scale=dims.head_dim**-0.5,
        rope=s.Rope(theta=dims.rope_theta, dim=dims.head_dim, interleaved=False),
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
        head=s.Head(tied=False, bias=False),
    )
