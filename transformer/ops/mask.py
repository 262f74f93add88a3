"""The one predicate that says who may look at whom."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from transformer.spec import Mask

# The log of the softmax's denominator where a query sees nothing: far below that of any that does, and so far above
# masked scores that these still weigh 0 against it.
BLIND = -1e20


def visible(
    mask: Mask,
    q_positions: Int[Array, "*B T"],
    k_positions: Int[Array, "*B S"],
    q_segments: Int[Array, "*B T"] | None = None,
    k_segments: Int[Array, "*B S"] | None = None,
    q_orders: Int[Array, "*B T"] | None = None,
    k_orders: Int[Array, "*B S"] | None = None,
) -> Bool[Array, "*B T S"]:
    """True where a query may look at a key: `sees`, of every query and every key."""

    def queries(x):
        return None if x is None else x[..., :, None]

    def keys(x):
        return None if x is None else x[..., None, :]

    q, k = (queries(q_positions), keys(k_positions)), (queries(q_segments), keys(k_segments))
    return sees(mask, *q, *k, queries(q_orders), keys(k_orders))


def sees(
    mask: Mask,
    q: Int[Array, "..."],
    k: Int[Array, "..."],
    q_segment: Int[Array, "..."] | None = None,
    k_segment: Int[Array, "..."] | None = None,
    q_order: Int[Array, "..."] | None = None,
    k_order: Int[Array, "..."] | None = None,
) -> Bool[Array, "..."]:
    """True where the query at position q may look at the key at position k; shapes broadcast.

    Positions are absolute; a negative one marks padding or an empty cache slot: such keys are never seen and
    such queries see nothing. Segments (packed documents) see only their own. Orders replace positions in the question
    of what comes later: tokens of one order see each other, as a prefix that is read in both directions does.
    """
    seen = (q >= 0) & (k >= 0)
    if mask.causal:
        seen &= k <= q if q_order is None or k_order is None else k_order <= q_order
    if mask.window is not None:
        near = jnp.abs(q - k) < mask.window
        seen &= near | (k < mask.sinks) if mask.sinks else near
    if q_segment is not None and k_segment is not None:
        seen &= q_segment == k_segment
    return seen
