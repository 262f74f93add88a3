"""The compiled half of speculative decoding: a draft guesses a few tokens, and the model checks them in one pass.

What comes out is what the model alone would give: the same tokens where it is greedy, draws from the same distribution
where it isn't (`ops.speculation`). A pass over a few tokens costs little more than one over a single token wherever
reading the weights takes the time, so that every guess that holds is nearly free.
"""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from transformer import axes as ax
from transformer import sharding
from transformer.generation import decode
from transformer.generation.decode import MAX_STEPS, NOTHING, Drawn, Plan, State
from transformer.generation.drafts import Draft
from transformer.nn.model import Transformer
from transformer.ops import cache as caches
from transformer.ops import speculation
from transformer.ops.cache import StackCache
from transformer.ops.sampling import Method, filter_logits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Progress:
    """What the next round needs to know of a batch; K guesses a round, T = K + 1.

    Attributes:
      target: the model's, as plain decoding has it.
      draft: the draft's cache, of all tokens but the new ones.
      tokens, positions: [B, T] new tokens of each row, padded on the right; the last of them is the row's last.
      before: [B, T, D] the model's features that foretold each of them.
    """

    target: State
    draft: StackCache
    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    before: Float[Array, "B T D"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tally:
    """Sums over the rounds of a call: passes of the model, rounds of all rows, and tokens guessed, kept and drawn."""

    passes: Int[Array, ""]
    rounds: Int[Array, ""]
    guessed: Int[Array, ""]
    kept: Int[Array, ""]
    drawn: Int[Array, ""]


@functools.partial(jax.jit, static_argnames=("model", "draft", "plan"))
def prefill(
    model: Transformer,
    params: dict,
    draft: Draft,
    draft_params: dict,
    prompts: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    left: Int[Array, " B"],
    seeds: UInt[Array, "B 3"],
    ends: Int[Array, " E"],
    method: Method,
    plan: Plan,
) -> tuple[Progress, Drawn]:
    """`decode.prefill` by model and draft; `plan.slack` is the number of guesses a round."""
    index = jnp.arange(prompts.shape[1], dtype=jnp.int32)
    positions = jnp.where(index < lengths[:, None], index, -1)
    cache = caches.init(model.spec.decoder, prompts.shape[0], plan.capacity, plan.cache_dtype, plan.slack)
    x, cache = decode.features(model, params, prompts, positions, cache, fresh=True)
    keys = jax.vmap(decode.row_key)(seeds)
    state = State(cache=cache, tokens=jnp.zeros_like(lengths), positions=lengths - 1, left=left, keys=keys)
    before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    cache = draft.init(prompts.shape[0], plan)
    _, cache = draft.read(draft_params, prompts, positions, before, cache, fresh=True)
    x = decode.last(x, lengths)
    state, tokens, logprobs = decode.draw(model, params, x, state, ends, method)
    spare = (0, plan.slack)
    progress = Progress(
        target=state,
        draft=cache,
        tokens=jnp.pad(state.tokens[:, None], ((0, 0), spare)),
        positions=jnp.pad(state.positions[:, None], ((0, 0), spare), constant_values=-1),
        before=jnp.pad(x, ((0, 0), spare, (0, 0))),
    )
    return _pin(model, draft, progress), decode.replicate(model, Drawn(tokens[:, None], logprobs[:, None]))


@functools.partial(jax.jit, static_argnames=("model", "draft", "plan"), donate_argnames="progress")
def run(
    model: Transformer,
    params: dict,
    draft: Draft,
    draft_params: dict,
    progress: Progress,
    rounds: Int[Array, ""],
    ends: Int[Array, " E"],
    method: Method,
    plan: Plan,
) -> tuple[Progress, Drawn, Tally]:
    """Up to `rounds` <= MAX_STEPS // T rounds (at least 1), fewer when every row ends before; `progress` is used up.

    The tokens of a row are in order, with `NOTHING` wherever a round drew fewer than T.
    """
    width = plan.slack + 1

    def more(carry):
        number, progress, *_ = carry
        return (number < rounds) & jnp.any(progress.target.left > 0)

    def advance(carry):
        number, progress, drawn, tally = carry
        progress, new, count = _round(model, params, draft, draft_params, progress, ends, method, plan)
        drawn = jax.tree.map(lambda all_, x: jax.lax.dynamic_update_slice(all_, x, (0, number * width)), drawn, new)
        return number + 1, progress, drawn, jax.tree.map(jnp.add, tally, count)

    shape = (progress.tokens.shape[0], max(MAX_STEPS // width, 1) * width)
    drawn = Drawn(jnp.full(shape, NOTHING, jnp.int32), jnp.zeros(shape, jnp.float32))
    tally = Tally(*[jnp.int32(0)] * len(dataclasses.fields(Tally)))
    _, progress, drawn, tally = jax.lax.while_loop(more, advance, (jnp.int32(0), progress, drawn, tally))
    return _pin(model, draft, progress), decode.replicate(model, drawn), tally


def _round(
    model, params: dict, draft: Draft, draft_params: dict, progress: Progress, ends: Array, method: Method, plan: Plan
):
    """The progress after one more round, the [B, T] tokens that it drew, and its tally."""
    state, count = progress.target, plan.slack
    index = jnp.arange(count + 1, dtype=jnp.int32)
    # A row's input i is of use while i < left: later ones would be beyond the cache, or beyond a table of positions.
    inputs = jnp.where(index < state.left[:, None], state.positions[:, None] + index, -1)
    guesses, guess_logits, cache = _guess(draft, draft_params, progress, inputs, method, plan)
    tokens = jnp.concatenate([state.tokens[:, None], guesses], axis=1)
    x, target_cache = decode.features(model, params, tokens, inputs, state.cache)
    logits = model.apply({"params": params}, x, method="logits")
    room = jnp.minimum(state.left, count)
    kept, after = _verify(logits, guesses, guess_logits, room, state, method)

    tokens = jnp.where(index == kept[:, None], after[:, None], jnp.pad(guesses, ((0, 0), (0, 1))))
    drawn = jnp.minimum(kept + 1, state.left)
    end = jnp.isin(tokens, ends) & (index < drawn[:, None])
    ended = jnp.any(end, axis=1)
    drawn = jnp.where(ended, jnp.argmax(end, axis=1) + 1, drawn)
    new = index < drawn[:, None]
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    logprobs = chosen - jax.nn.logsumexp(logits, axis=-1)

    positions = state.positions + drawn
    last = jnp.take_along_axis(tokens, jnp.maximum(drawn - 1, 0)[:, None], axis=1)[:, 0]
    state = dataclasses.replace(
        state,
        cache=target_cache.drop(positions),
        tokens=last,
        positions=positions,
        left=jnp.where(ended, 0, state.left - drawn),
    )
    progress = Progress(
        target=state,
        draft=draft.forget(cache, progress.target.positions + 1),
        tokens=tokens,
        positions=jnp.where(new, progress.target.positions[:, None] + 1 + index, -1),
        before=x,
    )
    tally = Tally(
        passes=jnp.int32(1),
        rounds=jnp.sum(drawn > 0, dtype=jnp.int32),
        guessed=jnp.sum(room, dtype=jnp.int32),
        kept=jnp.sum(jnp.minimum(kept, drawn), dtype=jnp.int32),
        drawn=jnp.sum(drawn, dtype=jnp.int32),
    )
    return progress, Drawn(jnp.where(new, tokens, NOTHING), logprobs), tally


def _guess(draft: Draft, params: dict, progress: Progress, inputs: Int[Array, "B T"], method: Method, plan: Plan):
    """(guesses [B, K], the filtered logits that they were drawn from or None, the draft's cache)."""
    state, greedy = progress.target, method.temperature is None
    x, cache = draft.read(params, progress.tokens, progress.positions, progress.before, progress.draft)
    x = decode.last(x, jnp.sum(progress.positions >= 0, axis=1))
    steps = jnp.arange(plan.slack, dtype=jnp.int32)
    keys = None if greedy else speculation.stream(state.keys, state.positions[:, None] + 1 + steps, "guess").T

    def choose(x, keys):
        logits = draft.model.apply({"params": params}, x, method="logits")[:, 0]
        logits = logits if greedy else filter_logits(logits, method)
        return speculation.guess(logits, keys), None if greedy else logits

    def step(carry, given):
        x, cache, token = carry
        positions, keys = given
        x, cache = draft.read(params, token[:, None], positions[:, None], x, cache)
        token, logits = choose(x, keys)
        return (x, cache, token), (token, logits)

    first = choose(x, None if greedy else keys[0])
    given = inputs.T[1:-1], None if greedy else keys[1:]
    (_, cache, _), rest = jax.lax.scan(step, (x, cache, first[0]), given)
    guesses, logits = jax.tree.map(lambda one, more: jnp.concatenate([one[None], more]).swapaxes(0, 1), first, rest)
    return guesses, logits, cache


def _verify(logits: Float[Array, "B T V"], guesses, guess_logits, room, state: State, method: Method):
    if method.temperature is None:
        return speculation.verify_greedy(logits, guesses, room)
    likely = filter_logits(logits.reshape(-1, logits.shape[-1]), method).reshape(logits.shape)
    positions = state.positions[:, None] + 1 + jnp.arange(logits.shape[1], dtype=jnp.int32)
    accept = speculation.stream(state.keys, positions[:, :-1], "accept")
    replace = speculation.stream(state.keys, positions, "replace")
    return speculation.verify(likely, guesses, guess_logits, room, accept, replace)


def _pin(model: Transformer, draft: Draft, progress: Progress) -> Progress:
    """`decode.pin` for all of a batch's progress."""
    rules = model.compute.rules
    return Progress(
        target=decode.pin(model, progress.target),
        draft=decode.pin_cache(draft.model, progress.draft),
        tokens=sharding.constrain(progress.tokens, (ax.BATCH, ax.LENGTH), rules),
        positions=sharding.constrain(progress.positions, (ax.BATCH, ax.LENGTH), rules),
        before=sharding.constrain(progress.before, (ax.BATCH, ax.LENGTH, ax.ACT_EMBED), rules),
    )
