"""What many families share: Llama's decoder of equal pre-RMSNorm layers, without biases."""

from transformer import spec as s


def rms_norm(eps: float) -> s.Norm:
    """RMSNorm as Llama casts it: rounded to the activation dtype before the scale."""
    return s.Norm(kind="rms", eps=eps, offset=0.0, bias=False, scale_in_float32=False)


def swiglu(d_ff: int) -> s.FeedForward:
    """SwiGLU without biases."""
    return s.FeedForward(d_ff=d_ff, activation="silu", gated=True, bias=False)


def decoder(
    layers: tuple[s.Block, ...],
    *,
    vocab_size: int,
    d_model: int,
    max_length: int,
    tied: bool,
    head: int = 0,
    period: int = 1,
) -> s.Model:
    """A decoder of `layers`, the first `head` of them irregular, normed in the end as its layers are."""
    return s.Model(
        vocab_size=vocab_size,
        d_model=d_model,
        max_length=max_length,
        embedding=s.Embedding(scale=None, positions=None),
        decoder=s.Stack.of(layers, period, layers[0].norm, head),
        head=s.Head(tied=tied, bias=False),
    )
