"""Relative biases and distances against the formulas of their papers."""

import jax.numpy as jnp
import numpy as np
import pytest

from transformer.ops import relative_bias
from transformer.spec import RelativeBias, RelativeKeys

# Rows of distances 0, 1, 2 … behind the query, counted with the published function (T5, 32 buckets, distance 128).
PUBLISHED = {15: 15, 16: 16, 18: 16, 19: 17, 20: 17, 32: 21, 48: 24, 64: 26, 96: 29, 112: 30, 113: 31, 128: 31, 900: 31}


def one_way(distance: int) -> int:
    spec = RelativeBias(num_buckets=32, max_distance=128, bidirectional=False)
    return int(relative_bias.buckets(spec, jnp.array([distance]), jnp.array([0]))[0, 0])


def test_buckets_are_the_published_ones():
    assert {distance: one_way(distance) for distance in PUBLISHED} == PUBLISHED
    assert [one_way(distance) for distance in range(16)] == list(range(16))
    assert one_way(-3) == 0, "keys ahead count as distance 0"


def test_buckets_of_two_sides_are_apart():
    spec = RelativeBias(num_buckets=32, max_distance=128, bidirectional=True)
    half = RelativeBias(num_buckets=16, max_distance=128, bidirectional=False)
    behind = np.asarray(relative_bias.buckets(spec, jnp.arange(300), jnp.array([0])))[:, 0]
    ahead = np.asarray(relative_bias.buckets(spec, jnp.array([0]), jnp.arange(300)))[0]
    np.testing.assert_array_equal(
        behind, np.asarray(relative_bias.buckets(half, jnp.arange(300), jnp.array([0])))[:, 0]
    )
    np.testing.assert_array_equal(ahead[1:], behind[1:] + 16)
    assert ahead[0] == behind[0] == 0
    assert (np.diff(behind) >= 0).all() and behind.max() == 15


@pytest.mark.parametrize("far", [0, 5000])
def test_products_are_the_scores_of_distances(far):
    """(q + v)·W r(i - j) with r written out, at any place: only the difference of positions counts."""
    rng = np.random.default_rng(0)
    spec, width = RelativeKeys(base=1e4), 12
    kernel, q = rng.standard_normal((width, 3, 4)), rng.standard_normal((1, 5, 3, 4))
    i, j = np.array([[3, 9, 0, 14, 2]]), np.arange(16)[None]
    angles = (i[0][:, None] - j[0])[..., None] * 1e4 ** -(np.arange(0, width, 2) / width)
    r = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    want = np.einsum("tnh,dnh,tsd->nts", q[0], kernel, r)
    float32 = (jnp.asarray(x, jnp.float32) for x in (kernel, q))
    queries = relative_bias.distance_queries(spec, *float32, jnp.asarray(i + far))
    keys = relative_bias.distance_keys(spec, jnp.asarray(j + far), width)
    got = np.einsum("tnd,sd->nts", queries[0], keys[0])
    # Angles of far positions are rounded to float32 before their sines are taken.
    np.testing.assert_allclose(got, want, atol=1e-5 if not far else 1e-2)
