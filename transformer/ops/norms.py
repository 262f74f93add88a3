"""LayerNorm and RMSNorm with float32 statistics."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer.spec import Norm


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def normalize(
    spec: Norm,
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None = None,
) -> Float[Array, "*B D"]:
    """Normalises the last axis; dtype in = dtype out. Its gradient keeps nothing but what it is given.

    The order of the scale's multiplication and the cast back follows the family (`Norm.scale_in_float32`).
    Sources: Ba et al. 2016 (LayerNorm), Zhang & Sennrich 2019 (RMSNorm).
    """
    return _normalize(spec, x, scale, bias)


def _normalize(spec: Norm, x: Array, scale: Array, bias: Array | None) -> Array:
    dtype = x.dtype
    x = x.astype(jnp.float32)
    if spec.kind == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + spec.eps)
    scale = scale.astype(jnp.float32) + spec.offset
    if not spec.scale_in_float32:
        x, scale = x.astype(dtype), scale.astype(dtype)
    x = x * scale
    if bias is not None:
        x = x + bias.astype(x.dtype)
    return x.astype(dtype)


def _forward(spec: Norm, x: Array, scale: Array, bias: Array | None = None) -> tuple[Array, tuple]:
    return _normalize(spec, x, scale, bias), (x, scale, bias)


def _backward(spec: Norm, kept: tuple, d: Array) -> tuple[Array, Array, Array | None]:
    return jax.vjp(functools.partial(_normalize, spec), *kept)[1](d)


normalize.defvjp(_forward, _backward)
