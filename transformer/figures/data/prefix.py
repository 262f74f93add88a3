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
def stale(causal: bool = True, window: int | None = None) -> np.ndarray:
    """[T, L, T]: by the place of a token that changes, whether a layer's key or value of each token changes with it.

    Layers of random weights read a text as long as `journey.PROMPT`, and beside it the same text with another
    token in each place; what differs by a bit must not be reused.
    """
    model, count = families.build_spec(CONFIG | dict(num_layers=LAYERS)), len(PROMPT)
    mask = spec.Mask(causal=causal, window=window)

    def masked(block: spec.Block) -> spec.Block:
        return dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, mask=mask))

    stack = model.decoder.map(masked)
    layers = Stack(stack, Compute(attention="reference"))
    rng = np.random.default_rng(0)
    embeddings, others = rng.standard_normal((2, count, model.d_model)).astype(np.float32)
    texts = np.repeat(embeddings[None], 1 + count, axis=0)
    texts[1 + np.arange(count), np.arange(count)] = others
    context = make_context(model.ropes, jnp.arange(count)[None])

    shapes = nn.meta.unbox(jax.eval_shape(lambda key: layers.init(key, texts, context, None), jax.random.key(0)))
    params = jax.tree.map(lambda a: (rng.standard_normal(a.shape) / model.d_model**0.5).astype(np.float32), shapes)
    seen = jax.jit(lambda x: layers.apply(params, x, context, None, mutable="intermediates")[1])(texts)
    points = [layer["attention"] for layer in captured.layers(stack, jax.device_get(seen["intermediates"]))]
    changed = [[(layer[x][1:] != layer[x][:1]).any(axis=(-2, -1)) for x in "kv"] for layer in points]
    return np.array(changed).any(axis=1).swapaxes(0, 1)
