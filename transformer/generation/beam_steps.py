"""The compiled half of beam search: one loop from the prompts' last features to the texts that were found.

Shape letters: K beams a row; C continuations that are looked at, of which enough go on however many end; L new tokens.
"""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer import sharding
from transformer.generation import decode
from transformer.generation.decode import NOTHING, Read
from transformer.nn.model import Transformer
from transformer.ops.cache import StackCache

# The score of a place that no text has.
NONE = -jnp.inf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rules:
    """What is better, and when a row is done; none of it makes another program.

    Attributes:
      penalty: power of the length that divides a sum of log probabilities.
      full: a row with K finished texts is done.
      ahead: a running text may become as long as it can, where that helps; otherwise it is judged as it is.
    """

    penalty: Float[Array, ""]
    full: Bool[Array, ""]
    ahead: Bool[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Texts:
    """K texts a row, by their new tokens.

    Attributes:
      scores: [B, K] descending; of running texts, sums of log probabilities.
      tokens, logprobs: [B, K, L]; `NOTHING` after the end.
    """

    scores: Float[Array, "B K"]
    tokens: Int[Array, "B K L"]
    logprobs: Float[Array, "B K L"]

    @classmethod
    def none(cls, rows: int, beams: int, columns: int) -> "Texts":
        """Places without texts."""
        shape = rows, beams, columns
        scores, tokens = jnp.full(shape[:2], NONE, jnp.float32), jnp.full(shape, NOTHING, jnp.int32)
        return cls(scores, tokens, jnp.zeros(shape, jnp.float32))

    def pick(self, index: Int[Array, "B N"]) -> "Texts":
        """N of each row's texts, in this order."""
        return jax.tree.map(lambda x: _pick(x, index), self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """What the next step needs to know of a batch.

    Attributes:
      cache: of B · K rows: every token of the running texts but the last ones, before `parents` are applied.
      parents: [B, K] which of the row's K caches each running text goes on with.
      running, finished: texts without and with an end; those of a row that is not active are settled.
      active: [B] rows whose search goes on.
    """

    cache: StackCache
    parents: Int[Array, "B K"]
    running: Texts
    finished: Texts
    active: Bool[Array, " B"]


@functools.partial(jax.jit, static_argnames=("model", "num_beams", "columns"))
def search(
    model: Transformer,
    params: dict,
    read: Read,
    lengths: Int[Array, " B"],
    left: Int[Array, " B"],
    ends: Int[Array, " E"],
    rules: Rules,
    *,
    num_beams: int,
    columns: int,
) -> Texts:
    """The best texts after prompts of `lengths` tokens that `decode.absorb` read; places without a text score -inf.

    Args:
      left: tokens that each row may have, at most `columns`; 0 in a row without a prompt.
      ends: tokens that end a text.
    """
    rows = lengths.shape[0]
    step = functools.partial(_choose, model, params, left, ends, rules)
    # At first there is one text, the empty one, of which all beams are copies.
    parents = jnp.zeros((rows, num_beams), jnp.int32)
    empty = Texts.none(rows, num_beams, columns)
    state = State(
        cache=decode.pin_cache(model, read.cache.pick(parents)),
        parents=jnp.broadcast_to(jnp.arange(num_beams, dtype=jnp.int32), parents.shape),
        running=dataclasses.replace(empty, scores=empty.scores.at[:, 0].set(0)),
        finished=empty,
        active=left > 0,
    )
    state = step(jnp.repeat(read.features, num_beams, axis=0), state, jnp.int32(0))

    def more(carry):
        return jnp.any(carry[1].active)

    def advance(carry):
        count, state = carry
        # What cross-attention looks at is the same for all beams of a row.
        cache = decode.pin_cache(model, state.cache.pick(state.parents, cross=False))
        last = jnp.take(state.running.tokens, count - 1, axis=2).reshape(-1, 1)
        positions = jnp.repeat(jnp.where(state.active, lengths + count - 1, -1), num_beams)[:, None]
        x, cache = decode.features(model, params, jnp.maximum(last, 0), positions, cache)
        return count + 1, step(x, dataclasses.replace(state, cache=cache), count)

    _, state = jax.lax.while_loop(more, advance, (jnp.int32(1), state))
    return jax.tree.map(lambda x: sharding.constrain(x, (None,) * x.ndim, model.compute.rules), state.finished)


def _choose(
    model: Transformer,
    params: dict,
    left: Int[Array, " B"],
    ends: Int[Array, " E"],
    rules: Rules,
    x: Float[Array, "BK 1 D"],
    state: State,
    count: Int[Array, ""],
) -> State:
    """The state with one more token in every text, from features of the last of `count` new tokens."""
    rows, beams = state.parents.shape
    logits = model.apply({"params": params}, x, method="logits")
    logprobs = jax.nn.log_softmax(logits).reshape(rows, -1)
    vocabulary = logprobs.shape[1] // beams
    sums = logprobs + jnp.repeat(state.running.scores, vocabulary, axis=1)
    # Enough that as many as there are beams go on, even if every beam has all of its ends among the best.
    width = min(max(2, 1 + ends.shape[0]) * beams, sums.shape[1])
    scores, index = jax.lax.top_k(sums, width)
    parents, tokens = index // vocabulary, (index % vocabulary).astype(jnp.int32)
    texts = state.running.pick(parents)
    texts = Texts(
        scores=scores,
        tokens=texts.tokens.at[:, :, count].set(tokens),
        logprobs=texts.logprobs.at[:, :, count].set(_pick(logprobs, index)),
    )
    length = count + 1
    over = jnp.isin(tokens, ends) | (length >= left)[:, None]

    going = jnp.where(over, NONE, scores)
    going, order = jax.lax.top_k(going, beams)
    running = dataclasses.replace(texts.pick(order), scores=going)

    fits = over & state.active[:, None] & (jnp.arange(width) < beams)
    candidates = dataclasses.replace(texts, scores=jnp.where(fits, scores / length**rules.penalty, NONE))
    merged = jax.tree.map(lambda *both: jnp.concatenate(both, axis=1), state.finished, candidates)
    finished = merged.pick(jax.lax.top_k(merged.scores, beams)[1])

    hopeful = _hopeful(going[:, 0], finished.scores, length, left, rules)
    active = state.active & hopeful & (length < left)
    return State(state.cache, _pick(parents, order).astype(jnp.int32), running, finished, active)


def _hopeful(
    best: Float[Array, " B"],
    finished: Float[Array, "B K"],
    length: Int[Array, ""],
    left: Int[Array, " B"],
    rules: Rules,
) -> Bool[Array, " B"]:
    """Rows whose best running text may yet become better than the worst finished one, which may be missing."""
    worst = finished[:, -1]
    length = jnp.where(rules.ahead & (rules.penalty > 0), left, length)
    return (best / length**rules.penalty > worst) & ~(rules.full & (worst > NONE))


def _pick(x: Array, index: Int[Array, "B N"]) -> Array:
    """[B, N, ...] of [B, M, ...]."""
    return jnp.take_along_axis(x, index.reshape(index.shape + (1,) * (x.ndim - 2)), axis=1)
