"""LayerNorm and RMSNorm with float32 statistics."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer.spec import Norm


def normalize(
    spec: Norm,
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None = None,
) -> Float[Array, "*B D"]:
    """Normalises the last axis; dtype in = dtype out.

    The order of the scale's multiplication and the cast back follows the family (`Norm.scale_in_float32`).
    Sources: Ba et al. 2016 (LayerNorm), Zhang & Sennrich 2019 (RMSNorm).
    """
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
