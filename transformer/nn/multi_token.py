"""Multi-token prediction: modules behind the decoder that look one token further each."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer import axes as ax
from transformer import spec
from transformer.nn.context import Context
from transformer.nn.projection import Norm, Projection
from transformer.nn.stack import Stack
from transformer.ops.cache import StackCache
from transformer.settings import Compute


class Depth(nn.Module):
    """One depth: what is known of a token and the embedding of one after it, projected together, through layers.

    The order of the inputs, embedding first, is that of the published kernel (eh_proj).
    """

    spec: spec.MultiToken
    compute: Compute

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], embedded: Float[Array, "B T D"], context: Context, cache: StackCache | None
    ) -> tuple[Float[Array, "B T D"], StackCache | None]:
        width = x.shape[-1]
        inputs = Norm(self.spec.norm, name="embedding_norm")(embedded), Norm(self.spec.norm, name="hidden_norm")(x)
        both = (2 * width,), (width,), (ax.EMBED, ax.EMBED_OUT), False, self.compute
        x = Projection(*both, name="projection")(jnp.concatenate(inputs, axis=-1))
        return Stack(self.spec.decoder, self.compute, name="decoder")(x, context, cache)


class MultiToken(nn.Module):
    """The modules of every depth, each with parameters of its own: `depth_0`, `depth_1` …"""

    spec: spec.MultiToken
    compute: Compute

    def setup(self):
        self.depth = [Depth(self.spec, self.compute) for _ in range(self.spec.depth)]

    def __call__(self, depth: int, *args) -> tuple[Float[Array, "B T D"], StackCache | None]:
        """`Depth` number `depth`, counted from 0."""
        return self.depth[depth](*args)
