"""A tiny encoder-decoder that belongs to no family, and what it makes of texts."""

import dataclasses
import functools

import flax.linen as nn
import jax
import numpy as np

from transformer import spec
from transformer.nn import initial
from transformer.nn.context import Source
from transformer.nn.model import Transformer
from transformer.settings import Compute

VOCAB, START, WIDTH = 40, 7, 32
# Longer and shorter than the shortest bucket of lengths.
SOURCES = (3, 21, 9, 16)
NORM = spec.Norm(kind="layer", eps=1e-5, offset=0.0, bias=True, scale_in_float32=True)


def block(causal: bool, crosses: bool) -> spec.Block:
    """A block with relative biases, of which only self-attention has any."""

    def attention(causal, relative=None):
        shape = dict(num_heads=4, num_kv_heads=4, head_dim=8, scale=0.3, rope=None, qkv_bias=False, out_bias=False)
        return spec.Attention(mask=spec.Mask(causal=causal), relative=relative, **shape)

    biases = spec.RelativeBias(num_buckets=8, max_distance=20, bidirectional=not causal)
    ffn = spec.FeedForward(d_ff=48, activation="relu", gated=False, bias=True)
    cross = attention(False) if crosses else None
    return spec.Block(mixer=attention(causal, biases), cross=cross, ffn=ffn, norm=NORM, placement="pre")


ENCODER = spec.Stack.of((block(False, False),) * 3, 1, NORM)
SPEC = spec.Model(
    vocab_size=VOCAB, d_model=WIDTH, max_length=64, embedding=spec.Embedding(scale=None, positions=None),
    encoder=ENCODER, decoder=spec.Stack.of((block(True, True),) * 2, 1, NORM), decoder_start=START,
    head=spec.Head(tied=False, bias=True),
)  # fmt: skip
MODEL = Transformer(SPEC, Compute(attention="reference"))


def resized(vocab_size: int, start: int = START) -> spec.Model:
    """The same model of another vocabulary."""
    return dataclasses.replace(SPEC, vocab_size=vocab_size, decoder_start=start)


@functools.cache
def params() -> dict:
    """Random parameters of the model."""
    return random_params(MODEL)


def random_params(model: Transformer) -> dict:
    """Parameters of which none is left at zero or one."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        noise = rng.standard_normal(leaf.shape).astype(np.float32)
        return 1 + 0.1 * noise if path[-1].key == "scale" else noise * 2 / np.sqrt(WIDTH)

    return jax.tree.map_with_path(draw, nn.meta.unbox(initial.abstract_params(model)))


def sources(seed: int = 0) -> list[list[int]]:
    """Ragged texts for the encoder, of `SOURCES` tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() for length in SOURCES]


def logprobs(source: list[int], written: list[int], model: Transformer = MODEL, values=None) -> np.ndarray:
    """Log probabilities [T + 1, V] of what follows the start and each written token, from one whole forward."""
    tokens = np.zeros((1, 64), np.int32)
    tokens[0, : len(written) + 1] = [model.spec.decoder_start, *written]
    read = np.zeros((1, 32), np.int32)
    read[0, : len(source)] = source
    positions = np.where(np.arange(32) < len(source), np.arange(32), -1)[None]
    values = params() if values is None else values
    return np.asarray(_forward(model, values, tokens, Source(read, positions)))[0, : len(written) + 1]


@functools.partial(jax.jit, static_argnums=0)
def _forward(model, values, tokens, source):
    return jax.nn.log_softmax(model.apply({"params": values}, tokens, source=source))
