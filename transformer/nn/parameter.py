"""Parameters that carry their logical axis names from birth."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from transformer.ops.products import Turned


class Named(struct.PyTreeNode, nn.meta.AxisMetadata):
    """A parameter boxed with what is known of its axes at birth, until `unbox` at the end of initialisation.

    Attributes:
      names: logical names of the axes.
      summed: axes, counted from the last one (-1), that products with activations sum over; none where there is none.
    """

    value: Any
    names: tuple[str, ...] = struct.field(pytree_node=False)
    summed: tuple[int, ...] = struct.field(pytree_node=False, default=())

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
    module: nn.Module,
    name: str,
    init: Callable,
    shape: Sequence[int],
    names: Sequence[str],
    summed: Sequence[int] = (),
) -> jax.Array:
    """Creates (or reads) a parameter of `module` with one logical axis name a dimension; see `Named`.

    One with `summed` axes may come back as `ops.products.Quantized` or `Turned`.
    """
    if len(shape) != len(names):
        raise ValueError(f"{'/'.join(module.path)}/{name}: axis names {names} for shape {shape}")

    kept = module.get_variable("params", name)
    if isinstance(kept, Turned):  # `param` would miss the shape that it stands for
        return kept

    def boxed(key, *args):
        return Named(init(key, *args), tuple(names), tuple(summed))

    return module.param(name, boxed, tuple(shape), jnp.float32)
