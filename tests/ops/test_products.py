"""Products and shifts that make their own gradients, against those that JAX derives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from transformer.ops.activations import ACTIVATIONS, activate
from transformer.ops.products import product, shift

TOLERANCE = {"float32": dict(rtol=1e-5, atol=1e-5), "bfloat16": dict(rtol=0.02, atol=0.1)}


def normal(seed: int, shape: tuple[int, ...], dtype: str = "float32"):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def gradients(function, *args):
    """Of a sum in which every output weighs differently, in float32."""

    def total(*args):
        y = function(*args).astype(jnp.float32)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape))

    return [g.astype(jnp.float32) for g in jax.grad(total, argnums=range(len(args)))(*args)]


def agree(found, expected, dtype: str) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("inputs", "outputs"), [((8,), (3, 4)), ((3, 4), (8,)), ((8,), (5,))])
def test_gradients_of_a_product(inputs, outputs, dtype):
    x, weight = normal(0, (2, 6, *inputs), dtype), normal(1, inputs + outputs)

    def plain(x, weight):
        return jnp.tensordot(x.astype(jnp.float32), weight.astype(dtype).astype(jnp.float32), len(inputs))

    found = gradients(lambda x, weight: product(x, weight, len(inputs)), x, weight)
    agree(found, gradients(plain, x, weight), dtype)


@pytest.mark.parametrize(("inputs", "outputs"), [(40, 16), (16, 40), (16, 16)])
def test_a_gradient_in_bfloat16_may_be_turned(inputs, outputs):
    """XLA:CPU has no product of bfloat16 that writes its result turned, and would make one of both operations."""
    x, weight = normal(0, (2, 6, inputs), "bfloat16"), normal(1, (outputs, inputs))

    def found(weight):
        return gradients(lambda weight: product(x, weight.T, 1), weight)

    plain = gradients(lambda weight: x.astype(jnp.float32) @ weight.astype(x.dtype).astype(jnp.float32).T, weight)
    agree(jax.jit(found)(weight), plain, "bfloat16")
    experts = jax.jit(jax.vmap(found))(jnp.stack([weight, 2 * weight]))
    agree([experts[0][0]], plain, "bfloat16")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(5,), (3, 4)])
def test_gradients_of_a_shift(shape, dtype):
    y, bias = normal(0, (2, 6, *shape), dtype), normal(1, shape)
    agree(gradients(shift, y, bias), gradients(lambda y, bias: y.astype(jnp.float32) + bias, y, bias), dtype)


def test_the_gradient_of_a_bias_is_summed_in_float32():
    """257 is the first whole number that bfloat16 hasn't."""
    y, bias = jnp.zeros((257, 3), jnp.bfloat16), jnp.zeros(3)
    np.testing.assert_array_equal(jax.grad(lambda bias: jnp.sum(shift(y, bias).astype(jnp.float32)))(bias), 257)


def test_the_gradient_of_a_bias_gathers_no_features():
    """Where rows, positions and heads are split, all at once."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "context", "tensor"), axis_types=(AxisType.Auto,) * 3)
    y = jax.ShapeDtypeStruct((4, 8, 2, 16), jnp.float32, sharding=NamedSharding(mesh, P("data", "context", "tensor")))
    bias = jax.ShapeDtypeStruct((2, 16), jnp.float32, sharding=NamedSharding(mesh, P("tensor")))
    gradient = jax.jit(jax.grad(lambda y, bias: jnp.sum(jnp.sin(shift(y, bias))), argnums=(0, 1)))
    text = gradient.lower(y, bias).compile().as_text()
    assert "all-reduce(" in text and "all-gather" not in text and "all-to-all" not in text


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_no_tokens_have_no_gradient(dtype):
    x, weight, bias = jnp.zeros((0, 6, 8), dtype), jnp.ones((8, 3, 4)), jnp.ones((3, 4))
    found = jax.grad(lambda *w: jnp.sum(shift(product(x, w[0], 1), w[1])), argnums=(0, 1))(weight, bias)
    assert all((g == 0).all() for g in found)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_of_an_activation(name, dtype):
    x = normal(0, (4, 33), dtype)
    found = gradients(lambda x: activate(name, x), x)
    agree(found, gradients(lambda x: ACTIVATIONS[name](x.astype(jnp.float32)), x), dtype)
