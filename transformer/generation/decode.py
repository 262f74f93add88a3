"""The compiled half of generation: one pass over the prompts, then a loop of single-token steps.

Both are compiled once per model, batch size, bucket of lengths, sampling method and mesh.
"""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt

from transformer import axes as ax
from transformer import sharding
from transformer.nn.model import Transformer
from transformer.ops import cache as caches
from transformer.ops.sampling import Sampling, sample

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
      slack: tokens that may be written and dropped again (`ops.cache.init`).
    """

    sampling: Sampling
    capacity: int
    cache_dtype: str
    slack: int = 0


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
    """

    cache: caches.StackCache
    tokens: Int[Array, " B"]
    positions: Int[Array, " B"]
    left: Int[Array, " B"]
    keys: Key[Array, " B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drawn:
    """Tokens drawn by a call, `NOTHING` after a row's end, and their log probabilities in nats before sampling."""

    tokens: Int[Array, "B N"]
    logprobs: Float[Array, "B N"]


@functools.partial(jax.jit, static_argnames=("model", "plan"))
def prefill(
    model: Transformer,
    params: dict,
    prompts: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    left: Int[Array, " B"],
    seeds: UInt[Array, "B 3"],
    ends: Int[Array, " E"],
    plan: Plan,
) -> tuple[State, Drawn]:
    """Reads whole prompts, padded on the right, and draws the first token of each row (Drawn of one column).

    Args:
      left: tokens that each row may draw; 0 in a row without a prompt.
      seeds: what the random keys are made of (`prompts.Batch`).
      ends: tokens that end a row; `NOTHING` is never drawn.
    """
    state, x = read(model, params, prompts, lengths, left, seeds, plan)
    state, tokens, logprobs = draw(model, params, last(x, lengths), state, ends, plan)
    return pin(model, state), replicate(model, Drawn(tokens[:, None], logprobs[:, None]))


def read(
    model: Transformer,
    params: dict,
    prompts: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    left: Int[Array, " B"],
    seeds: UInt[Array, "B 3"],
    plan: Plan,
) -> tuple[State, Float[Array, "B P D"]]:
    """The state before the first draw, and the features of whole prompts; arguments as `prefill`."""
    index = jnp.arange(prompts.shape[1], dtype=jnp.int32)
    positions = jnp.where(index < lengths[:, None], index, -1)
    cache = caches.init(model.spec.decoder, prompts.shape[0], plan.capacity, plan.cache_dtype, plan.slack)
    x, cache = features(model, params, prompts, positions, cache, fresh=True)
    keys = jax.vmap(row_key)(seeds)
    return State(cache=cache, tokens=jnp.zeros_like(lengths), positions=lengths - 1, left=left, keys=keys), x


def last(x: Float[Array, "B T D"], lengths: Int[Array, " B"]) -> Float[Array, "B 1 D"]:
    """The features of the last of `lengths` tokens of each row."""
    return jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)


@functools.partial(jax.jit, static_argnames=("model", "plan"), donate_argnames="state")
def decode(
    model: Transformer, params: dict, state: State, steps: Int[Array, ""], ends: Int[Array, " E"], plan: Plan
) -> tuple[State, Drawn]:
    """Draws up to `steps` <= MAX_STEPS more tokens a row, fewer when every row ends before; `state` is used up."""

    def more(carry):
        step, state, _ = carry
        return (step < steps) & jnp.any(state.left > 0)

    def advance(carry):
        step, state, drawn = carry
        positions = jnp.where(state.left > 0, state.positions, -1)
        x, cache = features(model, params, state.tokens[:, None], positions[:, None], state.cache)
        state, tokens, logprobs = draw(model, params, x, dataclasses.replace(state, cache=cache), ends, plan)
        drawn = Drawn(drawn.tokens.at[:, step].set(tokens), drawn.logprobs.at[:, step].set(logprobs))
        return step + 1, state, drawn

    shape = (state.tokens.shape[0], MAX_STEPS)
    drawn = Drawn(jnp.full(shape, NOTHING, jnp.int32), jnp.zeros(shape, jnp.float32))
    _, state, drawn = jax.lax.while_loop(more, advance, (jnp.int32(0), state, drawn))
    return pin(model, state), replicate(model, drawn)


def features(model: Transformer, params: dict, tokens, positions, cache: caches.StackCache, fresh: bool = False):
    """Final features [B, T, D] of the tokens, and the cache with them written."""
    args = tokens, positions
    return model.apply({"params": params}, *args, cache=cache, fresh=fresh, method="features")


def draw(model: Transformer, params: dict, x: Float[Array, "B 1 D"], state: State, ends: Array, plan: Plan):
    """The state after one more token in every unfinished row, and the [B] tokens and log probabilities to report."""
    logits = model.apply({"params": params}, x, method="logits")[:, 0]
    active = state.left > 0
    tokens = jnp.where(active, sample(logits, state.keys, state.positions + 1, plan.sampling), 0)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    logprobs = chosen - jax.nn.logsumexp(logits, axis=-1)
    ended = jnp.isin(tokens, ends)
    state = dataclasses.replace(
        state,
        tokens=tokens,
        positions=state.positions + 1,
        left=jnp.where(active & ~ended, state.left - 1, 0),
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
    )


def pin_cache(model: Transformer, cache: caches.StackCache) -> caches.StackCache:
    """Lays a cache out over the mesh."""
    rules = model.compute.rules

    def pin_layer(cache: caches.KVCache) -> caches.KVCache:
        lead = (ax.LAYERS,) * (cache.positions.ndim - 2)
        slots = (*lead, ax.BATCH, ax.ACT_HEADS, ax.LENGTH)
        names = {"keys": (*slots, None), "values": (*slots, None), "positions": (*lead, ax.BATCH, ax.LENGTH)}
        names |= {name: slots for name in ("key_scales", "value_scales") if getattr(cache, name) is not None}
        pinned = {name: sharding.constrain(getattr(cache, name), axes, rules) for name, axes in names.items()}
        return dataclasses.replace(cache, **pinned)

    return cache.map(pin_layer)


def replicate(model: Transformer, drawn: Drawn) -> Drawn:
    """Whole on every device: every process of a run reads all rows."""
    return jax.tree.map(lambda x: sharding.constrain(x, (None, None), model.compute.rules), drawn)
