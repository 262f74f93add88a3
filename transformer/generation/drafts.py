"""Who guesses in speculative decoding: another model, or a model's own module of multi-token prediction."""

from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer.generation import decode
from transformer.nn.model import Transformer
from transformer.ops import cache as caches
from transformer.ops.cache import StackCache


class Draft(Protocol):
    """Reads tokens and tells what may follow; hashable, so that programs are compiled for it.

    Attributes:
      model: whose parameters it is given, and whose head it uses.
    """

    model: Transformer

    def init(self, batch: int, plan: decode.Plan) -> StackCache:
        """An empty cache."""
        ...

    def read(
        self,
        params: dict,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        before: Float[Array, "B T D"],
        cache: StackCache,
        fresh: bool = False,
    ) -> tuple[Float[Array, "B T D"], StackCache]:
        """Features that foretell the token after each, and the cache with these tokens written.

        Args:
          before: features that foretold each token: the target's, or the draft's own where the token is a guess.
        """
        ...

    def forget(self, cache: StackCache, first: Int[Array, " B"]) -> StackCache:
        """The cache without the tokens from position `first` on."""
        ...


@dataclass(frozen=True)
class OtherModel:
    """A model of any family with the target's vocabulary, usually a smaller one."""

    model: Transformer

    def init(self, batch: int, plan: decode.Plan) -> StackCache:
        """As `Draft.init`."""
        return caches.init(self.model.spec.decoder, batch, plan.capacity, plan.cache_dtype, plan.slack)

    def read(self, params, tokens, positions, before, cache, fresh=False):
        """As `Draft.read`; reads the tokens alone."""
        return decode.features(self.model, params, tokens, positions, cache, fresh)

    def forget(self, cache: StackCache, first: Int[Array, " B"]) -> StackCache:
        """As `Draft.forget`."""
        return cache.drop(first)


@dataclass(frozen=True)
class OwnModule:
    """The first module of multi-token prediction of the target itself, fed with its own features to guess further.

    It was trained one token ahead, so that its first guess is its best. A token is kept where the features before it
    are: one position earlier.
    """

    model: Transformer

    def init(self, batch: int, plan: decode.Plan) -> StackCache:
        """As `Draft.init`."""
        return caches.init(self.model.spec.mtp.decoder, batch, plan.capacity, plan.cache_dtype, plan.slack)

    def read(self, params, tokens, positions, before, cache, fresh=False):
        """As `Draft.read`; the first token of a row has nothing before it and is left out."""
        args = 0, before, tokens, jnp.maximum(positions - 1, -1)
        return self.model.apply({"params": params}, *args, cache=cache, fresh=fresh, method="further")

    def forget(self, cache: StackCache, first: Int[Array, " B"]) -> StackCache:
        """As `Draft.forget`."""
        return cache.drop(first - 1)
