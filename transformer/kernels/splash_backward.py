"""Splash attention for TPUs, backward: one kernel for queries and the table of biases, one for keys and values.

Dao 2023 (arXiv:2307.08691), algorithm 2. Both compute a block's scores again from q, k and the log of the softmax
denominator; in two kernels every accumulator stays in VMEM until it is whole, where one would add queries' gradients
up in HBM.

    queries: grid as forward, query-major            keys and values: the same pairs, key-major
        scores [q_block, k_block]                        scores [k_block, q_block], so that no product
        dq += d_scores · k                               needs a transposed left side:
        VMEM: acc [G, q_block, H]                        dk += d_scores · q,  dv += weights · d_out
                                                         VMEM: acc [k_block, H + Hv]

FLOPs: 2 · visits · G · q_block · k_block times (2 H + Hv) and (2 H + 2 Hv): 7 products to the forward pass's 2.
HBM: queries as forward plus d_out; keys and values read once, and q, d_out and two rows of float32 for each key block
that they see, (S / k_block) · G · (H + Hv) · T · bytes / 2 of a causal head group. The roofline is the MXU's, as there.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from transformer.kernels import splash
from transformer.kernels.registers import column, columns, dot, of_each_head, rows, wide
from transformer.kernels.splash import LOG2E, MASKED, Places, Splash, scalars
from transformer.kernels.visits import FIRST, LAST, WORK, Visits


class Inputs(NamedTuple):
    """What both kernels read: arguments of the forward pass, the cotangent, and two sums of each query.

    Attributes:
      log_total: of `splash.forward`.
      delta: the sum of out · d_out over the query's features.
    """

    q: Float[Array, "B K G T H"]
    k: Float[Array, "B k S H"]
    v: Float[Array, "B k S Hv"]
    q_rows: Int[Array, "B F 1 T"]
    k_rows: Int[Array, "B F 1 S"]
    table: Float[Array, "N R"] | None
    d_out: Float[Array, "B K G T Hv"]
    log_total: Float[Array, "B K G 1 T"]
    delta: Float[Array, "B K G 1 T"]

    @property
    def places(self) -> tuple[int, int, int]:
        """Rows of the batch, groups of heads, heads of a group."""
        return self.q.shape[:3]


def queries(
    x: Splash, walk: Visits, n: Inputs
) -> tuple[Float[Array, "B K G T H"], Float[Array, "B K G R 1 k_block"] | None]:
    """Gradients of the queries, and of the table's entries, to be summed over rows and lanes. `walk` is query-major."""
    (batch, kv_heads, group), dim = n.places, n.q.shape[-1]
    at = Places(x, walk, kv_heads // n.k.shape[1], query_major=True)
    out_specs, out_shape = [at.q(group, x.q_block, dim)], [jax.ShapeDtypeStruct(n.q.shape, n.q.dtype)]
    if n.table is not None:
        # A sum over all visits of a head: it stays in VMEM until the head's last.
        sums = (group, n.table.shape[1], 1, x.k_block)
        out_specs.append(pl.BlockSpec((None, None, *sums), lambda b, h, n, c: (b, h, 0, 0, 0, 0)))
        out_shape.append(jax.ShapeDtypeStruct((batch, kv_heads, *sums), jnp.float32))
    scratch = [(group, x.q_block, dim)]
    dq, *sums = _run(_of_queries, at, n, "splash_d_queries", (2, 1), out_specs, out_shape, scratch)
    return dq, *(sums or [None])


def _of_queries(x: Splash, at: Places, codes, n: Inputs, dq, *rest) -> None:
    *sums, acc = rest
    group, step = n.q.shape[0], pl.program_id(2)
    code, first_head = codes[at.step(pl.program_id(0), step)], pl.program_id(1) * group

    @pl.when(code & FIRST != 0)
    def _():
        acc[...] = jnp.zeros_like(acc)

    if sums:

        @pl.when(step == 0)
        def _():
            sums[0][...] = jnp.zeros_like(sums[0])

    @pl.when(code & WORK != 0)
    def _():
        queries, keys = columns(n.q_rows, x.k_block), rows(n.k_rows)
        seen, bucket = x.seen(queries, keys), x.buckets(queries, keys)

        @of_each_head(group)
        def _(g):
            raw = x.raw(dot(n.q[g], n.k[...], 1, 1), x.bias(n.table, first_head + g, bucket))
            log, mean = (wide(column(row[g]), x.k_block) for row in (n.log_total, n.delta))
            weights = _weights(x, jnp.where(seen, raw, MASKED), log)
            d_scores = _d_scores(x, weights, dot(n.d_out[g], n.v[...], 1, 1) - mean, raw)
            for r in range(x.relative.num_buckets if sums else 0):
                sums[0][g, r] += jnp.sum(jnp.where(bucket == r, d_scores, 0), axis=0, keepdims=True)
            acc[g] += dot(d_scores.astype(n.k.dtype), n.k[...], 1, 0)

    @pl.when(code & LAST != 0)
    def _():
        dq[...] = (acc[...] * x.scale).astype(dq.dtype)


def keys_and_values(x: Splash, walk: Visits, n: Inputs) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S Hv"]]:
    """Gradients of the keys and the values. `walk` is key-major.

    Where several groups read a key head, each has its own part of them, in float32.
    """
    batch, kv_heads, _ = n.places
    at = Places(x, walk, kv_heads // n.k.shape[1], query_major=False)
    parts = jnp.float32 if at.groups > 1 else None
    widths = n.k.shape[-1], n.v.shape[-1]
    out_shape = [jax.ShapeDtypeStruct((batch, kv_heads, *a.shape[2:]), parts or a.dtype) for a in (n.k, n.v)]
    scratch = [(x.k_block, width) for width in widths]
    return _run(_of_keys, at, n, "splash_d_keys_values", (2, 2), [at.k(width) for width in widths], out_shape, scratch)


def _of_keys(x: Splash, at: Places, codes, n: Inputs, dk, dv, k_acc, v_acc) -> None:
    group, code = n.q.shape[0], codes[at.step(pl.program_id(0), pl.program_id(2))]
    first_head = pl.program_id(1) * group

    @pl.when(code & FIRST != 0)
    def _():
        k_acc[...], v_acc[...] = jnp.zeros_like(k_acc), jnp.zeros_like(v_acc)

    @pl.when(code & WORK != 0)
    def _():
        queries, keys = rows(n.q_rows), columns(n.k_rows, x.q_block)
        seen, bucket = x.seen(queries, keys), x.buckets(queries, keys)

        @of_each_head(group)
        def _(g):
            raw = x.raw(dot(n.k[...], n.q[g], 1, 1), x.bias(n.table, first_head + g, bucket))
            weights = _weights(x, jnp.where(seen, raw, MASKED), n.log_total[g])
            v_acc[...] += dot(weights.astype(n.d_out.dtype), n.d_out[g], 1, 0)
            d_scores = _d_scores(x, weights, dot(n.v[...], n.d_out[g], 1, 1) - n.delta[g], raw)
            k_acc[...] += dot(d_scores.astype(n.q.dtype), n.q[g], 1, 0)

    @pl.when(code & LAST != 0)
    def _():
        dk[...], dv[...] = (k_acc[...] * x.scale).astype(dk.dtype), v_acc[...].astype(dv.dtype)


def _run(
    kernel: Callable,
    at: Places,
    n: Inputs,
    name: str,
    products: tuple[int, int],
    out_specs: list,
    out_shape: list,
    scratch: list,
):
    """Either kernel over its walk: `products` as in `splash.cost`, accumulators of shapes `scratch` in float32."""
    (batch, kv_heads, group), v_dim = n.places, n.v.shape[-1]
    row = at.q(group, 1, at.x.q_block, rows=True)
    features = at.blocks(group, n.q.shape[-1], v_dim, len(at.x.fields))
    call = pl.pallas_call(
        functools.partial(kernel, at.x, at),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, at.walk.steps),
            in_specs=[Inputs(*features, scalars(n.table), at.q(group, at.x.q_block, v_dim), row, row)],
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=out_shape,
        cost_estimate=splash.cost(at.x, at.walk, n.q, n.k, n.v, products),
        name=name,
        **splash.compiled_for(at.x),
    )
    return call(at.walk.codes.reshape(-1), n._replace(table=splash.flat(n.table)))


def _weights(x: Splash, raw: Float[Array, "r c"], log_total: Float[Array, "..."]) -> Float[Array, "r c"]:
    return jnp.exp2(raw * (x.unit * LOG2E) - log_total * LOG2E)


def _d_scores(x: Splash, weights: Array, d_weights: Array, raw: Array) -> Float[Array, "r c"]:
    """Gradients of the scores before the softcap."""
    d_scores = weights * d_weights
    return d_scores if x.softcap is None else d_scores * (1 - jnp.square(raw))
