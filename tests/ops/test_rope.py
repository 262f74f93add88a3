"""Rotary and sinusoidal positions, against frequencies that Hugging Face computes and against the papers' formulas."""

import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from transformer import spec
from transformer.ops import rope

# inv_freq and attention_scaling of the rotary modules of transformers 5.24, with the configs they come from.
GOLDEN = json.loads((Path(__file__).parent.parent / "golden_rope.json").read_text())


def golden_spec(case: dict) -> spec.Rope:
    scaling = case["scaling"]
    if scaling:
        scaling = getattr(spec, scaling["kind"])(**{k: v for k, v in scaling.items() if k != "kind"})
    return spec.Rope(theta=float(case["theta"]), dim=case["dim"], interleaved=False, scaling=scaling)


@pytest.mark.parametrize("case", GOLDEN)
def test_frequencies_and_gain_are_those_of_the_reference(case):
    golden, ours = GOLDEN[case], golden_spec(GOLDEN[case])
    got = rope.inverse_frequencies(ours)
    assert got.dtype == np.float32
    # The reference takes powers in float32, which costs a few units in the last place.
    np.testing.assert_allclose(got, golden["inverse_frequencies"], rtol=1e-6)
    assert rope.rotation_gain(ours) == pytest.approx(golden["gain"], rel=1e-6)


def test_piecewise_scaling_keeps_short_waves_and_divides_long_ones():
    scaling = spec.PiecewiseScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=8192)
    plain = rope.inverse_frequencies(spec.Rope(theta=5e5, dim=128, interleaved=False))
    ratio = plain / rope.inverse_frequencies(spec.Rope(theta=5e5, dim=128, interleaved=False, scaling=scaling))
    waves = 2 * math.pi / plain
    np.testing.assert_allclose(ratio[waves < 8192 / 4], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[waves > 8192], 8, rtol=1e-6)
    assert (np.diff(ratio) > -1e-6).all() and ((ratio > 1.01) & (ratio < 7.99)).any()


@pytest.mark.parametrize(
    ("terms", "gain"),
    [
        ({}, 0.1 * math.log(40) + 1),
        (dict(mscale=1.0, mscale_all_dim=1.0), 1.0),
        (dict(mscale=0.707, mscale_all_dim=0.5), (0.0707 * math.log(40) + 1) / (0.05 * math.log(40) + 1)),
        (dict(mscale=0.707), 0.1 * math.log(40) + 1),
        (dict(attention_factor=1.25, mscale=0.707, mscale_all_dim=0.5), 1.25),
    ],
)
def test_yarn_gain(terms, gain):
    """An explicit factor, else the ratio of both mscales, else m(1); cos and sin carry it."""
    scaling = spec.YarnScaling(factor=40.0, beta_fast=32.0, beta_slow=1.0, original_max_length=4096, **terms)
    ours = spec.Rope(theta=1e4, dim=8, interleaved=False, scaling=scaling)
    assert rope.rotation_gain(ours) == pytest.approx(gain, rel=1e-6)
    cos, sin = rope.rotations(ours, jnp.arange(5)[None])
    np.testing.assert_allclose(np.hypot(cos, sin), gain, rtol=1e-5)


def test_yarn_stretches_nothing_where_the_factor_is_one():
    scaling = spec.YarnScaling(factor=1.0, beta_fast=32.0, beta_slow=1.0, original_max_length=4096)
    assert rope.rotation_gain(spec.Rope(theta=1e4, dim=8, interleaved=False, scaling=scaling)) == 1.0


def turn(ours: spec.Rope, x: np.ndarray, positions) -> np.ndarray:
    return np.asarray(rope.rotate(ours, jnp.asarray(x), *rope.rotations(ours, jnp.asarray(positions)[None])))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [16, 24])
def test_scores_depend_on_distance_only(interleaved, dim):
    """Shifting both positions leaves q·k unchanged; shifting one does not. 16 of 24 features: partial rotary."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 6, 2, 24)).astype(np.float32)
    ours = spec.Rope(theta=1e4, dim=dim, interleaved=interleaved)

    def scores(q_shift: int, k_shift: int) -> np.ndarray:
        a, b = turn(ours, q, np.arange(6) + q_shift), turn(ours, k, np.arange(6) + k_shift)
        return np.einsum("btnh,bsnh->bnts", a, b)

    np.testing.assert_allclose(scores(100, 100), scores(0, 0), atol=2e-4)
    assert np.abs(scores(1, 0) - scores(0, 0)).max() > 0.1


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_equals_complex_multiplication(interleaved):
    """Pair i turns by position · theta^(-2i/dim); the features beyond dim pass."""
    x = np.random.default_rng(1).standard_normal((1, 5, 3, 10)).astype(np.float32)
    positions = np.array([0, 1, 7, 300, 2])
    got = turn(spec.Rope(theta=1e4, dim=8, interleaved=interleaved), x, positions)
    first, second = (slice(0, 8, 2), slice(1, 8, 2)) if interleaved else (slice(0, 4), slice(4, 8))
    angles = positions[:, None] * 1e4 ** (-np.arange(0, 8, 2) / 8)
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(got[..., first], turned.real, atol=1e-4)
    np.testing.assert_allclose(got[..., second], turned.imag, atol=1e-4)
    np.testing.assert_array_equal(got[..., 8:], x[..., 8:])
    assert got.shape == x.shape


def test_interleaved_and_halves_differ():
    x = np.random.default_rng(1).standard_normal((1, 5, 3, 8)).astype(np.float32)
    halves, pairs = (turn(spec.Rope(theta=1e4, dim=8, interleaved=i), x, np.arange(5)) for i in (False, True))
    assert np.abs(halves - pairs).max() > 0.1


def test_dtype_stays_and_angles_are_float32():
    """At position 100,000 a bfloat16 angle would be off by hundreds of radians."""
    ours = spec.Rope(theta=1e4, dim=8, interleaved=False)
    x = np.random.default_rng(2).standard_normal((1, 1, 1, 8)).astype(np.float32)
    cos, sin = rope.rotations(ours, jnp.array([[100_000]]))
    assert cos.dtype == sin.dtype == jnp.float32
    got = rope.rotate(ours, jnp.asarray(x, jnp.bfloat16), cos, sin)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), turn(ours, x, [100_000]), atol=0.05)


@pytest.mark.parametrize("interleaved", [False, True])
def test_sinusoids_follow_the_paper(interleaved):
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(the same); Marian puts all sines first."""
    d_model, positions = 12, np.array([0, 1, 5, 250])
    got = rope.sinusoids(
        spec.SinusoidalPositions(base=1e4, interleaved=interleaved), jnp.asarray(positions)[None], d_model
    )
    want = np.zeros((4, d_model))
    for i in range(d_model // 2):
        angle = positions / 10000 ** (2 * i / d_model)
        want[:, 2 * i if interleaved else i] = np.sin(angle)
        want[:, 2 * i + 1 if interleaved else d_model // 2 + i] = np.cos(angle)
    np.testing.assert_allclose(got[0], want, atol=2e-5)
