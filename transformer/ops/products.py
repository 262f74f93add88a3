"""Products of activations with weights, and weights of eight bits."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A weight in int8, symmetric; stands wherever its array would.

    Attributes:
      values: what is stored.
      scales: float32, of the shape of `values` with 1 for the axes that share a scale.
    """

    values: Int[Array, "..."]
    scales: Float[Array, "..."]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array it stands for."""
        return self.values.shape

    @property
    def size(self) -> int:
        """Numbers in it."""
        return self.values.size

    def astype(self, dtype: jnp.dtype) -> Array:
        """The weight itself."""
        return (self.values.astype(jnp.float32) * self.scales).astype(dtype)


Weight = Float[Array, "..."] | Quantized


def quantize(x: Float[Array, "..."], summed: tuple[int, ...]) -> Quantized:
    """Eight bits a number, one scale for all that a product sums over: it can be applied after the product.

    Args:
      summed: those axes of x.
    """
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=summed, keepdims=True) / 127
    return Quantized(jnp.round(x / jnp.where(scales == 0, 1, scales)).astype(jnp.int8), scales)


def product(x: Float[Array, "..."], weight: Weight, count: int) -> Float[Array, "..."]:
    """Sums over the last `count` axes of x and the first `count` of the weight; dtype in = dtype out."""
    return _product(x, weight, tuple(range(count)), None)


def scores(x: Float[Array, "B T D"], table: Weight) -> Float[Array, "B T V"]:
    """Products with the rows of a table [V, D], in float32."""
    return _product(x, table, (1,), jnp.float32)


def rows(table: Weight, index: Int[Array, "..."]) -> Float[Array, "... D"]:
    """Rows of a table [V, D], in float32 where it is quantized; NaN for an index outside of it."""
    if not isinstance(table, Quantized):
        return jnp.take(table, index, axis=0, mode="fill")
    scales = jnp.take(table.scales, index, axis=0, mode="fill")
    return jnp.take(table.values, index, axis=0, mode="clip").astype(jnp.float32) * scales


def _product(x: Array, weight: Weight, summed: tuple[int, ...], dtype: jnp.dtype | None) -> Array:
    """Sums over the last axes of x and the `summed` axes of the weight, in `dtype` (that of x)."""
    axes = tuple(range(x.ndim - len(summed), x.ndim)), summed
    if not isinstance(weight, Quantized):
        return _dot(x, weight.astype(x.dtype), axes, dtype)
    # Tied to x, so that no loop keeps a wide copy of the weights: widening is a part of the product.
    x, values = jax.lax.optimization_barrier((x, weight.values))
    scales = jnp.squeeze(weight.scales, summed)
    return (_dot(x, values.astype(x.dtype), axes, jnp.float32) * scales).astype(dtype or x.dtype)


def _dot(x: Array, weight: Array, axes: tuple[tuple[int, ...], tuple[int, ...]], dtype: jnp.dtype | None) -> Array:
    # XLA:CPU has no matrix library for one row of bfloat16: two rows take a sixth of its time (benchmarks/decode.py).
    lone = x.dtype == jnp.bfloat16 and x.ndim > len(axes[0]) and math.prod(x.shape[: -len(axes[0])]) == 1
    if lone:
        x = jnp.concatenate([x, jnp.zeros_like(x)])
    y = jax.lax.dot_general(x, weight, (axes, ((), ())), preferred_element_type=dtype)
    return y[:1] if lone else y
