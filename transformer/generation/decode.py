"""The compiled half of generation: one pass over the prompts, then a loop of single-token steps.

They are compiled once per model, batch size, bucket of lengths, steps of the sampling method and mesh; neither the
method's numbers nor a prompt's length within its bucket make another program.
"""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from transformer import axes as ax
from transformer import sharding
from transformer.nn.context import Source
from transformer.nn.model import Transformer
from transformer.ops import cache as caches
from transformer.ops.sampling import Method, penalize, sample

# Columns of a decode call's output: the most steps that one call can take.
MAX_STEPS = 64
# In `Drawn.tokens`: no token, the row had finished.
NOTHING = -1


@dataclass(frozen=True)
class Plan:
    """The static part of a generation.

    Attributes:
      capacity: positions that the cache of a full layer holds.
      cache_dtype: of keys and values at rest.
      chunk: tokens of a prompt that are read at once.
      slack: tokens that may be written and dropped again (`ops.cache.init`).
      both_ways: the tokens of a prompt see each other, as those of a prefix do in training; they are then one chunk.
    """

    capacity: int
    cache_dtype: caches.CacheDType
    chunk: int
    slack: int = 0
    both_ways: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """What the next step needs to know of a batch.

    Attributes:
      cache: every token but the last one of each row.
      tokens: [B] the last token of each row.
      positions: [B] its absolute position.
      left: [B] tokens that the row may still draw; 0: it has finished.
      keys: [B] random keys, the same at every step.
      seen: [B, V] True for tokens that the row has; None where nobody asks.
    """

    cache: caches.StackCache
    tokens: Int[Array, " B"]
    positions: Int[Array, " B"]
    left: Int[Array, " B"]
    keys: Key[Array, " B"]
    seen: Bool[Array, "B V"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drawn:
    """Tokens drawn by a call, `NOTHING` after a row's end, and their log probabilities in nats before sampling."""

    tokens: Int[Array, "B N"]
    logprobs: Float[Array, "B N"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Read:
    """Prompts read so far: what `absorb` hands to itself.

    Attributes:
      features: [B, 1, D] of the last token of each row that has been read to its end.
    """

    cache: caches.StackCache
    features: Float[Array, "B 1 D"]


def prefill(
    model: Transformer,
    params: dict,
    prompts: Int[np.ndarray, "B P"],
    lengths: Int[np.ndarray, " B"],
    left: Int[np.ndarray, " B"],
    seeds: UInt[np.ndarray, "B 3"],
    ends: Int[np.ndarray, " E"],
    method: Method,
    plan: Plan,
    source: Source | None = None,
) -> tuple[State, Drawn]:
    """Reads prompts, padded on the right, and draws the first token of each row (Drawn of one column).

    Args:
      prompts: P is at most `plan.chunk`, or a multiple of it: they are read so many tokens at a time.
      left: tokens that each row may draw; 0 in a row without a prompt.
      seeds: what the random keys are made of (`prompts.Batch`).
      ends: tokens that end a row; `NOTHING` is never drawn.
      source: what an encoder reads; `prompts` are then the first tokens of what the decoder writes.
    """
    read = read_all(model, params, prompts, lengths, plan, source)
    return begin(model, params, read.features, read.cache, prompts, lengths, left, seeds, ends, method)


def read_all(
    model: Transformer,
    params: dict,
    prompts: Int[np.ndarray, "B P"],
    lengths: Int[np.ndarray, " B"],
    plan: Plan,
    source: Source | None = None,
) -> Read:
    """Prompts read to their ends, `plan.chunk` tokens at a time."""
    width, read = min(plan.chunk, prompts.shape[1]), None
    for start in range(0, prompts.shape[1], width):
        tokens, first = prompts[:, start : start + width], np.int32(start)
        read = absorb(model, params, tokens, first, lengths, read, plan, source if read is None else None)
    return read


@functools.partial(jax.jit, static_argnames=("model", "plan"), donate_argnames="read")
def absorb(
    model: Transformer,
    params: dict,
    tokens: Int[Array, "B T"],
    start: Int[Array, ""],
    lengths: Int[Array, " B"],
    read: Read | None,
    plan: Plan,
    source: Source | None = None,
) -> Read:
    """Reads the prompts' next T tokens, from position `start`; None: these are the first. `read` is used up.

    `source` comes with the first tokens, where there is an encoder.
    """
    positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    positions = jnp.where(positions < lengths[:, None], positions, -1)
    fresh = read is None
    if read is None:
        length = 0 if source is None else source.tokens.shape[1]
        cache = caches.init(model.spec.decoder, tokens.shape[0], plan.capacity, plan.cache_dtype, plan.slack, length)
    else:
        cache = read.cache
    orders = jnp.where(positions < 0, -1, lengths[:, None] - 1) if plan.both_ways and fresh else None
    x, cache = features(model, params, tokens, positions, cache, fresh, orders=orders, source=source)
    last = lengths - 1 - start
    x = jnp.take_along_axis(x, jnp.clip(last, 0, tokens.shape[1] - 1)[:, None, None], axis=1)
    if read is not None:
        x = jnp.where((last >= 0)[:, None, None], x, read.features)
    return pin_read(model, Read(cache, x))


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def begin(
    model: Transformer,
    params: dict,
    features: Float[Array, "B 1 D"],
    cache: caches.StackCache,
    prompts: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    left: Int[Array, " B"],
    seeds: UInt[Array, "B 3"],
    ends: Int[Array, " E"],
    method: Method,
) -> tuple[State, Drawn]:
    """Draws the first token of each row after its prompt, from what `absorb` gave; `cache` is used up."""
    seen = None
    if method.repetition_penalty is not None:
        rows, width = jnp.arange(prompts.shape[0])[:, None], prompts.shape[1]
        real = jnp.arange(width) < lengths[:, None]
        seen = jnp.zeros((prompts.shape[0], model.spec.vocab_size), bool).at[rows, prompts].max(real)
    state = State(
        cache=cache,
        tokens=jnp.zeros_like(lengths),
        positions=lengths - 1,
        left=left,
        keys=jax.vmap(row_key)(seeds),
        seen=seen,
    )
    state, tokens, logprobs = draw(model, params, features, state, ends, method)
    return pin(model, state), replicate(model, Drawn(tokens[:, None], logprobs[:, None]))


def last(x: Float[Array, "B T D"], lengths: Int[Array, " B"]) -> Float[Array, "B 1 D"]:
    """The features of the last of `lengths` tokens of each row."""
    return jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="state")
def decode(
    model: Transformer, params: dict, state: State, steps: Int[Array, ""], ends: Int[Array, " E"], method: Method
) -> tuple[State, Drawn]:
    """Draws up to `steps` <= MAX_STEPS more tokens a row, fewer when every row ends before; `state` is used up."""

    def more(carry):
        step, state, _ = carry
        return (step < steps) & jnp.any(state.left > 0)

    def advance(carry):
        step, state, drawn = carry
        positions = jnp.where(state.left > 0, state.positions, -1)
        x, cache = features(model, params, state.tokens[:, None], positions[:, None], state.cache)
        state, tokens, logprobs = draw(model, params, x, dataclasses.replace(state, cache=cache), ends, method)
        drawn = Drawn(drawn.tokens.at[:, step].set(tokens), drawn.logprobs.at[:, step].set(logprobs))
        return step + 1, state, drawn

    shape = (state.tokens.shape[0], MAX_STEPS)
    drawn = Drawn(jnp.full(shape, NOTHING, jnp.int32), jnp.zeros(shape, jnp.float32))
    _, state, drawn = jax.lax.while_loop(more, advance, (jnp.int32(0), state, drawn))
    return pin(model, state), replicate(model, drawn)


def features(
    model: Transformer, params: dict, tokens, positions, cache: caches.StackCache, fresh: bool = False, **options
):
    """Final features [B, T, D] of the tokens, and the cache with them written; options as of `Transformer.features`."""
    args = tokens, positions
    return model.apply({"params": params}, *args, cache=cache, fresh=fresh, **options, method="features")


def draw(model: Transformer, params: dict, x: Float[Array, "B 1 D"], state: State, ends: Array, method: Method):
    """The state after one more token in every unfinished row, and the [B] tokens and log probabilities to report."""
    logits = model.apply({"params": params}, x, method="logits")[:, 0]
    active = state.left > 0
    likely = logits if state.seen is None else penalize(logits, method, state.seen)
    tokens = jnp.where(active, sample(likely, state.keys, state.positions + 1, method), 0)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    logprobs = chosen - jax.nn.logsumexp(logits, axis=-1)
    ended = jnp.isin(tokens, ends)
    state = dataclasses.replace(
        state,
        tokens=tokens,
        positions=state.positions + 1,
        left=jnp.where(active & ~ended, state.left - 1, 0),
        seen=None if state.seen is None else state.seen.at[jnp.arange(tokens.shape[0]), tokens].max(active),
    )
    return state, jnp.where(active, tokens, NOTHING), logprobs


def row_key(seeds: UInt[Array, "3"]) -> Key[Array, ""]:
    """The random key of a row."""
    seed, prompt, occurrence = seeds
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), prompt), occurrence)


def pin(model: Transformer, state: State) -> State:
    """Lays the state out over the mesh, equally before and after a call: only so can its buffers be reused."""

    def pin_row(row: Array) -> Array:
        return sharding.constrain(row, (ax.BATCH,), model.compute.rules)

    return dataclasses.replace(
        state,
        cache=pin_cache(model, state.cache),
        tokens=pin_row(state.tokens),
        positions=pin_row(state.positions),
        left=pin_row(state.left),
        seen=None if state.seen is None else sharding.constrain(state.seen, (ax.BATCH, None), model.compute.rules),
    )


def pin_read(model: Transformer, read: Read) -> Read:
    """Lays out over the mesh what was read, as `absorb` hands it to itself."""
    x = sharding.constrain(read.features, (ax.BATCH, None, None), model.compute.rules)
    return Read(pin_cache(model, read.cache), x)


def pin_cache(model: Transformer, cache: caches.StackCache) -> caches.StackCache:
    """Lays the cache out over the mesh."""
    rules = model.compute.rules

    def pin_layer(cache: caches.KVCache) -> caches.KVCache:
        axes = cache.axes.items()
        return dataclasses.replace(cache, **{n: sharding.constrain(getattr(cache, n), a, rules) for n, a in axes})

    return cache.map(pin_layer)


def replicate(model: Transformer, drawn: Drawn) -> Drawn:
    """Whole on every device: every process of a run reads all rows."""
    return jax.tree.map(lambda x: sharding.constrain(x, (None, None), model.compute.rules), drawn)
