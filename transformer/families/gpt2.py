"""GPT-2 (Radford et al. 2019): pre-norm decoder, learned positions, multi-head attention, GELU."""

from dataclasses import dataclass

from transformer import spec as s


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Field names of the paper's table 2; the feed-forward is four times as wide as the model."""

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    max_length: int


def block(d_model: int, d_ff: int, num_heads: int, head_dim: int, window: int | None = None) -> s.Block:
    """One GPT layer, with biases everywhere."""
    attention = s.Attention(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        mask=s.Mask(causal=True, window=window),
        scale=head_dim**-0.5,
        rope=None,
        qkv_bias=True,
        out_bias=True,
    )
    ffn = s.FeedForward(d_ff=d_ff, activation="gelu_tanh", gated=False, bias=True)
    return s.Block(mixer=attention, ffn=ffn, norm=NORM, placement="pre")


NORM = s.Norm(kind="layer", eps=1e-5, offset=0.0, bias=True, scale_in_float32=True)


def spec(dims: Dims) -> s.Model:
    """The decoder of GPT-2; the head is the token table."""
    if dims.d_model % dims.num_heads:
        raise s.SpecError(f"model.d_model={dims.d_model}: must be a multiple of num_heads={dims.num_heads}")
    layer = block(dims.d_model, 4 * dims.d_model, dims.num_heads, dims.d_model // dims.num_heads)
    return s.Model(
        vocab_size=dims.vocab_size,
        d_model=dims.d_model,
        max_length=dims.max_length,
        embedding=s.Embedding(scale=None, positions=s.LearnedPositions(max_length=dims.max_length)),
        decoder=s.Stack.of((layer,) * dims.num_layers, 1, NORM),
        head=s.Head(tied=True, bias=False),
    )
