"""Which steps count: one whose loss or gradient is not finite changes nothing but the counts kept here."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int

# Of the running mean and variance of the loss: what a step leaves of them.
DECAY = 0.98
# Losses after which a spike can be told.
ENOUGH = 50


class SkippedError(RuntimeError):
    """So many steps in a row were skipped that going on is no use."""


class Health(struct.PyTreeNode):
    """What is remembered of earlier steps.

    Attributes:
      skipped: steps skipped in all.
      in_a_row: those since the last that counted.
      mean, variance: running ones, of the losses of steps that counted.
      seen: how many those were.
    """

    skipped: Int[Array, ""]
    in_a_row: Int[Array, ""]
    mean: Float[Array, ""]
    variance: Float[Array, ""]
    seen: Int[Array, ""]


def start() -> Health:
    """Of a run that begins."""
    return Health(*(jnp.zeros((), kind) for kind in (jnp.int32, jnp.int32, jnp.float32, jnp.float32, jnp.int32)))


def judge(
    health: Health, loss: Float[Array, ""], grad_norm: Float[Array, ""], spike: float
) -> tuple[Bool[Array, ""], Health]:
    """Whether a step counts.

    Args:
      spike: standard deviations above the running mean of the loss from which on a step is skipped; 0: none is.
    """
    counts = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if spike:
        limit = health.mean + spike * jnp.sqrt(health.variance)
        counts &= (health.seen < ENOUGH) | (loss <= limit)
    # Plain means until there are enough losses for running ones.
    share = jnp.maximum(1 - DECAY, 1 / (health.seen + 1.0))
    away = loss - health.mean
    seen = Health(
        skipped=health.skipped,
        in_a_row=jnp.zeros_like(health.in_a_row),
        mean=health.mean + share * away,
        variance=(1 - share) * (health.variance + share * away**2),
        seen=health.seen + 1,
    )
    missed = health.replace(skipped=health.skipped + 1, in_a_row=health.in_a_row + 1)
    return counts, jax.tree.map(lambda new, old: jnp.where(counts, new, old), seen, missed)


def chosen[T](counts: Bool[Array, ""], new: T, old: T) -> T:
    """`new` where the step counts, else `old`; integers, which count steps, are new."""

    def pick(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(counts, new, old) if jnp.issubdtype(new.dtype, jnp.floating) else new

    return jax.tree.map(pick, new, old)


def guarded(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`inner`, whose `update` takes `counts`: where that is False, updates are zero and the moments stay."""

    def update(grads: Any, state: Any, params: Any, *, counts: Bool[Array, ""] | bool = True) -> tuple[Any, Any]:
        updates, new = inner.update(grads, state, params)
        return jax.tree.map(lambda u: jnp.where(counts, u, 0), updates), chosen(counts, new, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def skips(last: int, values: dict[str, Any], limit: int, say: Callable[[str], None], step: int) -> int:
    """Tells of steps skipped since there were `last` of them; how many there are now.

    Raises:
      SkippedError: `limit` or more in a row.
    """
    skipped, in_a_row = int(values["skipped"]), int(values["skipped_in_a_row"])
    if skipped > last:
        say(
            f"step {step}: skipped {skipped - last} step(s) whose loss or gradient was not finite, or whose loss spiked"
        )
    if limit and in_a_row >= limit:
        raise SkippedError(
            f"step {step}: {in_a_row} steps in a row were skipped, since their loss or gradient was not finite or the "
            "loss spiked (train.stop_after_skipped). Checkpoints have the parameters of the last step that counted. "
            "Lower optimizer.peak_lr, look at the data, or raise train.spike"
        )
    return skipped
