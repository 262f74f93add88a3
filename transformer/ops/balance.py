"""How evenly experts are used: what to measure of a routing, and what keeps it even."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer import axes as ax
from transformer.sharding import constrain
from transformer.spec import Router


class Load(NamedTuple):
    """Sums over the tokens that one layer routed, padding excluded; they add up over microbatches and batches.

    Attributes:
      picks: assignments of each expert.
      probability: of each expert, as the router sees it.
      z: squared log of the softmax denominator (the z-loss of ST-MoE, arXiv:2202.08906, equation 5).
      sequence: the balance loss of each token's document (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
      entropy: of the probabilities, in nats.
      dropped: assignments that no slot was left for.
    """

    tokens: Float[Array, "*L"]
    picks: Float[Array, "*L E"]
    probability: Float[Array, "*L E"]
    z: Float[Array, "*L"]
    sequence: Float[Array, "*L"]
    entropy: Float[Array, "*L"]
    dropped: Float[Array, "*L"]


def probabilities(router: Router, logits: Float[Array, "*B E"]) -> Float[Array, "*B E"]:
    """What the balance losses weigh: scores that sum to one, over all experts; float32."""
    logits = logits.astype(jnp.float32)
    if router.score == "sigmoid":
        scores = jax.nn.sigmoid(logits)
        return scores / jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    return jax.nn.softmax(logits, axis=-1)


def measure(
    logits: Float[Array, "B T E"],
    probability: Float[Array, "B T E"],
    index: Int[Array, "B T k"],
    real: Bool[Array, "B T"],
    segments: Int[Array, "B T"] | None,
    dropped: Float[Array, ""],
    rules: str = "default",
) -> Load:
    """The sums of one layer.

    Args:
      index: experts picked.
      real: False in padding, which is counted nowhere.
      segments: documents of a row, each in one piece; None: a row is one.
      rules: where the mesh holds the tokens.
    """
    counted = real.astype(jnp.float32)
    picked = jnp.any(index[..., None] == jnp.arange(logits.shape[-1]), axis=-2) * counted[..., None]
    share = _share_in_document(picked, counted, segments) / index.shape[-1]
    # It waits for the backward pass: unless told, the compiler keeps all of it on every device.
    share = constrain(share, (ax.BATCH, ax.LENGTH, None), rules)
    entropy = -jnp.sum(jax.scipy.special.xlogy(probability, probability), axis=-1)
    return Load(
        tokens=jnp.sum(counted),
        picks=jnp.sum(picked, axis=(0, 1)),
        probability=jnp.sum(probability * counted[..., None], axis=(0, 1)),
        z=jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)) * counted),
        sequence=jnp.sum(logits.shape[-1] * jnp.sum(share * probability, axis=-1) * counted),
        entropy=jnp.sum(entropy * counted),
        dropped=dropped,
    )


def _share_in_document(
    picked: Float[Array, "B T E"], counted: Float[Array, "B T"], segments: Int[Array, "B T"] | None
) -> Float[Array, "B T E"]:
    """How often an expert was picked in the document of each token, a token of it."""
    length = counted.shape[1]
    column = jnp.arange(length)
    if segments is None:
        first, last = jnp.zeros_like(counted, jnp.int32), jnp.full_like(counted, length, jnp.int32)
    else:
        edge = jnp.diff(segments, axis=1) != 0
        one = jnp.ones_like(edge[:, :1])
        first = jax.lax.cummax(jnp.where(jnp.concatenate([one, edge], axis=1), column, 0), axis=1)
        last = jax.lax.cummin(jnp.where(jnp.concatenate([edge, one], axis=1), column + 1, length), axis=1, reverse=True)

    def within(x: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        total = jnp.pad(jnp.cumsum(x, axis=1), ((0, 0), (1, 0), (0, 0)))
        until, before = (jnp.take_along_axis(total, where[..., None], axis=1) for where in (last, first))
        return until - before

    return within(picked) / jnp.maximum(within(counted[..., None]), 1)


def shares(picks: Float[Array, "*L E"]) -> Float[Array, "*L E"]:
    """Each expert's part of the assignments."""
    return picks / jnp.maximum(jnp.sum(picks, axis=-1, keepdims=True), 1)


def auxiliary(load: Load, share: Float[Array, "*L E"]) -> Float[Array, "*L"]:
    """The auxiliary loss of GShard and Switch (arXiv:2101.03961, equation 4), summed over the tokens of `load`.

    Args:
      share: of the assignments of the whole batch, of which `load` may be a part: the loss is linear in what is left,
        so that parts add up to the whole.
    """
    return share.shape[-1] * jnp.sum(jax.lax.stop_gradient(share) * load.probability, axis=-1)


def corrected(correction: Float[Array, "*L E"], picks: Float[Array, "*L E"], rate: float) -> Float[Array, "*L E"]:
    """The correction after one step of loss-free balancing (arXiv:2408.15664, algorithm 1): up where too few came."""
    return correction + rate * jnp.sign(jnp.mean(picks, axis=-1, keepdims=True) - picks)


def summary(load: Load) -> dict[str, Array]:
    """What to log of each layer: share of each expert, the largest over the mean, entropy in nats, fraction dropped."""
    share = shares(load.picks)
    return {
        "share": share,
        "violation": jnp.max(share, axis=-1) * share.shape[-1],
        "entropy": load.entropy / jnp.maximum(load.tokens, 1),
        "dropped": load.dropped / jnp.maximum(jnp.sum(load.picks, axis=-1), 1),
    }
