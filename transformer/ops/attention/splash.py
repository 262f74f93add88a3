"""Attention by Pallas kernels for TPUs (`transformer.kernels.splash`); elsewhere they are interpreted, which is slow.

Block pairs are left out as in `blockwise`, but each row of a batch has its own list. On a mesh, every device runs the
kernels on its rows and heads.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from transformer.kernels import blocks as policy
from transformer.kernels import splash, splash_backward
from transformer.kernels.visits import Visits, visits
from transformer.ops.attention.blocks import block_size, cut_rows, pad, shown_blocks
from transformer.ops.attention.call import NOTHING, Call, Extra, Where, deltas, gradients_of_extra
from transformer.ops.attention.places import Places
from transformer.sharding import device_kind, platform

# Whether `shard_map` can tell on which devices its results differ.
TYPED = False


def refuse(call: Call) -> str | None:
    """On TPUs, blocks are whole registers of 128 lanes."""
    if platform() == "tpu" and call.block is not None and call.block % splash.LANES:
        return f"compute.attention_block={call.block}: on TPUs, use a multiple of {splash.LANES}, or None"
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    call: Call,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    where: Where,
    extra: Extra = NOTHING,
) -> Float[Array, "B T N Hv"]:
    """Attention in memory that grows with T + S, forward and backward.

    Raises:
      ValueError: an aligned call with T != S, or more block pairs than can be listed.
      ShardingError: the mesh in force can't split the batch or the heads.
    """
    return _save(call, q, k, v, where, extra)[0]


def _save(call: Call, q: Array, k: Array, v: Array, where: Where, extra: Extra):
    at = _places(call, q, k, where)
    inputs = at and (at.queries, at.keys, at.keys, at.rows, at.extra(extra))
    run = _on_each_device(forward, call, inputs, at and (at.queries, at.totals))
    out, log_total = (checkpoint_name(x, "attended") for x in run(q, k, v, where, extra))
    return out, (q, k, v, where, extra, out, log_total)


def _backward(call: Call, saved, d_out: Array):
    q, k, v, where, extra, out, log_total = saved
    at = _places(call, q, k, where)
    delta = deltas(out, d_out)
    inputs = at and (at.queries, at.keys, at.keys, at.rows, at.extra(extra), at.queries, at.totals, at.totals)
    outputs = at and (at.queries, at.keys, at.keys, at.table_gradient(extra))
    run = _on_each_device(gradients, call, inputs, outputs)
    dq, dk, dv, d_table = run(q, k, v, where, extra, d_out, log_total, delta)
    return dq, dk, dv, None, gradients_of_extra(extra, log_total, delta, d_table)


attend.defvjp(_save, _backward)


def _places(call: Call, q: Array, k: Array, where: Where) -> Places | None:
    """None where there is nothing to split."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else Places.of(call, q, k, where)


def _on_each_device(run: Callable, call: Call, inputs: tuple | None, outputs: tuple | None) -> Callable:
    """`run(call, ...)` on every device's rows and heads, or as it is without a mesh."""
    run = functools.partial(run, call)
    if inputs is None:
        return run
    # Interpreted kernels and walks of a length known at run time don't know along which axes devices differ.
    return jax.shard_map(run, in_specs=inputs, out_specs=outputs, check_vma=False)


def forward(call: Call, q: Array, k: Array, v: Array, where: Where, extra: Extra) -> tuple[Array, Array]:
    """The output [B, T, N, Hv], and each query's log of the softmax denominator [B, N, T], `BLIND` in the dark."""
    plan = _Plan.of(call, q, k, v, where, backward=False)
    sinks = None if extra.sinks is None else extra.sinks.astype(jnp.float32)
    inputs = *plan.features(q, k, v), plan.q_rows, plan.k_rows, sinks, _table(extra)
    out, log_total = splash.forward(plan.kernel, plan.walk(), *inputs)
    batch, length, heads, _ = q.shape
    return _joined(out, length), log_total.reshape(batch, heads, -1)[:, :, :length]


def gradients(call: Call, q, k, v, where: Where, extra: Extra, d_out, log_total, delta):
    """Of q, k and v, and of the table of biases in each row of the batch [B, N, R]."""
    plan = _Plan.of(call, q, k, v, where, backward=True)
    block = plan.kernel.q_block
    totals = (_as_rows(x, plan.groups, block) for x in (log_total, delta))
    rows = plan.q_rows, plan.k_rows
    features, d_out = plan.features(q, k, v), _by_group(d_out, plan.groups, block)
    inputs = splash_backward.Inputs(*features, *rows, _table(extra), d_out, *totals)
    dq, d_table = splash_backward.queries(plan.kernel, plan.walk(), inputs)
    dk, dv = splash_backward.keys_and_values(plan.kernel, plan.walk(key_major=True), inputs)
    if d_table is not None:
        d_table = jnp.sum(d_table, axis=(-2, -1)).reshape(q.shape[0], q.shape[2], -1)
    dk, dv = (_summed(d, like) for d, like in ((dk, k), (dv, v)))
    return _joined(dq, q.shape[1]), dk, dv, d_table


class _Plan(NamedTuple):
    """What a pass needs besides the features: the kernel, the fields of both sides' rows, and the pairs to visit."""

    kernel: splash.Splash
    groups: int  # of query heads; more than key heads where VMEM would not hold all that share one
    q_rows: Int[Array, "B F 1 T"]
    k_rows: Int[Array, "B F 1 S"]
    shown: Bool[np.ndarray, "q_blocks k_blocks"]
    bounded: Bool[Array, "B q_blocks k_blocks"] | None

    @staticmethod
    def of(call: Call, q: Array, k: Array, v: Array, where: Where, backward: bool) -> "_Plan":
        lengths = q.shape[1], k.shape[1]
        heads, dims, itemsize = q.shape[2] // k.shape[2], (q.shape[-1], v.shape[-1]), q.dtype.itemsize
        shape = policy.Shape(heads, *lengths, *dims, itemsize, call.relative.num_buckets if call.relative else 0)
        best = policy.choose(device_kind(), shape, call.mask, backward, call.block)
        sizes = [
            block_size(n, block, math.gcd(block, splash.LANES))
            for n, block in zip(lengths, (best.q, best.k), strict=True)
        ]
        shown, bounded = shown_blocks(call, *cut_rows(where, *sizes), lengths)
        sides = {
            "positions": (where.q_positions, where.k_positions),
            "segments": (where.q_segments, where.k_segments),
            "orders": (where.q_orders, where.k_orders),
        }
        sides = {name: side for name, side in sides.items() if side[0] is not None and side[1] is not None}
        fields = [
            jnp.stack([pad(side[i], sizes[i], -1 if name == "positions" else 0) for name, side in sides.items()], 1)
            for i in (0, 1)
        ]
        terms = call.mask, call.scale, call.softcap, call.relative, tuple(sides)
        kernel = splash.Splash(*terms, *sizes, best.vmem, interpret=platform() != "tpu")
        groups = q.shape[2] // best.heads
        return _Plan(kernel, groups, *(field[:, :, None] for field in fields), shown, bounded)

    def features(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        k_block = self.kernel.k_block
        return _by_group(q, self.groups, self.kernel.q_block), _by_head(k, k_block), _by_head(v, k_block)

    def walk(self, key_major: bool = False) -> Visits:
        if not key_major:
            return visits(self.shown, self.bounded)
        return visits(self.shown.T, None if self.bounded is None else jnp.swapaxes(self.bounded, 1, 2))


def _by_group(x: Float[Array, "B T N H"], groups: int, block: int) -> Float[Array, "B K G T H"]:
    """Heads before rows, of which blocks are whole."""
    x = pad(x, block)
    return jnp.transpose(x.reshape(*x.shape[:2], groups, -1, x.shape[-1]), (0, 2, 3, 1, 4))


def _by_head(x: Float[Array, "B S K H"], block: int) -> Float[Array, "B K S H"]:
    return jnp.swapaxes(pad(x, block), 1, 2)


def _as_rows(x: Float[Array, "B N T"], groups: int, block: int) -> Float[Array, "B K G 1 T"]:
    x = jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % block)])
    return x.reshape(x.shape[0], groups, -1, 1, x.shape[2])


def _joined(x: Float[Array, "B K G T H"], length: int) -> Float[Array, "B T N H"]:
    x = jnp.transpose(x[:, :, :, :length], (0, 3, 1, 2, 4))
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _summed(d: Float[Array, "B K S H"], like: Float[Array, "B S k H"]) -> Float[Array, "B S k H"]:
    """The gradient of keys or values from the parts of the groups that read them."""
    d = d.reshape(d.shape[0], like.shape[2], -1, *d.shape[2:])
    d = d[:, :, 0] if d.shape[2] == 1 else jnp.sum(d, axis=2)
    return jnp.swapaxes(d[:, :, : like.shape[1]], 1, 2).astype(like.dtype)


def _table(extra: Extra) -> Float[Array, "N R"] | None:
    return None if extra.bias is None else extra.bias.astype(jnp.float32).T
