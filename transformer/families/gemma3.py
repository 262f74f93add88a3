"""Gemma 3, text model (Gemma Team 2025): sandwich norms, QK-norm, five local layers to one global, GeGLU."""

from dataclasses import dataclass

from transformer import spec as s


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Numbers of the published configs.

    Attributes:
      window: keys that a local layer sees.
      pattern: every `pattern`-th layer is global, the others are local.
      query_scale: scores are multiplied by query_scale ** -0.5 (not by head_dim ** -0.5).
      rope_theta_local: base of the local layers, never scaled; rope_theta and rope_scaling serve the global ones.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    max_length: int
    window: int
    pattern: int
    query_scale: float
    rope_theta: float
    rope_theta_local: float
    rope_scaling: s.LinearScaling | None = None
    norm_eps: float


def spec(dims: Dims) -> s.Model:
    """The decoder of Gemma 3; token vectors are scaled by sqrt(d_model) and serve as the head."""
    norm = s.Norm(kind="rms", eps=dims.norm_eps, offset=1.0, bias=False, scale_in_float32=True)
    everywhere = s.Rope(theta=dims.rope_theta, dim=dims.head_dim, interleaved=False, scaling=dims.rope_scaling)
    nearby = s.Rope(theta=dims.rope_theta_local, dim=dims.head_dim, interleaved=False)
    ffn = s.FeedForward(d_ff=dims.d_ff, activation="gelu_tanh", gated=True, bias=False)

    def layer(window: int | None, rope: s.Rope) -> s.Block:
        attention = s.Attention(
            num_heads=dims.num_heads,
            num_kv_heads=dims.num_kv_heads,
            head_dim=dims.head_dim,
            mask=s.Mask(causal=True, window=window),
            scale=dims.query_scale**-0.5,
            rope=rope,
            qkv_bias=False,
            out_bias=False,
            qk_norm=norm,
        )
        return s.Block(mixer=attention, ffn=ffn, norm=norm, placement="sandwich")

    local, full = layer(dims.window, nearby), layer(None, everywhere)
    layers = tuple(full if (i + 1) % dims.pattern == 0 else local for i in range(dims.num_layers))
    return s.Model(
        vocab_size=dims.vocab_size,
        d_model=dims.d_model,
        max_length=dims.max_length,
        embedding=s.Embedding(scale=dims.d_model**0.5, positions=None),
        decoder=s.Stack.of(layers, dims.pattern, norm),
        head=s.Head(tied=True, bias=False),
    )
