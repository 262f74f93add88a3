"""What one more token of each row costs while decoding, counted from the spec alone: no arrays, no jax."""

from transformer import spec
from transformer.planning.accounting import BYTES, Flops, block_flops, block_parameters, flops_per_token, parameters
from transformer.planning.caches import cache_numbers


def step_flops(model: spec.Model, length: int, source_len: int | None = None) -> Flops:
    """FLOPs of one token that has `length` tokens to look at, itself included, over a cache.

    Latent attention looks at the latents themselves. What cross-attention looks at was made before.

    Args:
      source_len: tokens that an encoder read; by default as many.

    Raises:
      ValueError: `length` is not positive, or the model writes no text.
    """
    if length < 1 or model.decoder is None:
        remedy = "use at least 1 token" if length < 1 else "an encoder alone writes no text"
        raise ValueError(f"length={length}: {remedy}")
    total = Flops(head=flops_per_token(model, 1, training=False).head)
    for block in model.decoder.layers:
        a, one = block.mixer, block_flops(block, model.d_model, 1)
        seen = min(length, a.mask.window + a.mask.sinks) if a.mask.window else length
        a_key = one.scores
        if isinstance(a, spec.LatentAttention):
            a_key = 2.0 * a.num_heads * (2 * a.kv_rank + a.rope_dim)
        cross = 0.0
        if block.cross:
            cross = 4.0 * block.cross.num_heads * block.cross.head_dim * (model.d_model + (source_len or length))
        total = total + Flops(projections=one.projections, scores=a_key * seen, cross=cross, ffn=one.ffn)
    return total


def weights_read(model: spec.Model, rows: float) -> float:
    """Numbers of the parameters that a step of `rows` rows must read.

    Of experts those count that any row visits, on average over even routing; of the embedding's table its rows, unless
    it is the head's, too; of an encoder and of multi-token prediction none.
    """
    total, width = parameters(model).total + rows * model.d_model, model.d_model
    if model.head is None or not model.head.tied:
        total -= model.vocab_size * width
    if model.encoder is not None:
        total -= sum(block_parameters(block, width).total for block in model.encoder.layers)
    for block in model.decoder.layers:
        ffn = block.ffn
        if isinstance(ffn, spec.MoE) and ffn.num_experts > ffn.top_k:
            expert = block_parameters(block, width).idle / (ffn.num_experts - ffn.top_k)
            total -= (1 - ffn.top_k / ffn.num_experts) ** rows * ffn.num_experts * expert
    return total


def step_bytes(
    model: spec.Model, rows: int, length: int, weights: str = "bfloat16", cache: str = "bfloat16"
) -> tuple[float, float]:
    """Bytes that a step of `rows` rows must read, of weights and of a cache of `length` slots, in these dtypes."""
    return weights_read(model, rows) * BYTES[weights], rows * cache_numbers(model, length).bytes(cache)
