"""Rotary and sinusoidal positions."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from transformer.spec import LinearScaling, Mask, PiecewiseScaling, Rope, SinusoidalPositions, YarnScaling


def inverse_frequencies(rope: Rope) -> np.ndarray:
    """Radians a position for each rotating pair, float32 [dim / 2], scaling applied."""
    plain = rope.theta ** -(np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    match rope.scaling:
        case None:
            scaled = plain
        case LinearScaling(factor=factor):
            scaled = plain / factor
        case PiecewiseScaling():
            scaled = _piecewise(plain, rope.scaling)
        case YarnScaling():
            scaled = _yarn(plain, rope, rope.scaling)
    return scaled.astype(np.float32)


def _piecewise(plain: np.ndarray, s: PiecewiseScaling) -> np.ndarray:
    """Reference: `apply_scaling` of meta-llama/llama-models, models/llama3/model.py."""
    turns = s.original_max_length * plain / (2 * math.pi)  # full rotations within the original context
    keep = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0, 1)
    return (1 - keep) * plain / s.factor + keep * plain


def _yarn(plain: np.ndarray, rope: Rope, s: YarnScaling) -> np.ndarray:
    """Reference: YaRN, section 3.2 (NTK-by-parts); `truncate` as in gpt-oss."""

    def pair_with_turns(turns: float) -> float:
        return rope.dim * math.log(s.original_max_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with_turns(s.beta_fast), pair_with_turns(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    interpolate = np.clip((np.arange(rope.dim // 2) - low) / (high - low), 0, 1)
    return plain / s.factor * interpolate + plain * (1 - interpolate)


def rotation_gain(rope: Rope) -> float:
    """What cos and sin are multiplied by: YaRN's attention factor, 1 for every other scaling."""
    s = rope.scaling
    if not isinstance(s, YarnScaling):
        return 1.0
    if s.attention_factor is not None:
        return s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return s.gain(s.mscale) / s.gain(s.mscale_all_dim)
    return s.gain(1.0)


def rotations(rope: Rope, positions: Int[Array, "B T"]) -> tuple[Float[Array, "B T P"], Float[Array, "B T P"]]:
    """cos and sin of every pair's angle in float32, P = dim / 2, the YaRN factor included."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(inverse_frequencies(rope))
    gain = rotation_gain(rope)
    return jnp.cos(angles) * gain, jnp.sin(angles) * gain


def rotate(
    rope: Rope, x: Float[Array, "B T N H"], cos: Float[Array, "B T P"], sin: Float[Array, "B T P"]
) -> Float[Array, "B T N H"]:
    """Rotates the first `rope.dim` features of every head; the rest passes. dtype in = dtype out.

    cos and sin are rounded to the activation dtype first, as the reference implementations do.
    """
    cos, sin = cos[:, :, None, :].astype(x.dtype), sin[:, :, None, :].astype(x.dtype)
    turning, passing = x[..., : rope.dim], x[..., rope.dim :]
    if rope.interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turning.shape)
    else:
        a, b = jnp.split(turning, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([turned, passing], axis=-1) if passing.shape[-1] else turned


def rotate_in_cache(
    rope: Rope,
    mask: Mask,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
) -> tuple[Float[Array, "B T N H2"], Float[Array, "B S K H2"]]:
    """Rotates queries and keys by their place in a cache of sinks and window (StreamingLLM, section 3.2).

    A query at position p sits at min(p, sinks + window - 1); sinks keep their place, and keys of the window keep their
    distance. For several queries that puts a sink at several distances, so each vector is rotated both ways and lies
    beside a zero: H2 = 2 H, and the plain product of q and k is right for every pair. For one query H2 = H.
    """
    end = mask.sinks + mask.window - 1
    cut = jnp.maximum(jnp.max(q_positions, axis=1, keepdims=True) - end, 0)
    is_sink = k_positions < mask.sinks
    if q.shape[1] == 1:
        q = rotate(rope, q, *rotations(rope, q_positions - cut))
        return q, rotate(rope, k, *rotations(rope, jnp.where(is_sink, k_positions, k_positions - cut)))
    near = rotate(rope, q, *rotations(rope, q_positions - cut))
    far = rotate(rope, q, *rotations(rope, jnp.minimum(q_positions, end)))
    k = rotate(rope, k, *rotations(rope, jnp.where(is_sink, k_positions, k_positions - cut)))
    is_sink = is_sink[:, :, None, None]
    pair = jnp.where(is_sink, 0, k), jnp.where(is_sink, k, 0)
    return jnp.concatenate([near, far], axis=-1), jnp.concatenate(pair, axis=-1)


def sinusoids(spec: SinusoidalPositions, positions: Int[Array, "B T"], d_model: int) -> Float[Array, "B T D"]:
    """Sinusoidal position vectors in float32 (Vaswani et al. 2017, section 3.5)."""
    frequencies = spec.base ** -(np.arange(0, d_model, 2, dtype=np.float64) / d_model)
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies.astype(np.float32))
    if spec.interleaved:
        return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(*positions.shape, d_model)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
