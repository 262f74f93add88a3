"""What surrounds the stacks: token ids to vectors, vectors to logits."""

import math
from collections.abc import Sequence

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer import axes as ax
from transformer import spec
from transformer.nn.parameter import parameter
from transformer.nn.projection import Norm, Projection
from transformer.ops import products, rope
from transformer.ops.activations import activate
from transformer.settings import Compute
from transformer.sharding import constrain, into_stream


class Embedding(nn.Module):
    """Token vectors, scaled, plus absolute positions and token types where the spec has them, normed."""

    spec: spec.Embedding
    vocab_size: int
    d_model: int
    dtype: jnp.dtype
    rules: str

    def setup(self):
        s, width = self.spec, self.d_model
        init = nn.initializers.normal(1 / math.sqrt(width))
        self.table = parameter(self, "token", init, (self.vocab_size, width), (ax.VOCAB, ax.EMBED), (-1,))
        if isinstance(s.positions, spec.LearnedPositions):
            shape = s.positions.max_length, width
            self.positions = parameter(self, "position", init, shape, (ax.POSITION, ax.EMBED))
        if s.token_types is not None:
            self.types = parameter(self, "token_type", init, (s.token_types, width), (ax.TYPES, ax.EMBED))
        if s.norm is not None:
            self.norm = Norm(s.norm)

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], token_types: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        # Tables are split by features over axes that split the tokens, too. Each device looks up its features of all
        # tokens of those that it shares a table with, and only then do tokens and features change places: left to
        # itself, the compiler sends all features of all tokens to every device in the backward pass.
        tokens, positions = (self._constrain(x, reserved=(ax.EMBED,)) for x in (tokens, positions))
        # An id outside the table gives NaN, not another token's vector.
        x = products.rows(self.table, tokens).astype(self.dtype)
        if self.spec.scale is not None:
            x = x * jnp.asarray(self.spec.scale, self.dtype)
        match self.spec.positions:
            case spec.LearnedPositions():
                # Padding (-1) reads row 0, which nobody sees.
                x = x + jnp.take(self.positions, jnp.maximum(positions, 0), axis=0, mode="fill").astype(self.dtype)
            case spec.SinusoidalPositions() as sinusoidal:
                x = x + rope.sinusoids(sinusoidal, jnp.maximum(positions, 0), self.d_model).astype(self.dtype)
        x = self._constrain(self._add_types(x, token_types), ax.EMBED, reserved=(ax.EMBED,))
        # One dimension after the other: of both at once the compiler gathers all on every device.
        x = self._constrain(x, ax.EMBED, reserved=(ax.LENGTH, ax.EMBED))
        x = into_stream(x, self.rules)
        return x if self.spec.norm is None else self.norm(x)

    def _constrain(self, x: Array, *features: str, reserved: Sequence[str] = ()) -> Array:
        return constrain(x, (ax.BATCH, ax.LENGTH, *features), self.rules, reserved)

    def _add_types(self, x: Float[Array, "B T D"], token_types: Int[Array, "B T"] | None) -> Float[Array, "B T D"]:
        if self.spec.token_types is None:
            if token_types is not None:
                raise ValueError("token_types: this model has none")
            return x
        if token_types is None:
            return x + self.types[0].astype(self.dtype)
        token_types = self._constrain(token_types, reserved=(ax.EMBED,))
        return x + jnp.take(self.types, token_types, axis=0, mode="fill").astype(self.dtype)


class Head(nn.Module):
    """What is scored against the vocabulary, and the table [V, D] and bias [V] that do it."""

    spec: spec.Head
    vocab_size: int
    d_model: int
    compute: Compute

    def setup(self):
        s, width = self.spec, self.d_model
        if not s.tied:
            init = nn.initializers.truncated_normal(1 / math.sqrt(width))
            self.table = parameter(self, "kernel", init, (self.vocab_size, width), (ax.VOCAB, ax.EMBED), (-1,))
        if s.bias:
            self.bias = parameter(self, "bias", nn.initializers.zeros_init(), (self.vocab_size,), (ax.VOCAB,))
        if s.transform is not None:
            self.transform = Projection((width,), (width,), (ax.EMBED, ax.EMBED_OUT), True, self.compute)
            self.transform_norm = Norm(s.transform.norm)

    def __call__(
        self, x: Float[Array, "B T D"], token_table: Float[Array, "V D"]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "V D"], Float[Array, " V"] | None]:
        s = self.spec
        if s.transform is not None:
            x = self.transform_norm(activate(s.transform.activation, self.transform(x)))
        if s.scale is not None:
            x = x * jnp.asarray(s.scale, x.dtype)
        return x, token_table if s.tied else self.table, self.bias if s.bias else None


class Pooler(nn.Module):
    """tanh of a dense layer of the first token's features, and logits of a classifier on top."""

    spec: spec.Pooler
    compute: Compute

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B D"], Float[Array, "B C"] | None]:
        width, classes = x.shape[-1], self.spec.classes
        square, outward = (ax.EMBED, ax.EMBED_OUT), (ax.EMBED, ax.CLASSES)
        dense = Projection((width,), (width,), square, True, self.compute, name="dense")
        pooled = jnp.tanh(dense(x[:, 0]))
        if classes is None:
            return pooled, None
        return pooled, Projection((width,), (classes,), outward, True, self.compute, name="classifier")(pooled)
