"""Rotary positions: vectors turned, scores of turned vectors, and wavelengths under each scaling."""

import numpy as np

from transformer import spec
from transformer.ops import rope as ops


def plain(dim: int, theta: float) -> spec.Rope:
    """An unscaled rope over `dim` features, pairs (i, i + dim/2)."""
    return spec.Rope(theta=theta, dim=dim, interleaved=False)


def content(dim: int) -> np.ndarray:
    """The vector [dim] whose every pair is (1, 0), so that a score is the sum of the cosines of the angles between."""
    return np.concatenate([np.ones(dim // 2), np.zeros(dim // 2)]).astype(np.float32)


def turned(rope: spec.Rope, vector: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[T, H]: the vector [H] as it lies at each of T positions."""
    at = np.asarray(positions)[None]
    repeated = np.broadcast_to(vector.astype(np.float32), (1, at.size, 1, vector.size))
    return np.asarray(ops.rotate(rope, repeated, *ops.rotations(rope, at)))[0, :, 0]


def scores(rope: spec.Rope, q: np.ndarray, k: np.ndarray, q_positions, k_positions) -> np.ndarray:
    """[T]: q·k with the query at the first and the key at the second of each pair of positions."""
    return np.sum(turned(rope, q, q_positions) * turned(rope, k, k_positions), axis=-1)


def pairs(vectors: np.ndarray) -> np.ndarray:
    """[T, P, 2]: the two features of every rotating pair of vectors [T, 2P]."""
    return np.stack(np.split(vectors, 2, axis=-1), axis=-1)


def wavelengths(rope: spec.Rope) -> np.ndarray:
    """[P]: positions that each pair needs for a full turn, scaling applied."""
    return 2 * np.pi / ops.inverse_frequencies(rope).astype(np.float64)


def scalings(dim: int = 128, theta: float = 5e5, factor: float = 8.0, original: int = 8192) -> dict[str, spec.Rope]:
    """The ways to make a context `factor` times longer, by name: linear, Llama 3.1's, YaRN, and a larger base.

    The base is chosen so that the longest wave grows by `factor`, as NTK-aware scaling does.
    """
    scaled = {
        "linear": spec.LinearScaling(factor=factor),
        "piecewise": spec.PiecewiseScaling(
            factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=original
        ),
        "yarn": spec.YarnScaling(factor=factor, beta_fast=32.0, beta_slow=1.0, original_max_length=original),
    }
    ropes = {"plain": plain(dim, theta), "larger base": plain(dim, theta * factor ** (dim / (dim - 2)))}
    for name, scaling in scaled.items():
        ropes[name] = spec.Rope(theta=theta, dim=dim, interleaved=False, scaling=scaling)
    return ropes
