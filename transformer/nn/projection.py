"""Linear maps and norms."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from transformer import axes as ax
from transformer import spec
from transformer.nn.parameter import parameter
from transformer.ops.norms import normalize
from transformer.ops.products import product, shift
from transformer.ops.sums import Sums
from transformer.settings import Compute


class Projection(nn.Module):
    """A linear map from the trailing axes `inputs` of x to axes `outputs`, in the dtype of x.

    Attributes:
      inputs, outputs: sizes of the axes contracted and produced.
      names: logical names of the kernel's axes, inputs first.
      compute: how the kernel's gradient is summed.
      gain: factor on the standard deviation 1/sqrt(fan_in) of the initial kernel, before truncation at two of them.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    names: tuple[str, ...]
    bias: bool
    compute: Compute
    gain: float = 1.0

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        count = len(self.inputs)
        init = nn.initializers.truncated_normal(self.gain / math.sqrt(math.prod(self.inputs)))
        shape = self.inputs + self.outputs
        summed = range(-len(shape), -len(self.outputs))
        sums = Sums(self.names, self.compute.rules, self.compute.reduce_dtype)
        y = product(x, parameter(self, "kernel", init, shape, self.names, summed), count, sums)
        if self.bias:
            zeros = nn.initializers.zeros_init()
            y = shift(y, parameter(self, "bias", zeros, self.outputs, self.names[count:]))
        return y


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last axis, as the spec says."""

    spec: spec.Norm

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        # The stored scale plus the offset starts at one.
        init = nn.initializers.constant(1.0 - self.spec.offset)
        scale = parameter(self, "scale", init, x.shape[-1:], (ax.NORM,))
        bias = None
        if self.spec.bias:
            bias = parameter(self, "bias", nn.initializers.zeros_init(), x.shape[-1:], (ax.NORM,))
        return normalize(self.spec, x, scale, bias)


def point(module: nn.Module, name: str, value: jax.Array) -> jax.Array:
    """`value`, which remat can keep under this name (`settings.POINTS`), captured as by `capture`."""
    capture(module, name, value)
    return checkpoint_name(value, name)


def capture(module: nn.Module, name: str, value: jax.Array) -> None:
    """Keeps `value` under `intermediates` where the caller asked for it; nothing otherwise."""
    module.sow("intermediates", name, value, reduce_fn=lambda _, new: new, init_fn=lambda: jnp.zeros(()))


def capturing(module: nn.Module) -> bool:
    """True where the caller asked for intermediates, so that costly ones are worth computing."""
    return module.is_mutable_collection("intermediates") and not module.is_initializing()
