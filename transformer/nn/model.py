"""The whole model: embedding, stacks, head."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer import axes as ax
from transformer import sharding, spec
from transformer.nn.context import Memory, Order, Source, default_positions, make_context
from transformer.nn.embedding import Embedding, Head, Pooler
from transformer.nn.multi_token import MultiToken
from transformer.nn.projection import capture, capturing
from transformer.nn.stack import Stack
from transformer.ops import cache as caches
from transformer.ops import losses, products
from transformer.settings import Compute


class Losses(NamedTuple):
    """What `weighed_losses` gives; the total alone has a gradient.

    Attributes:
      nats: [B, T] `token_losses`.
      further: of each depth k of multi-token prediction, [B, T] losses of targets[b, t] as it foretells them from the
        decoder's features k + 1 tokens earlier.
      seen: of each depth, 1 where those are of the same document, else 0.
    """

    total: Float[Array, ""]
    nats: Float[Array, "B T"]
    further: list[Float[Array, "B T"]]
    seen: list[Float[Array, "B T"]]


class Transformer(nn.Module):
    """An encoder, a decoder or both, wholly described by its spec.

    `model.apply({"params": params}, tokens)` gives logits (features where there is no head); behind an encoder, tokens
    are what the decoder reads, and `source` is what the encoder does. Training uses `token_losses`, decoding `features`
    with a cache and `logits` of the positions it needs. Tokens of segment 0 and at negative positions are padding.
    """

    spec: spec.Model
    compute: Compute = Compute()

    def setup(self):
        s = self.spec
        how = jnp.dtype(self.compute.dtype), self.compute.rules
        self.embedding = Embedding(s.embedding, s.vocab_size, s.d_model, *how)
        if s.encoder is not None:
            self.encoder = Stack(s.encoder, self.compute)
        if s.decoder is not None:
            self.decoder = Stack(s.decoder, self.compute)
        if s.head is not None:
            self.head = Head(s.head, s.vocab_size, s.d_model, self.compute)
        if s.pooler is not None:
            self.pooler = Pooler(s.pooler, self.compute)
        if s.mtp is not None:
            self.mtp = MultiToken(s.mtp, self.compute)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        **options: Any,
    ) -> Float[Array, "B T V"]:
        """Logits in float32: of the token after each position, or at it in an encoder. Options as of `features`."""
        if self.is_initializing():
            return self._create(tokens)
        x, _ = self.features(tokens, positions, segment_ids, **options)
        return x if self.spec.head is None else self.logits(x)

    def _create(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Asks for everything: what isn't asked for isn't created."""
        both = self.spec.encoder is not None and self.spec.decoder is not None
        x, _ = self.features(tokens, source=Source(tokens) if both else None)
        if self.spec.head is not None:
            x = self.logits(x)
        if self.spec.pooler is not None:
            self.pool(x if self.spec.head is None else self.features(tokens)[0])
        if self.spec.mtp is not None:
            self.weighed_losses(jnp.ones(tokens.shape), tokens, tokens, mtp_weight=1.0)
        return x

    def features(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        cache: caches.StackCache | None = None,
        fresh: bool = False,
        *,
        orders: Int[Array, "B T"] | None = None,
        token_types: Int[Array, "B T"] | None = None,
        source: Source | Memory | None = None,
    ) -> tuple[Float[Array, "B T D"], caches.StackCache | None]:
        """Final features, and the cache with these tokens written where one is given.

        Args:
          positions: absolute; by default 0, 1, 2 … restarting at each segment. Required with a cache.
          fresh: promises that `cache` is empty: attention then runs over these tokens alone.
          orders: by default the positions. Tokens of one order see each other, as those of a prefix do; all of a
            prefix must be in one call.
          token_types: by default 0.
          source: what an encoder–decoder's encoder reads, or what `encode` made of it. A cache that has seen it once
            needs it no more.

        Raises:
          ValueError: more tokens than a learned position table has, or arguments that exclude each other.
        """
        order = self._order(cache)
        x, cache = self._features(order, tokens, positions, segment_ids, cache, fresh, orders, token_types, source)
        return order.back(x), cache

    def _order(self, cache: caches.StackCache | None = None) -> Order:
        """Zig-zag where the mesh splits rows and early tokens have less to look at than late ones."""
        rules, uneven = self.compute.rules, self.spec.trunk.uneven
        # What is captured, and what a cache is given, is in the rows' own order.
        free = cache is None and not capturing(self) and not self.is_initializing()
        return Order(uneven and free and sharding.ways(ax.LENGTH, rules) > 1, rules)

    def _features(
        self, order: Order, tokens, positions=None, segment_ids=None, cache=None, fresh=False,
        orders=None, token_types=None, source=None,
    ):  # fmt: skip
        """`features` that come in `order`, of arguments in the rows' own."""
        self._check_length(tokens)
        if cache is not None and (positions is None or segment_ids is not None):
            raise ValueError("a cache needs explicit positions, and rows of one document (no segment_ids)")
        if orders is not None and cache is not None and not fresh:
            raise ValueError("orders need all of the prefix in one call: use an empty cache, and fresh=True")
        self._check_shape(tokens, cache, orders, source)
        if positions is None:
            positions = default_positions(segment_ids, tokens.shape)
        if isinstance(source, Source):
            source = self.encode(source)
        rows = tokens, positions, token_types, segment_ids, orders
        tokens, positions, token_types, segment_ids, orders = order.out(rows)
        x = self.embedding(tokens, positions, token_types)
        capture(self, "embedded", x)
        stack = self.encoder if self.spec.decoder is None else self.decoder
        context = make_context(self.spec.ropes, positions, segment_ids, fresh, orders, source, order.zigzag)
        return stack(x, context, cache)

    def _check_shape(self, tokens, cache, orders, source) -> None:
        if self.spec.decoder is None and not (cache is None and orders is None):
            raise ValueError(
                "an encoder alone has no cache and no orders: it reads its tokens whole, in both directions"
            )
        if source is not None and (self.spec.decoder is None or self.spec.encoder is None):
            raise ValueError("source: only a model with an encoder and a decoder reads one")
        if not isinstance(source, Source | Memory | None):
            kind = type(source).__name__
            raise ValueError(f"source={kind}: wrap the tokens, transformer.nn.context.Source(tokens), or give a Memory")
        if source is not None:
            rows = len(source.tokens if isinstance(source, Source) else source.features)
            if rows != len(tokens):
                raise ValueError(f"source: {rows} rows, beside {len(tokens)} rows of tokens; give one for each row")

    def _check_length(self, tokens) -> None:
        limit = self.spec.length_limit
        if limit is not None and tokens.shape[1] > limit:
            raise ValueError(f"{tokens.shape[1]} tokens: the learned position table ends at max_length={limit}")

    def encode(self, source: Source) -> Memory:
        """What the encoder makes of a text, for the decoder to look at.

        Raises:
          ValueError: more tokens than a learned position table has.
        """
        self._check_length(source.tokens)
        positions = source.positions
        if positions is None:
            positions = default_positions(source.segments, source.tokens.shape)
        x = self.embedding(source.tokens, positions)
        capture(self, "source_embedded", x)
        x, _ = self.encoder(x, make_context(self.spec.ropes, positions, source.segments), None)
        return Memory(x, positions, source.segments)

    def pool(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B D"], Float[Array, "B C"] | None]:
        """The vector of each text whose final features are `x`, and its classifier's logits where there is one."""
        return self.pooler(x)

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Scores of the vocabulary in float32, softcapped where the spec says so."""
        x, table, bias = self.head(x, self.embedding.table)
        y = products.scores(x, table)
        if bias is not None:
            y = y + bias
        if self.spec.head.softcap is not None:
            y = self.spec.head.softcap * jnp.tanh(y / self.spec.head.softcap)
        y = sharding.constrain(y, (ax.BATCH, ax.LENGTH, ax.ACT_VOCAB), self.compute.rules)
        capture(self, "logits", y)
        return y

    def token_losses(
        self,
        tokens: Int[Array, "B T"],
        targets: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        **options: Any,
    ) -> Float[Array, "B T"]:
        """Negative log-likelihood of each target in nats, without keeping the logits. Options as of `features`."""
        order = self._order()
        x, _ = self._features(order, tokens, positions, segment_ids, **options)
        return order.back(losses.cross_entropy(self._loss(), *self._scored(x), order.out(targets)).nats)

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
        return self._further(Order(), depth, x, tokens, positions, segment_ids, cache, fresh)

    def _further(self, order: Order, depth, x, tokens, positions, segment_ids, cache=None, fresh=False):
        """`further` of features that are in `order`, as are those that it gives, and of the rest in the rows' own."""
        tokens, positions, segment_ids = order.out((tokens, positions, segment_ids))
        context = make_context(self.spec.ropes, positions, segment_ids, fresh, zigzag=order.zigzag)
        ahead = jnp.where(positions >= 0, positions + depth + 1, -1)
        return self.mtp(depth, x, self.embedding(tokens, ahead), context, cache)

    def weighed_losses(
        self,
        weights: Float[Array, "B T"],
        tokens: Int[Array, "B T"],
        targets: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        *,
        smoothing: float = 0.0,
        z: float = 0.0,
        mtp_weight: float = 0.0,
        **options: Any,
    ) -> Losses:
        """What training minimises: the sum of weights · `token_losses`, and the losses that it is a sum of.

        Args:
          smoothing, z: as of `ops.losses.Call`, in the sum alone.
          mtp_weight: if positive, that times the mean over the depths of multi-token prediction of the sum of their
            losses is added. options (as of `features`) must then be empty.
        """
        order, call = self._order(), self._loss(smoothing, z)
        if mtp_weight and positions is None:
            positions = default_positions(segment_ids, tokens.shape)
        trunk, _ = self._features(order, tokens, positions, segment_ids, **options)
        x, further, seen = trunk, [], []
        total, nats = self._weighed(order, trunk, targets, weights, call)
        for depth in range(self.spec.mtp.depth if mtp_weight else 0):
            ahead = depth + 1
            same = (_shift(positions, ahead, -1) == positions - ahead) & (positions >= ahead)
            if segment_ids is not None:
                same &= _shift(segment_ids, ahead, 0) == segment_ids
            seen.append(same.astype(jnp.float32))
            # Tails have no such token, but that of another document: as padding, they are seen by nothing and routed
            # to no expert.
            there = jnp.where(_shift(same, -ahead, False), positions, -1)
            x, _ = self._further(order, depth, x, _shift(tokens, -ahead, 0), there, segment_ids)
            here = _shift(weights * seen[-1], -ahead, 0)
            more, found = self._weighed(order, x, _shift(targets, -ahead, 0), here, call)
            total = total + mtp_weight / self.spec.mtp.depth * more
            further.append(_shift(found, ahead, 0))
        return Losses(total, nats, further, seen)

    def _weighed(self, order: Order, x, targets, weights, call: losses.Call) -> tuple[Array, Array]:
        """`losses.weighed_cross_entropy` of features in `order`, of the rest in the rows' own."""
        targets, weights = order.out((targets, weights))
        total, nats = losses.weighed_cross_entropy(call, *self._scored(x), targets, weights)
        return total, order.back(nats)

    def _scored(self, x: Float[Array, "B T D"]):
        """Features, the table and the bias that score them."""
        return self.head(sharding.into_branch(x, self.compute.rules), self.embedding.table)

    def _loss(self, smoothing: float = 0.0, z: float = 0.0) -> losses.Call:
        how = self.compute
        return losses.Call(how.loss_chunk, self.spec.head.softcap, smoothing, z, how.rules, how.reduce_dtype)


def _shift(x: Array, by: int, fill: int) -> Array:
    """Every row of [B, T] moved `by` places to the right (to the left if negative); `fill` comes in."""
    padded = jnp.pad(x, ((0, 0), (max(by, 0), max(-by, 0))), constant_values=fill)
    return padded[:, max(-by, 0) : max(-by, 0) + x.shape[1]]
