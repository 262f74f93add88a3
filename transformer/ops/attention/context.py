"""Attention where the mesh splits rows along their length: every device keeps its queries, and keys come to them.

Three ways, exact all of them; whichever body computes, it does so on each device by itself:

- `gather`: all keys at once, whose gradients are scattered back. Memory grows with S.
- `ring`: the keys of one device after the other, handed on while they are being worked on (Liu et al. 2023, Ring
  Attention, arXiv:2310.01889). Partial results are merged by the log of their denominators; on the way back, the
  gradients of keys travel with their keys.
- `tails`: of a window, only the rows just before each chunk that a device holds, or just after.

Positions, segments and orders travel with their keys, so that `ops.mask.visible` alone says who sees whom.
"""

import dataclasses
import functools
import logging
from types import ModuleType
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from transformer import axes as ax
from transformer.ops.attention.call import Call, Extra, Where, deltas, gradients_of_extra
from transformer.ops.attention.places import Places
from transformer.sharding import mesh_axes
from transformer.spec import Mask

log = logging.getLogger(__name__)

Fields = tuple[Int[Array, "B S"], Int[Array, "B S"] | None, Int[Array, "B S"] | None]


class Plan(NamedTuple):
    """The static part: what keys do, and who attends to them.

    Attributes:
      body: a module of this package, with `forward` and `gradients`.
      axis: the mesh axis that splits rows.
      hops: of `ring`, how many devices further keys travel.
      ahead: of `tails`, whether rows just after a chunk are visible, too.
    """

    body: ModuleType
    call: Call
    axis: str
    how: Literal["gather", "ring", "tails"]
    hops: int = 0
    ahead: bool = False

    @property
    def away(self) -> Call:
        """The call to other keys, to which row indices say nothing."""
        return dataclasses.replace(self.call, aligned=False)


def attend(
    body: ModuleType,
    call: Call,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    where: Where,
    extra: Extra,
) -> Float[Array, "B T N Hv"]:
    """`body.attend` on a mesh that splits T and S.

    Raises:
      ShardingError: the mesh can't split the batch, the heads or the lengths.
    """
    return _attend(plan(body, call, k.shape[1], where), q, k, v, where, extra)


def plan(body: ModuleType, call: Call, k_length: int, where: Where) -> Plan:
    """What `call.exchange` stands for in this call; "auto" logs its choice once.

    A window that ends within the chunk before takes tails, everything else the ring, which ends where a window does.
    """
    mesh, mask = jax.sharding.get_abstract_mesh(), call.mask
    (axis,) = mesh_axes(ax.LENGTH, mesh, call.rules)
    if call.exchange == "gather":
        return Plan(body, call, axis, "gather")
    # Rows bound positions only where queries and keys are the same tokens; sinks lie anywhere.
    bounded = call.aligned and mask.window is not None and not mask.sinks
    reach = mask.window - 1 if bounded else k_length
    ahead = not mask.causal or where.q_orders is not None
    ways = mesh.shape[axis]
    chunk = k_length // (ways * (1 + where.zigzag))
    chosen = Plan(body, call, axis, "ring", hops=min(ways - 1, -(-reach // chunk)))
    if reach and (ahead or where.zigzag):  # what lies near is not a few devices back alone
        chosen = chosen._replace(hops=ways - 1)
    if call.exchange == "auto":
        if 0 < reach <= chunk and not (ahead and where.zigzag):
            chosen = Plan(body, call, axis, "tails", ahead=ahead)
        _log_choice(chosen.how, mask, ways)
    return chosen


@functools.cache
def _log_choice(how: str, mask: Mask, ways: int) -> None:
    log.info("context_attention=auto: %s over %d devices for %s", how, ways, mask)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, q: Array, k: Array, v: Array, where: Where, extra: Extra) -> Array:
    return _save(plan, q, k, v, where, extra)[0]


def _save(plan: Plan, q: Array, k: Array, v: Array, where: Where, extra: Extra):
    at = Places.of(plan.call, q, k, where)
    inputs = at.queries, at.keys, at.keys, at.rows, at.extra(extra)
    run = _on_each_device(_ring if plan.how == "ring" else _at_once, plan, inputs, (at.queries, at.totals))
    out, log_total = (checkpoint_name(x, "attended") for x in run(q, k, v, where, extra))
    return out, (q, k, v, where, extra, out, log_total)


def _backward(plan: Plan, saved, d_out: Array):
    q, k, v, where, extra, out, log_total = saved
    at, delta = Places.of(plan.call, q, k, where), deltas(out, d_out)
    inputs = at.queries, at.keys, at.keys, at.rows, at.extra(extra), at.queries, at.totals, at.totals
    outputs = at.queries, at.keys, at.keys, at.table_gradient(extra)
    run = _on_each_device(_ring_back if plan.how == "ring" else _back_at_once, plan, inputs, outputs)
    dq, dk, dv, d_table = run(q, k, v, where, extra, d_out, log_total, delta)
    return dq, dk, dv, None, gradients_of_extra(extra, log_total, delta, d_table)


_attend.defvjp(_save, _backward)


def _on_each_device(run, plan: Plan, inputs: tuple, outputs: tuple):
    # What kernels make of their inputs the types of `shard_map` can't tell.
    return jax.shard_map(functools.partial(run, plan), in_specs=inputs, out_specs=outputs, check_vma=plan.body.TYPED)


def _keys(where: Where) -> Fields:
    return where.k_positions, where.k_segments, where.k_orders


def _seeing(where: Where, fields: Fields) -> Where:
    """Of the same queries, and other keys."""
    positions, segments, orders = fields
    return dataclasses.replace(where, k_positions=positions, k_segments=segments, k_orders=orders)


# All keys at once.


def _at_once(plan: Plan, q: Array, k: Array, v: Array, where: Where, extra: Extra) -> tuple[Array, Array]:
    k, v = _brought(plan, where, (k, v))
    return plan.body.forward(plan.away, q, k, v, _with_brought(plan, where), extra)


def _back_at_once(plan: Plan, q, k, v, where: Where, extra: Extra, d_out, log_total, delta):
    (k, v), send_back = jax.vjp(functools.partial(_brought, plan, where), (k, v))
    there = _with_brought(plan, where)
    dq, dk, dv, d_table = plan.body.gradients(plan.away, q, k, v, there, extra, d_out, log_total, delta)
    ((dk, dv),) = send_back((dk, dv))
    return dq, dk, dv, _summed(plan, d_table)


def _summed(plan: Plan, d_table: Array | None) -> Array | None:
    """Queries of all devices read the table."""
    return None if d_table is None else jax.lax.psum(d_table, plan.axis)


def _with_brought(plan: Plan, where: Where) -> Where:
    # Nothing comes from beyond a row's ends. A message that nobody sends is 0, and so 0 must mean that nobody is there.
    moved = tuple(None if x is None else x + 1 for x in _keys(where))
    brought = _brought(plan, where, moved)
    return _seeing(where, tuple(None if x is None else x - 1 for x in brought))


def _brought[T](plan: Plan, where: Where, tree: T) -> T:
    """[B, s, …] of this device's keys to [B, S, …] of all that its queries may see."""
    if plan.how == "gather":
        return jax.tree.map(lambda x: jax.lax.all_gather(x, plan.axis, axis=1, tiled=True), tree)
    reach = plan.call.mask.window - 1
    bring = _with_tails_of_chunks if where.zigzag else functools.partial(_with_tails, ahead=plan.ahead)
    return jax.tree.map(functools.partial(bring, plan.axis, reach), tree)


def _with_tails(axis: str, reach: int, x: Array, ahead: bool) -> Array:
    """Rows of the device before, and of the one behind if these are visible, around this device's own."""
    ways = jax.lax.axis_size(axis)
    on, back = [(i, i + 1) for i in range(ways - 1)], [(i + 1, i) for i in range(ways - 1)]
    parts = [jax.lax.ppermute(x[:, -reach:], axis, on), x]
    if ahead:
        parts.append(jax.lax.ppermute(x[:, :reach], axis, back))
    return jnp.concatenate(parts, axis=1)


def _with_tails_of_chunks(axis: str, reach: int, x: Array) -> Array:
    """In zig-zag order: each of a device's two chunks behind the last rows of the chunk before."""
    ways = jax.lax.axis_size(axis)
    first, second = jnp.split(x, 2, axis=1)
    tails = first[:, -reach:], second[:, -reach:]
    # First chunks go up from device to device and second ones down. The last device's second one follows its own first.
    before_first = jax.lax.ppermute(tails[0], axis, [(i, i + 1) for i in range(ways - 1)])
    before_second = jax.lax.ppermute(tails[1], axis, [(i + 1, i) for i in range(ways - 1)])
    return jnp.concatenate([before_first, first, before_second, second], axis=1)


# The keys of one device after the other.


def _sent[T](plan: Plan, tree: T, by: int = 1) -> T:
    """Handed to the device so many places further round."""
    ways = jax.lax.axis_size(plan.axis)
    pairs = [(i, (i + by) % ways) for i in range(ways)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, plan.axis, pairs), tree)


def _ring(plan: Plan, q: Array, k: Array, v: Array, where: Where, extra: Extra) -> tuple[Array, Array]:
    guests = k, v, _keys(where)
    more = dataclasses.replace(extra, sinks=None)  # they count once

    def visited(done, guests):
        k, v, fields = guests
        return _merged(done, plan.body.forward(plan.away, q, k, v, _seeing(where, fields), more))

    def step(carry, _):
        done, guests = carry
        # Neither needs the other: keys travel while their copies are being worked on.
        return (visited(done, guests), _sent(plan, guests)), None

    guests = _sent(plan, guests) if plan.hops else None
    out, log_total = plan.body.forward(plan.call, q, k, v, where, extra)
    done = out.astype(jnp.float32), log_total
    if plan.hops:
        (done, guests), _ = jax.lax.scan(step, (done, guests), length=plan.hops - 1)
        done = visited(done, guests)
    out, log_total = done
    return out.astype(q.dtype), log_total


def _merged(done: tuple[Array, Array], more: tuple[Array, Array]) -> tuple[Array, Array]:
    """Attention to two sets of keys, from attention to each [B, T, N, H] and the logs of the denominators [B, N, T]."""
    log_total = jnp.logaddexp(done[1], more[1])
    shares = (jnp.swapaxes(jnp.exp(part - log_total), 1, 2)[..., None] for _, part in (done, more))
    return sum(out * share for (out, _), share in zip((done, more), shares, strict=True)), log_total


def _ring_back(plan: Plan, q, k, v, where: Where, extra: Extra, d_out, log_total, delta):
    def of(call: Call, k: Array, v: Array, fields: Fields):
        places = q, k, v, _seeing(where, fields), extra
        dq, dk, dv, d_table = plan.body.gradients(call, *places, d_out, log_total, delta)
        return jax.tree.map(lambda x: x.astype(jnp.float32), ((dq, d_table), (dk, dv)))

    def visited(sums, guests, gifts):
        return jax.tree.map(jnp.add, (sums, gifts), of(plan.away, *guests))

    def step(carry, _):
        sums, guests, gifts = carry
        sums, gifts = visited(sums, guests, gifts)
        return (sums, *_sent(plan, (guests, gifts))), None

    guests = k, v, _keys(where)
    guests_after = _sent(plan, guests) if plan.hops else None
    sums, own = of(plan.call, *guests)
    if plan.hops:
        gifts = jax.tree.map(jnp.zeros_like, own)
        (sums, guests, gifts), _ = jax.lax.scan(step, (sums, guests_after, gifts), length=plan.hops - 1)
        sums, gifts = visited(sums, guests, gifts)
        # Home in one message.
        own = jax.tree.map(jnp.add, own, _sent(plan, gifts, by=-plan.hops))
    (dq, d_table), (dk, dv) = sums, own
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), _summed(plan, d_table)


__all__ = ["attend", "plan"]
