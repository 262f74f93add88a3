"""LayerNorm and RMSNorm against float64, and the families' orders of multiplication and cast."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.ops.norms import normalize
from transformer.spec import Norm

RMS = Norm(kind="rms", eps=1e-6, offset=0.0, bias=False, scale_in_float32=False)
LAYER = Norm(kind="layer", eps=1e-5, offset=0.0, bias=True, scale_in_float32=True)
BF16 = jnp.bfloat16


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32) * 3 + 1


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("eps", [1e-6, 1.0])
def test_rms_norm_is_the_formula(offset, eps):
    """x / sqrt(mean(x²) + eps) · (offset + scale): the epsilon is inside the root."""
    x, scale = draw(2, 5, 16).astype(np.float64), draw(16)
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * (offset + scale)
    spec = dataclasses.replace(RMS, offset=offset, eps=eps)
    np.testing.assert_allclose(normalize(spec, jnp.asarray(x, jnp.float32), scale), want, atol=2e-5)


@pytest.mark.parametrize("eps", [1e-5, 1.0])
def test_layer_norm_is_the_formula(eps):
    x, scale, bias = draw(2, 5, 16).astype(np.float64), draw(16), draw(17)[:16]
    centred = x - x.mean(-1, keepdims=True)
    want = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * scale + bias
    got = normalize(dataclasses.replace(LAYER, eps=eps), jnp.asarray(x, jnp.float32), scale, bias)
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_layer_norm_of_a_large_mean_loses_nothing():
    """mean(x²) - mean(x)² in float32 would cancel here."""
    x = draw(4, 64) + 4096
    got = normalize(LAYER, jnp.asarray(x), np.ones(64, np.float32), np.zeros(64, np.float32))
    x = x.astype(np.float64)
    want = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(got, want, atol=1e-3)


@pytest.mark.parametrize("spec", [RMS, dataclasses.replace(RMS, scale_in_float32=True), LAYER])
def test_dtype_stays_and_statistics_are_float32(spec):
    """Squares of 1e20 overflow bfloat16's neighbour float16, not float32 statistics of scaled values."""
    x = jnp.asarray(draw(3, 4096), BF16)
    scale = jnp.ones(4096)
    got = normalize(spec, x, scale, jnp.zeros(4096) if spec.bias else None)
    assert got.dtype == BF16
    wide = np.asarray(x, np.float64)
    centred = wide - wide.mean(-1, keepdims=True) if spec.kind == "layer" else wide
    want = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + spec.eps)
    # One rounding to 8 bits at the end is all the error there may be.
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=1e-6)


def unit(x: jax.Array) -> jax.Array:
    """The normalised values in float32, before any scale."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + RMS.eps)


def test_orders_of_scale_and_cast():
    """Llama casts, then multiplies; gpt-oss multiplies, then casts; Gemma does so with 1 + scale."""
    x, scale = jnp.asarray(draw(64, 256), BF16), jnp.asarray(draw(256))
    cast_first = scale.astype(BF16) * unit(x).astype(BF16)
    cast_last = (scale * unit(x)).astype(BF16)
    centred = (unit(x) * (1 + scale)).astype(BF16)
    assert (cast_first != cast_last).any()
    for changes, want in (
        (dict(scale_in_float32=False), cast_first),
        (dict(scale_in_float32=True), cast_last),
        (dict(scale_in_float32=True, offset=1.0), centred),
    ):
        np.testing.assert_array_equal(normalize(dataclasses.replace(RMS, **changes), x, scale), want)


def test_zeros_have_finite_values_and_gradients():
    def total(x):
        return jnp.sum(normalize(RMS, x, jnp.ones(8)))

    assert np.isfinite(jax.grad(total)(jnp.zeros((2, 8)))).all()


@pytest.mark.parametrize("spec", [RMS, LAYER])
def test_a_gradient_keeps_only_what_the_norm_is_given(spec):
    """And so nothing in float32 of features in bfloat16."""
    x, scale, bias = jnp.ones((2, 3, 8), BF16), jnp.ones(8), jnp.zeros(8) if spec.bias else None
    kept = jax.tree.leaves(jax.vjp(functools.partial(normalize, spec), x, scale, bias)[1])
    assert sum(leaf.size for leaf in kept) <= x.size + scale.size * (1 + spec.bias)
    assert all(leaf.dtype == BF16 for leaf in kept if leaf.ndim > 1)


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
@pytest.mark.parametrize("spec", [RMS, LAYER, dataclasses.replace(RMS, offset=1.0)])
def test_gradients_are_those_of_the_formula(spec, dtype):
    """In every direction: the sum of all outputs, each times another number."""
    x, scale = jnp.asarray(draw(3, 16)).astype(dtype), jnp.asarray(draw(16))
    bias = jnp.asarray(draw(1, 16)[0]) if spec.bias else None
    directions = jnp.cos(jnp.arange(48.0)).reshape(3, 16)

    def formula(x, scale, bias):
        x = x.astype(jnp.float32)
        centred = x - x.mean(-1, keepdims=True) if spec.kind == "layer" else x
        y = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + spec.eps) * (scale + spec.offset)
        return y if bias is None else y + bias

    def gradients(function):
        def total(*given):
            return jnp.sum(function(*given, *(None,) * (not spec.bias)).astype(jnp.float32) * directions)

        return jax.grad(total, argnums=range(2 + spec.bias))(*(x, scale, bias)[: 2 + spec.bias])

    tolerance = dict(rtol=1e-4, atol=1e-5) if dtype == jnp.float32 else dict(rtol=0.05, atol=0.05)
    for found, want in zip(gradients(functools.partial(normalize, spec)), gradients(formula), strict=True):
        assert found.dtype == want.dtype
        np.testing.assert_allclose(found.astype(jnp.float32), want.astype(jnp.float32), **tolerance)
