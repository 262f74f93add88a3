"""Positions of rows, and the rotation tables that all layers share."""

import jax.numpy as jnp
import numpy as np
import pytest

from transformer import spec
from transformer.nn.context import default_positions, make_context
from transformer.ops import rope


@pytest.mark.parametrize(
    ("segments", "positions"),
    [
        ([1, 1, 1, 2, 2, 0, 0], [0, 1, 2, 0, 1, -1, -1]),
        ([0, 0, 5, 5, 5, 3, 3], [-1, -1, 0, 1, 2, 0, 1]),
        ([4, 4, 0, 4, 4, 0, 9], [0, 1, -1, 0, 1, -1, 0]),
        ([7, 7, 7, 7, 7, 7, 7], [0, 1, 2, 3, 4, 5, 6]),
        ([0, 0, 0, 0, 0, 0, 0], [-1] * 7),
    ],
)
def test_positions_restart_at_each_segment(segments, positions):
    """Each row by itself: the batch has the same row twice, and once reversed."""
    rows = jnp.array([segments, segments])
    np.testing.assert_array_equal(default_positions(rows, rows.shape), [positions, positions])


def test_positions_without_segments_count_from_zero():
    np.testing.assert_array_equal(default_positions(None, (2, 4)), [[0, 1, 2, 3]] * 2)


def test_each_layer_gets_its_own_rotation():
    near, far = (spec.Rope(theta=theta, dim=4, interleaved=False) for theta in (1e4, 1e6))
    positions = jnp.arange(5)[None] + 3
    context = make_context((near, far), positions)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 2, 4)), jnp.float32)
    for which in (near, far):
        np.testing.assert_array_equal(
            context.rotate(which, x), rope.rotate(which, x, *rope.rotations(which, positions))
        )
    assert np.abs(context.rotate(near, x) - context.rotate(far, x)).max() > 1e-3
    assert context.rotate(None, x) is x
