"""The transformer of 2017 (Vaswani et al., "Attention Is All You Need", arXiv:1706.03762): post-norm, sinusoids.

One token table serves encoder, decoder and head, and is scaled by sqrt(d_model) on the way in (section 3.4).
"""

from dataclasses import dataclass

from transformer import spec as s

NORM = s.Norm(kind="layer", eps=1e-5, offset=0.0, bias=True, scale_in_float32=True)
SINUSOID_BASE = 1e4


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Field names of the paper's table 3, whose h is `num_heads`.

    Attributes:
      num_layers, num_decoder_layers: of the encoder and of the decoder.
      decoder_start: the token with which a decoded text begins.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_decoder_layers: int
    num_heads: int
    d_ff: int
    max_length: int
    decoder_start: int


def encoder_decoder(dims: Dims, *, activation: str, interleaved: bool, head_bias: bool) -> s.Model:
    """An encoder and a decoder of post-norm layers with biases.

    Args:
      interleaved: sines and cosines alternate.
    """
    if dims.d_model % dims.num_heads:
        raise s.SpecError(f"model.d_model={dims.d_model}: must be a multiple of num_heads={dims.num_heads}")

    def attention(causal: bool) -> s.Attention:
        head_dim = dims.d_model // dims.num_heads
        return s.Attention(
            num_heads=dims.num_heads,
            num_kv_heads=dims.num_heads,
            head_dim=head_dim,
            mask=s.Mask(causal=causal),
            scale=head_dim**-0.5,
            rope=None,
            qkv_bias=True,
            out_bias=True,
        )

    ffn = s.FeedForward(d_ff=dims.d_ff, activation=activation, gated=False, bias=True)
    reads = s.Block(mixer=attention(False), ffn=ffn, norm=NORM, placement="post")
    writes = s.Block(mixer=attention(True), cross=attention(False), ffn=ffn, norm=NORM, placement="post")
    positions = s.SinusoidalPositions(base=SINUSOID_BASE, interleaved=interleaved)
    return s.Model(
        vocab_size=dims.vocab_size,
        d_model=dims.d_model,
        max_length=dims.max_length,
        embedding=s.Embedding(scale=dims.d_model**0.5, positions=positions),
        encoder=s.Stack.of((reads,) * dims.num_layers, 1, None),
        decoder=s.Stack.of((writes,) * dims.num_decoder_layers, 1, None),
        head=s.Head(tied=True, bias=head_bias),
        decoder_start=dims.decoder_start,
    )


def spec(dims: Dims) -> s.Model:
    """The paper's model."""
    return encoder_decoder(dims, activation="relu", interleaved=True, head_bias=False)
