"""The one predicate that says who may look at whom."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from transformer.spec import Mask


def visible(
    mask: Mask,
    q_positions: Int[Array, "*B T"],
    k_positions: Int[Array, "*B S"],
    q_segments: Int[Array, "*B T"] | None = None,
    k_segments: Int[Array, "*B S"] | None = None,
    q_orders: Int[Array, "*B T"] | None = None,
    k_orders: Int[Array, "*B S"] | None = None,
) -> Bool[Array, "*B T S"]:
    """True where a query may look at a key.

    Positions are absolute; a negative one marks padding or an empty cache slot: such keys are never seen and
    such queries see nothing. Segments (packed documents) see only their own. Orders replace positions in the question
    of what comes later: tokens of one order see each other, as a prefix that is read in both directions does.
    """

    def rows(x):
        return None if x is None else x[..., :, None]

    def columns(x):
        return None if x is None else x[..., None, :]

    return sees(
        mask,
        rows(q_positions), columns(k_positions),
        rows(q_segments), columns(k_segments),
        rows(q_orders), columns(k_orders),
    )  # fmt: skip


def sees(
    mask: Mask,
    q: Int[Array, "*#P"],
    k: Int[Array, "*#P"],
    q_segments: Int[Array, "*#P"] | None = None,
    k_segments: Int[Array, "*#P"] | None = None,
    q_orders: Int[Array, "*#P"] | None = None,
    k_orders: Int[Array, "*#P"] | None = None,
) -> Bool[Array, "*P"]:
    """`visible` of pairs: positions, segments and orders of queries and keys that broadcast against each other."""
    seen = (q >= 0) & (k >= 0)
    if mask.causal:
        if q_orders is None or k_orders is None:
            seen &= k <= q
        else:
            seen &= k_orders <= q_orders
    if mask.window is not None:
        near = jnp.abs(q - k) < mask.window
        seen &= near | (k < mask.sinks) if mask.sinks else near
    if q_segments is not None and k_segments is not None:
        seen &= q_segments == k_segments
    return seen
