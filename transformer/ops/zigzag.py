"""An order of a row's tokens in which every device of the context axis has as much to do under a causal mask.

A row is cut into 2n chunks for n devices, and device i holds chunks i and 2n - 1 - i: an early one, which sees few
keys, and a late one, which sees many (the balanced order of "context parallelism", arXiv:2407.21783, section 3.3.2).
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Shaped

from transformer import axes as ax
from transformer.sharding import ShardingError, mesh_axes


def spread(x: Shaped[Array, "B T *rest"], rules: str = "default") -> Shaped[Array, "B T *rest"]:
    """Rows in their own order to rows in zig-zag order: two messages a device.

    Raises:
      ShardingError: T can't be cut into two chunks a device.
    """
    return _on_each_device(_spread, x, rules)


def collect(x: Shaped[Array, "B T *rest"], rules: str = "default") -> Shaped[Array, "B T *rest"]:
    """The inverse of `spread`."""
    return _on_each_device(_collect, x, rules)


def _on_each_device(move, x: Array, rules: str) -> Array:
    mesh = jax.sharding.get_abstract_mesh()
    (axis,) = mesh_axes(ax.LENGTH, mesh, rules)
    chunks = 2 * mesh.shape[axis]
    if x.shape[1] % chunks:
        raise ShardingError(
            f"length={x.shape[1]}: mesh.{axis}={mesh.shape[axis]} cuts rows under a causal mask into {chunks} chunks; "
            f"use a multiple of {chunks} tokens (data.seq_len), or a smaller mesh.{axis}"
        )
    spec = PartitionSpec(None, axis)
    return jax.shard_map(functools.partial(move, axis), in_specs=spec, out_specs=spec, axis_names={axis})(x)


def _spread(axis: str, x: Array) -> Array:
    ways, even = jax.lax.axis_size(axis), jax.lax.axis_index(axis) % 2 == 0
    # Chunks of even number come first on every device, and go to devices of even number as their first chunk and to
    # the others as their second.
    from_even, from_odd = (
        jax.lax.ppermute(chunk, axis, _homes(ways, second)) for second, chunk in enumerate(jnp.split(x, 2, axis=1))
    )
    return jnp.concatenate([jnp.where(even, from_even, from_odd), jnp.where(even, from_odd, from_even)], axis=1)


def _collect(axis: str, x: Array) -> Array:
    ways, even = jax.lax.axis_size(axis), jax.lax.axis_index(axis) % 2 == 0
    first, second = jnp.split(x, 2, axis=1)
    chunks = jnp.where(even, first, second), jnp.where(even, second, first)
    back = ([(there, here) for here, there in _homes(ways, odd)] for odd in range(2))
    return jnp.concatenate([jax.lax.ppermute(c, axis, pairs) for c, pairs in zip(chunks, back, strict=True)], axis=1)


def _homes(ways: int, second: int) -> list[tuple[int, int]]:
    """(device that has it in a row's own order, device that has it in zig-zag order) of each first or second chunk."""
    chunks = [2 * device + second for device in range(ways)]
    return [(device, min(chunk, 2 * ways - 1 - chunk)) for device, chunk in enumerate(chunks)]
