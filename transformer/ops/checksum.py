"""Sums of bit patterns, by which equal arrays are told from damaged ones wherever their parts lie."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

# Any odd number far from powers of two: neighbouring words then weigh very differently.
SPREAD = 2654435761


def checksum(x: Array) -> UInt32[Array, ""]:
    """The sum, modulo 2**32, of the words of `x`, each times an odd weight of its position.

    Integers add up to the same in any order, so the sum does not depend on how `x` is split over devices. One flipped
    bit always changes it: 2**k times an odd number is never 0 modulo 2**32.
    """
    if jax.typeof(x).memory_space == jax.memory.Space.Host:  # as moments may rest; arithmetic is the device's
        x = jax.device_put(x, jax.memory.Space.Device)
    words = _words(x)
    index, stride = jnp.zeros(words.shape, jnp.uint32), 1
    for axis in reversed(range(words.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    return jnp.sum(words * (index * jnp.uint32(2 * SPREAD % 2**32) + jnp.uint32(1)), dtype=jnp.uint32)


def checksums(tree: Any) -> UInt32[Array, " leaves"]:
    """`checksum` of every leaf."""
    return jnp.stack([checksum(x) for x in jax.tree.leaves(tree)])


def _words(x: Array) -> UInt32[Array, "..."]:
    """The bits of each number; of one of eight bytes, two words."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    size = min(x.dtype.itemsize, 4)
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * size}")).astype(jnp.uint32)


__all__ = ["checksum", "checksums"]
