"""How gradients of weights are summed over the devices of a mesh: once, and each device keeps its part.

A weight's gradient is a sum over tokens. Left to itself, a compiler adds up whole gradients on every device where the
sum goes over all devices of a TPU slice, which sends twice what is needed (docs/step.md).
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float

from transformer import sharding


@dataclass(frozen=True)
class Sums:
    """How the gradient of one weight is summed.

    Attributes:
      names: logical axes of the weight.
      rules: preset of `transformer.sharding`.
      dtype: of the sums; None: that of the activations.
    """

    names: tuple[str, ...]
    rules: str = "default"
    dtype: str | None = None

    def needed(self) -> bool:
        """True where the mesh in force gives devices tokens of their own."""
        mesh = jax.sharding.get_abstract_mesh()
        return not mesh.empty and bool(sharding.token_axes(mesh, self.rules))

    def plan(self, shape: tuple[int, ...]) -> "Plan":
        """For the mesh in force.

        Raises:
          ShardingError: it can't split a weight of this shape.
        """
        mesh = jax.sharding.get_abstract_mesh()
        place = sharding.partition_spec(self.names, shape, mesh, self.rules, "gradient")
        return Plan(mesh, place, sharding.token_axes(mesh, self.rules), self.dtype)


class Plan(NamedTuple):
    """The sum of one weight's gradient.

    Attributes:
      place: how the mesh splits the weight, and its gradient.
      tokens: mesh axes along which devices have other tokens.
      dtype: of the sums; None: as it comes.
    """

    mesh: AbstractMesh
    place: PartitionSpec
    tokens: tuple[str, ...]
    dtype: str | None

    def scattered(self) -> dict[int, tuple[str, ...]]:
        """Of the weight's dimensions, the mesh axes that split both it and the tokens."""
        parts = {i: tuple(a for a in _axes(entry) if a in self.tokens) for i, entry in enumerate(self.place)}
        return {i: axes for i, axes in parts.items() if axes}

    @property
    def first(self) -> int | None:
        """The dimension that should be the first one of what is summed.

        Of another one, TPU compilers scatter nothing, or turn the whole before they do.
        """
        return min(self.scattered(), default=None)

    def features(self, dimensions: tuple[int, ...]) -> tuple[tuple[str, ...] | None, ...]:
        """How features are split that meet these dimensions: by what splits the weight and no tokens."""
        return tuple(tuple(a for a in _axes(self.place[i]) if a not in self.tokens) or None for i in dimensions)

    def sum(self, g: Float[Array, "..."], order: tuple[int, ...]) -> Float[Array, "..."]:
        """A device's part of the sum, in the order of the weight's dimensions; under `jax.shard_map`.

        Args:
          g: the gradient by the device's own tokens.
          order: which dimension of the weight each one of g is.
        """
        g = g if self.dtype is None else g.astype(self.dtype)
        scattered = self.scattered()
        for dimension, axes in scattered.items():
            g = scattered_sum(g, axes, order.index(dimension))
        rest = tuple(a for a in self.tokens if not any(a in axes for axes in scattered.values()))
        return jnp.transpose(jax.lax.psum(g, rest) if rest else g, np.argsort(order))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def gathered(
    k: Array, axes: tuple[str, ...], dimension: int, dtype: jnp.dtype, sums: str | None = None
) -> Float[Array, "..."]:
    """A weight of which each device has a part of a dimension, whole and in `dtype`; under `jax.shard_map`.

    Args:
      axes: mesh axes that split the dimension, major first.
      sums: the dtype in which its gradients are summed; None: `dtype`.
    """
    return jax.lax.all_gather(k.astype(dtype), axes, axis=dimension, tiled=True) if axes else k.astype(dtype)


def _gathered_backward(axes, dimension, dtype, sums, like: Array, d: Array) -> tuple[Array]:
    return (scattered_sum(d.astype(sums or dtype), axes, dimension).astype(like.dtype),)


gathered.defvjp(lambda k, *how: (gathered(k, *how), k[:0]), _gathered_backward)


def scattered_sum(x: Array, axes: tuple[str, ...], dimension: int) -> Array:
    """The sum over the devices of mesh axes, of which each keeps its part of a dimension; under `jax.shard_map`.

    Args:
      axes: major first, as in the `PartitionSpec` of the result.
    """
    for axis in axes:
        for groups in _stages(axis):
            x = jax.lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True, axis_index_groups=groups)
    return x


def _stages(axis: str) -> tuple[list[list[int]] | None, ...]:
    """Groups of the places on a mesh axis, whose sums one after the other are the sum over the axis.

    TPU compilers have no reduce-scatter over all devices of a slice, and do an all-reduce instead. Over two parts of
    the slice, one after the other, they have.
    """
    mesh, size = jax.sharding.get_abstract_mesh(), jax.lax.axis_size(axis)
    if size < mesh.size // mesh.shape["slice"] or size % 2:
        return (None,)
    # The first stage sends nearly all of the bytes: it should have most dimensions of the slice, thus links.
    places = np.arange(size).reshape(-1, 4 if size % 4 == 0 and size > 4 else 2)
    return places.T.tolist(), places.tolist()


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of an entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry
