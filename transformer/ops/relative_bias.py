"""What the distance of query and key adds to their score."""

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from transformer.spec import RelativeBias, RelativeKeys


@functools.cache
def _edges(spec: RelativeBias) -> tuple[int, ...]:
    """The least distances to one side at which bucket 1, 2 … begin."""
    count = spec.num_buckets // (1 + spec.bidirectional)
    exact = count // 2
    distance = np.arange(spec.max_distance + 1)
    # In float32, step by step like the published code: a distance at a bucket's edge falls where rounding puts it.
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    steps = ratio / np.float32(np.log(spec.max_distance / exact)) * np.float32(count - exact)
    far = np.minimum(exact + steps.astype(np.int32), count - 1)
    bucket = np.where(distance < exact, distance, far)
    return tuple(int(edge) for edge in np.searchsorted(bucket, np.arange(1, bucket[-1] + 1)))


def bucket_of(spec: RelativeBias, ahead: Int[Array, "..."]) -> Int[Array, "..."]:
    """The row of the table that a key reads which lies so many positions ahead (T5's `_relative_position_bucket`).

    It counts the edges that the distance has passed: comparisons alone, which every kernel can do.
    """
    distance = jnp.abs(ahead) if spec.bidirectional else jnp.maximum(-ahead, 0)
    bucket = sum((distance >= edge).astype(jnp.int32) for edge in _edges(spec))
    return bucket + jnp.where(ahead > 0, spec.num_buckets // 2, 0) if spec.bidirectional else bucket


def buckets(
    spec: RelativeBias, q_positions: Int[Array, "*B T"], k_positions: Int[Array, "*B S"]
) -> Int[Array, "*B T S"]:
    """`bucket_of` every query and key."""
    return bucket_of(spec, k_positions[..., None, :] - q_positions[..., :, None])


def bias(table: Float[Array, "R N"], bucket: Int[Array, "B T S"]) -> Float[Array, "B N T S"]:
    """The bias of each head and pair, in float32."""
    return jnp.moveaxis(table.astype(jnp.float32).T[:, bucket], 0, 1)


def bias_gradient(
    d_bias: Float[Array, "B N T S"], bucket: Int[Array, "B T S"], num_buckets: int
) -> Float[Array, "B N R"]:
    """What flows back from each row's `bias` into its table: a product with zeros and ones, faster than scattering."""
    which = (bucket[..., None] == jnp.arange(num_buckets)).astype(d_bias.dtype)
    return jnp.einsum("bnts,btsr->bnr", d_bias, which)


def distance_queries(
    spec: RelativeKeys, kernel: Float[Array, "D N H"], q: Float[Array, "B T N H"], positions: Int[Array, "B T"]
) -> Float[Array, "B T N D"]:
    """What, times `distance_keys`, gives q·W r(position of query - position of key), whatever the two positions are.

    sin and cos of a difference are sums of products of sines and cosines, so a score of the distance is a plain product
    of features, and every attention body serves it (Transformer-XL, equation for A_rel, terms b and d).
    """
    g = jnp.einsum("btnh,dnh->btnd", q, kernel.astype(q.dtype), preferred_element_type=jnp.float32)
    of_sin, of_cos = jnp.split(g, 2, axis=-1)
    sin, cos = (x[:, :, None, :] for x in _waves(spec, positions, kernel.shape[0]))
    return jnp.concatenate([of_cos * sin - of_sin * cos, of_sin * sin + of_cos * cos], axis=-1).astype(q.dtype)


def distance_keys(spec: RelativeKeys, positions: Int[Array, "B S"], d_model: int) -> Float[Array, "B S D"]:
    """Features of key positions: sines, then cosines; see `distance_queries`."""
    return jnp.concatenate(_waves(spec, positions, d_model), axis=-1)


def _waves(spec: RelativeKeys, positions: Array, d_model: int) -> tuple[Array, Array]:
    frequencies = spec.base ** -(np.arange(0, d_model, 2, dtype=np.float64) / d_model)
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies.astype(np.float32))
    return jnp.sin(angles), jnp.cos(angles)
