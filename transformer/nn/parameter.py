"""Parameters that carry their logical axis names from birth."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct


class Named(struct.PyTreeNode, nn.meta.AxisMetadata):
    """A parameter boxed with the logical names of its axes, until `unbox` at the end of initialisation."""

    value: Any
    names: tuple[str, ...] = struct.field(pytree_node=False)

    def unbox(self) -> Any:
        """The bare array."""
        return self.value

    def replace_boxed(self, value: Any) -> "Named":
        """The same names around another value."""
        return self.replace(value=value)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Named":
        """Names the axis that `nn.scan` stacks."""
        names = list(self.names)
        names.insert(index, params[nn.PARTITION_NAME])
        return self.replace(names=tuple(names))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Named":
        """Undoes `add_axis` inside the scan."""
        names = list(self.names)
        if names.pop(index) != params[nn.PARTITION_NAME]:
            raise ValueError(f"axes {self.names}: axis {index} is not {params[nn.PARTITION_NAME]!r}")
        return self.replace(names=tuple(names))


def parameter(
    module: nn.Module, name: str, init: Callable, shape: Sequence[int], names: Sequence[str], dtype: Any = jnp.float32
) -> jax.Array:
    """Creates (or reads) a parameter of `module` with one logical axis name a dimension."""
    if len(shape) != len(names):
        raise ValueError(f"{'/'.join(module.path)}/{name}: axis names {names} for shape {shape}")

    def boxed(key, *args):
        return Named(init(key, *args), tuple(names))

    return module.param(name, boxed, tuple(shape), dtype)
