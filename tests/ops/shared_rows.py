"""A cache's layout, told once more: tokens 32 slots apart share a row."""

import jax.numpy as jnp


def shared(x, count: int):
    """[…, S, H] as rows of `count` tokens [… , S / count, count · H]."""
    *lead, slots, width = x.shape
    groups = x.reshape(*lead, slots // (32 * count), count, 32, width)
    return jnp.moveaxis(groups, -3, -2).reshape(*lead, slots // count, count * width)
