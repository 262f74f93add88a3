"""Products of activations with weights, and the forms in which weights wait for them.

What XLA:CPU is good at decides the forms (figures: benchmarks/decode.py). Its library multiplies int8 with int8, but
widens int8 slowly; and it reads a matrix faster whose summed axis is the last one.
"""

import functools
import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from transformer import axes as ax
from transformer import sharding
from transformer.ops.sums import Sums

# Steps of a digit of `_digits` in one of the digit before: half of one is 127, the largest int8.
BASE = 254


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Turned:
    """A weight that is stored with its first axes, those summed over, behind the others; stands wherever it would.

    Attributes:
      weight: what is stored.
      count: how many axes were moved.
    """

    weight: Float[Array, "..."] | Quantized
    count: int = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight it stands for."""
        stored = self.weight.shape
        return (*stored[-self.count :], *stored[: -self.count])

    @property
    def size(self) -> int:
        """Numbers in it."""
        return self.weight.size

    def astype(self, dtype: jnp.dtype) -> Array:
        """The weight itself, its axes in their places."""
        return jnp.moveaxis(self.weight.astype(dtype), range(-self.count, 0), range(self.count))


Weight = Float[Array, "..."] | Quantized | Turned


def quantize(x: Float[Array, "..."], summed: tuple[int, ...]) -> Quantized:
    """Eight bits a number, one scale for all that a product sums over: it can be applied after the product.

    Args:
      summed: those axes of x.
    """
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=summed, keepdims=True) / 127
    return Quantized(jnp.round(x / jnp.where(scales == 0, 1, scales)).astype(jnp.int8), scales)


def turn(weight: Float[Array, "..."] | Quantized, count: int) -> Turned:
    """The weight stored with its first `count` axes last."""
    return Turned(jax.tree.map(lambda a: jnp.moveaxis(a, range(count), range(-count, 0)), weight), count)


def product(x: Float[Array, "..."], weight: Weight, count: int, sums: Sums | None = None) -> Float[Array, "..."]:
    """Sums over the last `count` axes of x and the first `count` of the weight; dtype in = dtype out.

    Args:
      sums: of the weight's gradient, for x of [B, T, …] or [B, …]; None: as the compiler sums it.
    """
    if isinstance(weight, Quantized | Turned):
        return _product(x, weight, tuple(range(count)), None)
    return _dense_product(x, weight, count, sums if sums is not None and sums.needed() else None)


@jax.custom_vjp
def shift(y: Float[Array, "..."], bias: Float[Array, "..."]) -> Float[Array, "..."]:
    """y + bias, a bias of y's last axes, in the dtype of y. The bias's gradient is summed in float32."""
    return y + bias.astype(y.dtype)


def _shift_backward(bias: Array, d: Array) -> tuple[Array, Array]:
    # One axis of features: of several, XLA:CPU sums in steps, each with a copy (docs/performance.md).
    lead = d.shape[: d.ndim - bias.ndim]
    features = d.reshape(*lead, bias.size).astype(jnp.float32)
    return d, jnp.sum(features, axis=range(len(lead))).reshape(bias.shape).astype(bias.dtype)


shift.defvjp(lambda y, bias: (y + bias.astype(y.dtype), bias), _shift_backward)


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
    if isinstance(weight, Turned):
        lead, outputs = x.shape[: -weight.count], weight.weight.shape[: -weight.count]
        # As matrices: of more axes, XLA would bring those summed over to the front again, at every call.
        matrix = jax.tree.map(lambda a: a.reshape(math.prod(a.shape[: -weight.count]), -1), weight.weight)
        return _product(x.reshape(*lead, -1), matrix, (1,), dtype).reshape(*lead, *outputs)
    axes = tuple(range(x.ndim - len(summed), x.ndim)), summed
    if not isinstance(weight, Quantized):
        return _dot(x, weight.astype(x.dtype), axes, dtype)
    digits, step = _digits(x, len(summed))
    axes = tuple(axis + 1 for axis in axes[0]), summed
    parts = jax.lax.dot_general(digits, weight.values, (axes, ((), ())), preferred_element_type=jnp.int32)
    y = sum(part / BASE**i for i, part in enumerate(parts))
    scales = jnp.squeeze(weight.scales, summed)
    step = step.reshape(*step.shape[: -len(summed)], *(1,) * scales.ndim)
    return (y * step * scales).astype(dtype or x.dtype)


def _digits(x: Float[Array, "..."], count: int) -> tuple[Int[Array, "n ..."], Float[Array, "..."]]:
    """(int8 digits, float32 step): x = (first + second / BASE + …) step, one step for the last `count` axes.

    As many as x has bits for, so that integers multiply integers and yet nothing but the weights is quantized: two for
    bfloat16 (16 bits of the largest number), three for float32. With one row, the second one is free: the library
    that XLA:CPU has for products wants two rows.
    """
    digits = 2 if x.dtype == jnp.bfloat16 else 3
    x = x.astype(jnp.float32)
    step = jnp.max(jnp.abs(x), axis=range(-count, 0), keepdims=True) / 127
    rest, found = x / jnp.where(step == 0, 1, step), []
    for _ in range(digits):
        found.append(jnp.round(rest))
        rest = (rest - found[-1]) * BASE
    return jnp.stack(found).astype(jnp.int8), step


def _dot(x: Array, weight: Array, axes: tuple[tuple[int, ...], tuple[int, ...]], dtype: jnp.dtype | None) -> Array:
    # XLA:CPU has no matrix library for one row of bfloat16: two rows take a sixth of its time (benchmarks/decode.py).
    lone = x.dtype == jnp.bfloat16 and x.ndim > len(axes[0]) and math.prod(x.shape[: -len(axes[0])]) == 1
    if lone:
        x = jnp.concatenate([x, jnp.zeros_like(x)])
    y = jax.lax.dot_general(x, weight, (axes, ((), ())), preferred_element_type=dtype)
    return y[:1] if lone else y


def over_tokens(x: Float[Array, "..."], d: Float[Array, "..."], lead: int) -> Float[Array, "..."]:
    """Sums of products over the first `lead` axes of both, in float32: the gradient of a weight.

    In the form that XLA:CPU has a library for (docs/performance.md): in float32 as matrices, as it would turn what has
    more axes; in bfloat16 with all axes, as it knows no sum over the first axis of matrices.
    """
    tokens, inputs, outputs = x.shape[:lead], x.shape[lead:], d.shape[lead:]
    if x.dtype == jnp.float32:
        x, d = (a.reshape(math.prod(tokens), math.prod(features)) for a, features in ((x, inputs), (d, outputs)))
        return (x.T @ d).reshape(inputs + outputs)
    if turns_first(x.dtype) and math.prod(inputs) > math.prod(outputs):
        return jnp.moveaxis(_over_tokens(d, x, lead), range(len(outputs)), range(-len(outputs), 0))
    return _over_tokens(x, d, lead)


def turns_first(dtype: jnp.dtype) -> bool:
    """True where XLA:CPU turns the first factor of `over_tokens` by a copy: better the smaller one."""
    return dtype != jnp.float32 and sharding.platform() == "cpu"


def _over_tokens(x: Array, d: Array, lead: int) -> Array:
    tokens = tuple(range(lead))
    y = jax.lax.dot_general(x, d, ((tokens, tokens), ((), ())), preferred_element_type=jnp.float32)
    # XLA:CPU makes one operation of this and of what turns its result, which it then can't run.
    return jax.lax.optimization_barrier(y) if turns_first(x.dtype) else y


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _dense_product(x: Array, weight: Array, count: int, sums: Sums | None) -> Array:
    """`product`, whose gradients are products of two matrices, that of the weight in its own layout and float32.

    Left to itself, XLA:CPU makes it turned, of a turned copy of `d`, which takes up to five times as long
    (docs/performance.md). With `sums`, each device makes it of its own tokens; it is summed once, and kept in parts: a
    compiler would sum it whole on every device where it spans all of them (`sharding.scattered_sum`).
    """
    return _product(x, weight, tuple(range(count)), None)


def _dense_forward(x: Array, weight: Array, count: int, sums: Sums | None) -> tuple[Array, tuple[Array, Array]]:
    # The product itself: a policy of remat looks into no call that has a gradient of its own.
    return _product(x, weight, tuple(range(count)), None), (x, weight)


def _dense_backward(count: int, sums: Sums | None, kept: tuple[Array, Array], d: Array) -> tuple[Array, Array]:
    x, weight = kept
    lead = x.ndim - count
    behind = tuple(range(lead, d.ndim)), tuple(range(count, weight.ndim))
    dx = jax.lax.dot_general(d, weight.astype(x.dtype), (behind, ((), ())))
    tokens = tuple(range(lead)), tuple(range(lead))
    if sums is None:
        return dx, over_tokens(x, d, lead).astype(weight.dtype)
    plan, inputs, outputs = sums.plan(weight.shape), tuple(range(count)), tuple(range(count, weight.ndim))
    first = plan.first in outputs

    def local(x: Array, d: Array) -> Array:
        # The dimension that is scattered comes first (`Plan.first`).
        g = jax.lax.dot_general(*((d, x) if first else (x, d)), (tokens, ((), ())), preferred_element_type=sums.dtype)
        return plan.sum(g, outputs + inputs if first else inputs + outputs)

    axes = sharding.partition_spec((ax.BATCH, ax.LENGTH)[:lead], x.shape[:lead], plan.mesh, sums.rules, "activation")
    specs = tuple(PartitionSpec(*axes, *plan.features(part)) for part in (inputs, outputs))
    return dx, jax.shard_map(local, in_specs=specs, out_specs=plan.place)(x, d).astype(weight.dtype)


_dense_product.defvjp(_dense_forward, _dense_backward)
