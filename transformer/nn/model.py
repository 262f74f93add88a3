"""The whole model: embedding, stack, head."""

import math
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer import axes as ax
from transformer import sharding, spec
from transformer.nn.context import default_positions, make_context
from transformer.nn.multi_token import MultiToken
from transformer.nn.parameter import parameter
from transformer.nn.projection import capture
from transformer.nn.stack import Stack
from transformer.ops import cache as caches
from transformer.ops import losses, products, rope
from transformer.settings import Compute


class Embedding(nn.Module):
    """Token vectors, scaled, plus absolute positions where the spec has them."""

    spec: spec.Embedding
    vocab_size: int
    d_model: int
    dtype: jnp.dtype

    def setup(self):
        init = nn.initializers.normal(1 / math.sqrt(self.d_model))
        self.table = parameter(self, "token", init, (self.vocab_size, self.d_model), (ax.VOCAB, ax.EMBED), (-1,))
        if isinstance(self.spec.positions, spec.LearnedPositions):
            shape = (self.spec.positions.max_length, self.d_model)
            self.positions = parameter(self, "position", init, shape, (ax.POSITION, ax.EMBED))

    def __call__(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
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
        return x


class Head(nn.Module):
    """The table [V, D] and bias [V] that score features against the vocabulary."""

    spec: spec.Head
    vocab_size: int
    d_model: int

    def setup(self):
        if not self.spec.tied:
            init = nn.initializers.truncated_normal(1 / math.sqrt(self.d_model))
            self.table = parameter(self, "kernel", init, (self.vocab_size, self.d_model), (ax.VOCAB, ax.EMBED), (-1,))
        if self.spec.bias:
            self.bias = parameter(self, "bias", nn.initializers.zeros_init(), (self.vocab_size,), (ax.VOCAB,))

    def __call__(self, token_table: Float[Array, "V D"]) -> tuple[Float[Array, "V D"], Float[Array, " V"] | None]:
        return token_table if self.spec.tied else self.table, self.bias if self.spec.bias else None


class Transformer(nn.Module):
    """A decoder-only language model, wholly described by its spec.

    `model.apply({"params": params}, tokens)` gives logits; training uses `token_losses`, decoding `features` with a
    cache and `logits` of the positions it needs. Tokens of segment 0 and tokens at negative positions are padding.
    """

    spec: spec.Model
    compute: Compute = Compute()

    def setup(self):
        s = self.spec
        self.embedding = Embedding(s.embedding, s.vocab_size, s.d_model, jnp.dtype(self.compute.dtype))
        self.decoder = Stack(s.decoder, self.compute)
        self.head = Head(s.head, s.vocab_size, s.d_model)
        if s.mtp is not None:
            self.mtp = MultiToken(s.mtp, self.compute)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits in float32 of the token after each position."""
        if self.is_initializing() and self.spec.mtp is not None:
            # Logits don't ask for these parameters, and what isn't asked for isn't created.
            self.further_losses(tokens, tokens, positions, segment_ids)
        x, _ = self.features(tokens, positions, segment_ids)
        return self.logits(x)

    def features(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        cache: caches.StackCache | None = None,
        fresh: bool = False,
    ) -> tuple[Float[Array, "B T D"], caches.StackCache | None]:
        """Final features, and the cache with these tokens written where one is given.

        Args:
          positions: absolute; by default 0, 1, 2 … restarting at each segment. Required with a cache.
          fresh: promises that `cache` is empty: attention then runs over these tokens alone.

        Raises:
          ValueError: more tokens than a learned position table has, or arguments that exclude each other.
        """
        limit = self.spec.length_limit
        if limit is not None and tokens.shape[1] > limit:
            raise ValueError(f"{tokens.shape[1]} tokens: the learned position table ends at max_length={limit}")
        if cache is not None and (positions is None or segment_ids is not None):
            raise ValueError("a cache needs explicit positions, and rows of one document (no segment_ids)")
        if positions is None:
            positions = default_positions(segment_ids, tokens.shape)
        context = make_context(self.spec.ropes, positions, segment_ids, fresh)
        x = self._constrain(self.embedding(tokens, positions), ax.ACT_EMBED)
        capture(self, "embedded", x)
        return self.decoder(x, context, cache)

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Scores of the vocabulary in float32, softcapped where the spec says so."""
        table, bias = self.head(self.embedding.table)
        y = products.scores(x, table)
        if bias is not None:
            y = y + bias
        if self.spec.head.softcap is not None:
            y = self.spec.head.softcap * jnp.tanh(y / self.spec.head.softcap)
        y = self._constrain(y, ax.ACT_VOCAB)
        capture(self, "logits", y)
        return y

    def token_losses(
        self,
        tokens: Int[Array, "B T"],
        targets: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T"]:
        """Negative log-likelihood of each target in nats, without keeping the logits."""
        x, _ = self.features(tokens, positions, segment_ids)
        return self._cross_entropy(x, targets)

    def smoothed_losses(
        self,
        smoothing: float,
        tokens: Int[Array, "B T"],
        targets: Int[Array, "B T"],
        *where: Any,
        **more: Any,
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        """`token_losses`, and the loss against targets of which a share `smoothing` lies evenly on the vocabulary."""
        x, _ = self.features(tokens, *where, **more)
        return self._cross_entropy(x, targets, smoothing)

    def further(
        self,
        depth: int,
        x: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        cache: caches.StackCache | None = None,
        fresh: bool = False,
    ) -> tuple[Float[Array, "B T D"], caches.StackCache | None]:
        """Features that look one token further than `x`, and the cache of that module; `logits` takes them.

        Args:
          depth: which module, from 0. It reads `features` at depth 0, else what it gave one depth before.
          tokens: the token that `x` predicts: at position p, that of position p + depth + 1.
          positions: of `x`.
        """
        context = make_context(self.spec.ropes, positions, segment_ids, fresh)
        ahead = jnp.where(positions >= 0, positions + depth + 1, -1)
        return self.mtp(depth, x, self._constrain(self.embedding(tokens, ahead), ax.ACT_EMBED), context, cache)

    def further_losses(
        self,
        tokens: Int[Array, "B T"],
        targets: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T"], Float[Array, "E B T"], Float[Array, "E B T"]]:
        """`token_losses`, and the same of every depth of multi-token prediction, from one pass of the decoder.

        Returns:
          (nats, further, seen): further[k, b, t] is the loss of targets[b, t] as module k foretells it from the
          decoder's features k + 1 tokens earlier; seen is 1 where those are of the same document, else 0.
        """
        if positions is None:
            positions = default_positions(segment_ids, tokens.shape)
        trunk, _ = self.features(tokens, positions, segment_ids)
        x, further, seen = trunk, [], []
        for depth in range(self.spec.mtp.depth):
            ahead = depth + 1
            # The tails, which have no such token, are seen by nothing but later tails.
            x, _ = self.further(depth, x, _shift(tokens, -ahead, 0), positions, segment_ids)
            nats = self._cross_entropy(x, _shift(targets, -ahead, 0))
            same = (_shift(positions, ahead, -1) == positions - ahead) & (positions >= ahead)
            if segment_ids is not None:
                same &= _shift(segment_ids, ahead, 0) == segment_ids
            further.append(_shift(nats, ahead, 0))
            seen.append(same.astype(jnp.float32))
        return self._cross_entropy(trunk, targets), jnp.stack(further), jnp.stack(seen)

    def _cross_entropy(self, x: Float[Array, "B T D"], targets: Int[Array, "B T"], smoothing: float | None = None):
        table, bias = self.head(self.embedding.table)
        how = dict(
            bias=bias,
            softcap=self.spec.head.softcap,
            chunk=self.compute.loss_chunk,
            shards=sharding.ways(ax.VOCAB, self.compute.rules),
        )
        if smoothing is None:
            return losses.cross_entropy(x, table, targets, **how)
        return losses.smoothed_cross_entropy(x, table, targets, smoothing, **how)

    def _constrain(self, x: Array, last: str) -> Array:
        return sharding.constrain(x, (ax.BATCH, ax.LENGTH, last), self.compute.rules)


def _shift(x: Array, by: int, fill: int) -> Array:
    """Every row of [B, T] moved `by` places to the right (to the left if negative); `fill` comes in."""
    padded = jnp.pad(x, ((0, 0), (max(by, 0), max(-by, 0))), constant_values=fill)
    return padded[:, max(-by, 0) : max(-by, 0) + x.shape[1]]
