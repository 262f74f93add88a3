"""What becomes of cached keys and values when a token of the text is another one."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer import families, spec
from transformer.figures.data import captured
from transformer.figures.data.journey import CONFIG, PROMPT
from transformer.nn.context import make_context
from transformer.nn.stack import Stack
from transformer.settings import Compute

LAYERS = 4


@functools.cache
def stale(at: int, causal: bool = True, window: int | None = None) -> np.ndarray:
    """[L, T]: whether a layer's key or value of a token changes with token `at` of `journey.PROMPT`.

    Layers at their initial weights read a text and the same text with another token in that place; what differs by a
    bit must not be reused.

    Raises:
      ValueError: no such place.
    """
    if not 0 <= at < len(PROMPT):
        raise ValueError(f"at={at}: use 0 to {len(PROMPT) - 1}")
    model = families.build_spec(CONFIG | dict(num_layers=LAYERS))
    mask = spec.Mask(causal=causal, window=window)

    def masked(block: spec.Block) -> spec.Block:
        return dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, mask=mask))

    stack = model.decoder.map(masked)
    layers = Stack(stack, Compute(attention="reference"))
    embeddings, other = np.random.default_rng(0).standard_normal((2, len(PROMPT), model.d_model)).astype(np.float32)
    texts = np.stack([embeddings, embeddings])
    texts[1, at] = other[at]
    context = make_context(model.ropes, jnp.arange(len(PROMPT))[None])
    params = nn.meta.unbox(layers.init(jax.random.key(0), texts, context, None))
    _, seen = layers.apply(params, texts, context, None, mutable="intermediates")
    points = [layer["attention"] for layer in captured.layers(stack, jax.device_get(seen["intermediates"]))]
    return np.array([[(layer[x][0] != layer[x][1]).any(axis=(-2, -1)) for x in "kv"] for layer in points]).any(axis=1)
