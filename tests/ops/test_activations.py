"""Activation functions against float64."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from transformer.ops.activations import ACTIVATIONS, activate

X = np.linspace(-6, 6, 241)
FORMULAS = {
    "relu": np.maximum(X, 0),
    "gelu": X * np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in X]),
    "gelu_tanh": 0.5 * X * (1 + np.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3))),
    "silu": X / (1 + np.exp(-X)),
}


def test_every_activation_is_checked():
    assert set(FORMULAS) == set(ACTIVATIONS)


@pytest.mark.parametrize("name", FORMULAS)
def test_activation_is_the_formula(name):
    """Tight enough to tell the two GELUs apart, which differ by 5e-4 at most."""
    np.testing.assert_allclose(activate(name, jnp.asarray(X, jnp.float32)), FORMULAS[name], atol=2e-6)
    assert np.abs(FORMULAS["gelu"] - FORMULAS["gelu_tanh"]).max() > 1e-4


@pytest.mark.parametrize("name", FORMULAS)
def test_dtype_stays(name):
    assert activate(name, jnp.ones(3, jnp.bfloat16)).dtype == jnp.bfloat16
