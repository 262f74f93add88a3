"""GPT-3 (Brown et al. 2020): GPT-2 with dense and locally banded attention in alternate layers.

The band is the "local" pattern of the Sparse Transformer (openai/sparse_attention, attention.py: a band of
`bandwidth` keys ending at the query), which is a sliding window. Its width was not published.
"""

from dataclasses import dataclass

from transformer import spec as s
from transformer.families.gpt2 import NORM, block


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Field names of the paper's table 2.1; head_dim is free of d_model there."""

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    head_dim: int
    max_length: int
    window: int


def spec(dims: Dims) -> s.Model:
    """The decoder of GPT-3: even layers dense, odd ones banded; the head is the token table."""
    pair = tuple(
        block(dims.d_model, 4 * dims.d_model, dims.num_heads, dims.head_dim, window) for window in (None, dims.window)
    )
    layers = tuple(pair[i % 2] for i in range(dims.num_layers))
    return s.Model(
        vocab_size=dims.vocab_size,
        d_model=dims.d_model,
        max_length=dims.max_length,
        embedding=s.Embedding(scale=None, positions=s.LearnedPositions(max_length=dims.max_length)),
        decoder=s.Stack.of(layers, 2, NORM),
        head=s.Head(tied=True, bias=False),
    )
