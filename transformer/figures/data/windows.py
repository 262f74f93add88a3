"""How far a token sees: paths of information through a stack, measured by gradient."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer import spec
from transformer.figures.data import captured, published
from transformer.nn.context import make_context
from transformer.nn.stack import Stack
from transformer.settings import Compute

WIDTH = 8


def pattern(reference: str | spec.Model) -> tuple[int | None, ...]:
    """The window of each layer of a published model's last stack; None sees everything behind."""
    return tuple(block.mixer.mask.window for block in published.model(reference).trunk.layers)


def reach(windows: tuple[int | None, ...], sinks: int = 0) -> int | None:
    """Tokens that the last layer's output can depend on, its own included: 1 + Σ (window - 1) and sinks; None: all.

    Sinks see nothing but each other, so that what lies between them and the windows' reach stays out of it.
    """
    return None if None in windows else 1 + sum(window - 1 for window in windows) + sinks


def stack(windows: tuple[int | None, ...], sinks: int = 0) -> spec.Stack:
    """A small stack with a window in each layer (None: all), and sinks in those that have a window."""

    def block(window: int | None) -> spec.Block:
        mask = spec.Mask(causal=True, window=window, sinks=sinks if window is not None else 0)
        mixer = spec.Attention(
            num_heads=2, num_kv_heads=2, head_dim=4, mask=mask, scale=0.5, rope=None, qkv_bias=False, out_bias=False
        )
        norm = spec.Norm(kind="rms", eps=1e-6, offset=0.0, bias=False, scale_in_float32=True)
        ffn = spec.FeedForward(d_ff=WIDTH, activation="silu", gated=False, bias=False)
        return spec.Block(mixer=mixer, ffn=ffn, norm=norm, placement="pre")

    return spec.Stack(body=tuple(map(block, windows)), repeats=1, final_norm=None)


@functools.cache
def influence(windows: tuple[int | None, ...], length: int, sinks: int = 0) -> np.ndarray:
    """[L, T, T]: whether the output of layer l at query t moves with the input of the stack at token s.

    The gradient of a random mix of each output's features, through the layers that training uses.
    """
    built = stack(windows, sinks)
    layers = Stack(built, Compute(attention="reference"))
    rng, context = np.random.default_rng(0), make_context((), jnp.arange(length)[None])
    x, mix = rng.standard_normal((2, 1, length, WIDTH)).astype(np.float32)
    shapes = nn.meta.unbox(jax.eval_shape(lambda key: layers.init(key, x, context, None), jax.random.key(0)))
    params = jax.tree.map(lambda a: rng.standard_normal(a.shape).astype(np.float32) / WIDTH**0.5, shapes)

    def outputs(x):
        _, seen = layers.apply(params, x, context, None, mutable="intermediates")
        after = [layer["residual"] for layer in captured.layers(built, seen["intermediates"])]
        return jnp.sum(jnp.stack(after)[:, 0] * mix, axis=-1)

    slopes = jax.jit(jax.jacrev(outputs))(x)[:, :, 0]
    return np.abs(np.asarray(slopes)).max(axis=-1) > 0
