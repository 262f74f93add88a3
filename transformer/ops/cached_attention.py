"""Attention to what a cache holds: one door, by the kernel that reads the cache where it lies or by XLA.

XLA reads the layer in view as [B, S, K, H] in the compute dtype, and any attention body takes it from there.
"""

import dataclasses
import functools
import logging
from typing import Literal

import jax
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float

from transformer import axes as ax
from transformer.kernels import decode
from transformer.ops import attention
from transformer.ops.attention import Call, Extra, Where
from transformer.ops.attention.call import NOTHING
from transformer.ops.cache import KVCache
from transformer.sharding import partition_spec, platform

log = logging.getLogger(__name__)

# With more queries the scores no longer hide behind the cache, and a body that blocks queries too is better.
MOST_QUERIES = 16


def attend(
    how: Literal["auto", "xla", "kernel"],
    body: str,
    call: Call,
    q: Float[Array, "B T N H"],
    cache: KVCache,
    where: Where,
    extra: Extra = NOTHING,
    value_dim: int | None = None,
    rules: str = "default",
) -> Float[Array, "B T N Hv"]:
    """Attention to the layer of a cache that is in view; `attention.attend` of what it holds.

    Args:
      how: what serves few queries: "kernel" (interpreted if there is no TPU), "xla", or "auto", which takes the kernel
        on a TPU where it can serve them, and logs its choice once. More than `MOST_QUERIES` always go through XLA.
      body: of `attention.attend`, for "xla".
      where: `k_positions` [B, S] are those of the cache's slots.
      value_dim: values are so many first features of the keys; None: the cache has values.
      rules: preset of `sharding.py`.

    Raises:
      ValueError: "kernel" can't serve the call; the message says why.
    """
    reason = None
    if q.shape[1] > MOST_QUERIES:
        how = "xla"
    elif how != "xla":
        reason = decode.refuse(call, q, cache, where, value_dim)
    if how == "auto":
        how = "kernel" if platform() == "tpu" and reason is None else "xla"
        _log_choice(how, platform(), reason)
    if how == "xla":
        return read_and_attend(body, call, q, cache, where, extra, value_dim)
    if reason:
        raise ValueError(f'compute.decode_attention="kernel": {reason}; use "auto" or "xla"')
    run = functools.partial(decode.attend, call, value_dim=value_dim, interpret=platform() != "tpu")
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return run(q, cache, where, extra)
    places = _places(q, cache, where, extra, mesh, rules)
    # What a kernel makes of its inputs the types of `shard_map` can't tell; each device has all that its output needs.
    return jax.shard_map(run, in_specs=places, out_specs=places[0], check_vma=False)(q, cache, where, extra)


def read_and_attend(
    body: str,
    call: Call,
    q: Float[Array, "B T N H"],
    cache: KVCache,
    where: Where,
    extra: Extra = NOTHING,
    value_dim: int | None = None,
) -> Float[Array, "B T N Hv"]:
    """`attend` without a kernel of its own."""
    keys, values, _ = cache.read(q.dtype)
    if value_dim is None:
        return attention.attend(body, call, q, keys, values, where, extra)
    # Cut out afterwards: cut out before, the values would be a copy of the cache.
    return attention.attend(body, call, q, keys, keys, where, extra)[..., :value_dim]


@functools.cache
def _log_choice(name: str, platform: str, reason: str | None) -> None:
    if platform == "tpu":  # elsewhere there is nothing to choose
        log.info("decode_attention=auto: %s on %s%s", name, platform, f": {reason}" if reason else "")


def _places(q: Array, cache: KVCache, where: Where, extra: Extra, mesh: AbstractMesh, rules: str) -> tuple:
    """How the mesh splits the arguments: rows, and heads with their queries.

    A single key head, which all queries read, is whole on every device.
    """
    heads = cache.keys.shape[-3]
    kv = None if heads == 1 else ax.ACT_HEADS
    slots = (*(None,) * (cache.positions.ndim - 2), ax.BATCH, kv, None)
    names = {"keys": (*slots, None), "values": (*slots, None), "key_scales": slots, "value_scales": slots}
    names |= {"positions": (*slots[:-2], None), "layer": ()}

    def place(axes, array) -> PartitionSpec | None:
        return None if array is None else partition_spec(axes, array.shape, mesh, rules, "cached attention")

    row = (ax.BATCH, None)
    return (
        place((ax.BATCH, None, ax.ACT_HEADS, None), q),
        dataclasses.replace(cache, **{name: place(axes, getattr(cache, name)) for name, axes in names.items()}),
        jax.tree.map(lambda array: place(row, array), where),
        Extra(place((ax.ACT_HEADS,), extra.sinks), place((None, ax.ACT_HEADS), extra.bias)),
    )


__all__ = ["attend", "read_and_attend"]
