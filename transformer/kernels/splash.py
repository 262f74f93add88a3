"""Splash attention for TPUs: attention over the block pairs that a mask shows, forward; `splash_backward` has the rest.

Milakov & Gimelshein 2018 (arXiv:1805.02867) for the running softmax, Dao et al. 2022 (arXiv:2205.14135) and Dao 2023
(arXiv:2307.08691) for the order of the work, JAX's splash attention for walking a prefetched list of blocks.

    keys s →   0       1       2       3            grid: (batch, kv head, visits)
    q 0      [0 ···]                                visits of a causal mask: (0,0) (1,0) (1,1) (2,0) …
    q 1      [1 ···][2 ···]                         one visit: queries [G, q_block, H] of the G heads of a group
    q 2      [3 ···][4 ···][5 ···]                             keys [k_block, H], values [k_block, Hv], loaded once
    q 3      [6 ···][7 ···][8 ···][9 ···]           in VMEM from a query block's first visit to its last:
                                                               acc [G, q_block, Hv], top and total [G, q_block, 128]

Inside a block `ops.mask.sees` decides, on positions, segments and orders that lie in VMEM as rows [1, block].

VMEM (`kernels.blocks` has the sum): blocks of q, k, v and out twice each, as the next ones are fetched while these are
computed; the accumulators; and a few [q_block, k_block] in float32 for the scores of one head.
HBM: q and out once, k and v once for each query block that sees them: (T / q_block) · (H + Hv) · S · bytes / 2 of a
causal head group, which a group of G heads shares. With q_block · G ≥ 1024 rows a visit makes 1024 FLOPs or more a byte
of keys and values in bfloat16, above what any chip here needs (v5e 240, v5p 166, v6e 560) to be bound by its MXU:
the roofline is 2 · visits · G · q_block · k_block · (H + Hv) FLOPs at the MXU's rate.

The exponentials are of base 2 and in units of the raw scores, so that scaling costs nothing of its own.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from transformer.kernels import visits
from transformer.kernels.registers import LANES, column, dot, folded, of_each_head, rows, wide
from transformer.kernels.visits import FIRST, LAST, WORK, Visits
from transformer.ops import relative_bias
from transformer.ops.mask import BLIND, sees
from transformer.spec import Mask, RelativeBias

# A masked score lies so far below the lowest running maximum that it weighs exactly 0, in rows that see nothing too.
MASKED = -1e30
LOWEST = -1e29
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Splash:
    """The static part of a kernel.

    Attributes:
      fields: which of positions, segments and orders the rows hold, in this order.
      vmem: bytes of VMEM that the compiler may use; None: its default.
      interpret: runs without a TPU: True, or how to imitate one (`pltpu.InterpretParams`).
    """

    mask: Mask
    scale: float
    softcap: float | None
    relative: RelativeBias | None
    fields: tuple[str, ...]
    q_block: int
    k_block: int
    vmem: int | None = None
    interpret: bool | pltpu.InterpretParams = False

    @property
    def unit(self) -> float:
        """What a raw score of 1 is worth in the softmax's exponent."""
        if self.softcap is not None:
            return self.softcap
        return self.scale if self.relative is None else 1.0

    def raw(self, products: Float[Array, "r c"], bias: Float[Array, "r c"] | None) -> Float[Array, "r c"]:
        """Scores in units of `unit`, before the mask."""
        if bias is not None:
            products = products * self.scale + bias
            return products if self.softcap is None else jnp.tanh(products / self.softcap)
        return products if self.softcap is None else jnp.tanh(products * (self.scale / self.softcap))

    def seen(self, q: list[Int[Array, "..."]], k: list[Int[Array, "..."]]) -> Bool[Array, "r c"]:
        """`ops.mask.sees` of a block."""
        q, k = (dict(zip(self.fields, side, strict=True)) for side in (q, k))
        pairs = [x for field in ("positions", "segments", "orders") for x in (q.get(field), k.get(field))]
        return sees(self.mask, *pairs)

    def buckets(self, q: list[Int[Array, "..."]], k: list[Int[Array, "..."]]) -> Int[Array, "r c"] | None:
        """Rows of the table of biases that a block's pairs read."""
        return None if self.relative is None else relative_bias.bucket_of(self.relative, k[0] - q[0])

    def bias(self, table, head: Int[Array, ""], bucket: Int[Array, "r c"] | None) -> Float[Array, "r c"] | None:
        """The biases of a head, chosen from scalars."""
        if bucket is None:
            return None
        count = self.relative.num_buckets
        chosen = jnp.full(bucket.shape, table[head * count])
        for r in range(1, count):
            chosen = jnp.where(bucket == r, table[head * count + r], chosen)
        return chosen


def forward(
    x: Splash,
    walk: Visits,
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B k S H"],
    v: Float[Array, "B k S Hv"],
    q_rows: Int[Array, "B F 1 T"],
    k_rows: Int[Array, "B F 1 S"],
    sinks: Float[Array, " N"] | None,
    table: Float[Array, "N R"] | None,
) -> tuple[Float[Array, "B K G T Hv"], Float[Array, "B K G 1 T"]]:
    """Attention and the log of each query's softmax denominator, `BLIND` where it sees nothing.

    T and S are multiples of the blocks. `walk` is query-major. On TPUs blocks are multiples of 128. Where q has more
    key heads than k and v, a group too large for VMEM was cut into several, which read the same key head.
    """
    batch, kv_heads, group, length, dim = q.shape
    v_dim = v.shape[-1]
    at = Places(x, walk, kv_heads // k.shape[1], query_major=True)
    # Sums of weights stay apart in lanes until the last visit; interpreted blocks may be of fewer.
    accumulators = [(group, x.q_block, width) for width in (v_dim, LANES, math.gcd(x.k_block, LANES))]
    call = pl.pallas_call(
        functools.partial(_kernel, x, at),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, walk.steps),
            in_specs=[*at.blocks(group, dim, v_dim, len(x.fields)), scalars(sinks), scalars(table)],
            out_specs=[at.q(group, x.q_block, v_dim), at.q(group, 1, x.q_block, rows=True)],
            scratch_shapes=[
                *(pltpu.VMEM(shape, jnp.float32) for shape in accumulators),
                pltpu.VMEM((len(x.fields), x.q_block, LANES), jnp.int32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((*q.shape[:-1], v_dim), q.dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, group, 1, length), jnp.float32),
        ],
        cost_estimate=cost(x, walk, q, k, v, products=(1, 1)),
        name="splash_forward",
        **compiled_for(x),
    )
    return call(walk.codes.reshape(-1), q, k, v, q_rows, k_rows, sinks, flat(table))


def _kernel(
    x: Splash, at: "Places", codes, q, k, v, q_rows, k_rows, sinks, table, out, log_total, acc, top, total, q_columns
) -> None:
    group, code = q.shape[0], codes[at.step(pl.program_id(0), pl.program_id(2))]
    first_head = pl.program_id(1) * group
    exponent = x.unit * LOG2E

    @pl.when(code & FIRST != 0)
    def _():
        # Once for all visits of the queries; backward, products hide it.
        for f, row in enumerate(rows(q_rows)):
            q_columns[f] = column(row)
        acc[...] = jnp.zeros_like(acc)
        for g in range(group):
            # A learned sink is a key of value 0.
            top[g] = jnp.full(top.shape[1:], LOWEST if sinks is None else sinks[first_head + g] / x.unit)
            total[g] = jnp.full(total.shape[1:], 0.0 if sinks is None else 1.0 / total.shape[2])

    @pl.when(code & WORK != 0)
    def _():
        queries, keys = [wide(q_columns[f], x.k_block) for f in range(len(x.fields))], rows(k_rows)
        seen, bucket = x.seen(queries, keys), x.buckets(queries, keys)

        @of_each_head(group)
        def _(g):
            scores = x.raw(dot(q[g], k[...], 1, 1), x.bias(table, first_head + g, bucket))
            scores = jnp.where(seen, scores, MASKED)
            old = top[g]
            new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.exp2((scores - wide(new, x.k_block)) * exponent)
            fade = jnp.exp2((old - new) * exponent)
            top[g] = new
            total[g] = total[g] * fade[:, : total.shape[2]] + folded(weights, total.shape[2])
            acc[g] = acc[g] * wide(fade, v.shape[-1]) + dot(weights.astype(v.dtype), v[...], 1, 0)

    @pl.when(code & LAST != 0)
    def _():
        @of_each_head(group)
        def _(g):
            whole = jnp.broadcast_to(jnp.sum(total[g], axis=1, keepdims=True), top.shape[1:])
            blind = whole == 0
            whole = jnp.where(blind, 1, whole)
            out[g] = (acc[g] / wide(whole, v.shape[-1])).astype(out.dtype)
            log = jnp.where(blind, BLIND, top[g] * x.unit + jnp.log(whole))
            log_total[g] = log.T[:1]


@dataclass(frozen=True)
class Places:
    """Where blocks lie: index maps that read the list of visits."""

    x: Splash
    walk: Visits
    groups: int  # that read the same key head
    query_major: bool

    def step(self, b: Array, n: Array) -> Array:
        """The place of a visit in the flattened lists."""
        lists, length = self.walk.codes.shape
        return n if lists == 1 else b * length + n

    def _index(self, queries: bool):
        side = visits.outer if queries == self.query_major else visits.inner
        return lambda b, n, codes: side(codes[self.step(b, n)])

    def q(self, group: int, height: int, width: int, rows: bool = False) -> pl.BlockSpec:
        """A block of [B, K, G, T, width], or of rows [B, K, G, 1, T]."""
        index = self._index(queries=True)
        place = (lambda i: (0, i)) if rows else (lambda i: (i, 0))
        return pl.BlockSpec((None, None, group, height, width), lambda b, h, n, c: (b, h, 0, *place(index(b, n, c))))

    def k(self, width: int, groups: int = 1) -> pl.BlockSpec:
        """A block of [B, K, S, width], one for so many groups."""
        index = self._index(queries=False)
        return pl.BlockSpec((None, None, self.x.k_block, width), lambda b, h, n, c: (b, h // groups, index(b, n, c), 0))

    def rows(self, fields: int, queries: bool) -> pl.BlockSpec:
        """A block of [B, F, 1, T] or [B, F, 1, S]."""
        index, block = self._index(queries), self.x.q_block if queries else self.x.k_block
        return pl.BlockSpec((None, fields, 1, block), lambda b, h, n, c: (b, 0, 0, index(b, n, c)))

    def blocks(self, group: int, dim: int, v_dim: int, fields: int) -> list[pl.BlockSpec]:
        """Of q, k, v and the rows of both sides."""
        sides = self.rows(fields, queries=True), self.rows(fields, queries=False)
        keys = self.k(dim, self.groups), self.k(v_dim, self.groups)
        return [self.q(group, self.x.q_block, dim), *keys, *sides]


def scalars(x: Array | None) -> pl.BlockSpec | None:
    """All of a small array, in scalar memory."""
    return None if x is None else pl.BlockSpec(memory_space=pltpu.SMEM)


def compiled_for(x: Splash) -> dict:
    """How a kernel of this grid is compiled, or imitated."""
    semantics = ("parallel", "parallel", "arbitrary")
    params = pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=x.vmem)
    return {"compiler_params": params, "interpret": x.interpret}


def cost(x: Splash, walk: Visits, q: Array, k: Array, v: Array, products: tuple[int, int]) -> pl.CostEstimate:
    """Of all listed visits, with so many products over H and over Hv each; bytes of every array but once."""
    batch, kv_heads, group, _, dim = q.shape
    pairs = batch * kv_heads * group * walk.codes.shape[1] * x.q_block * x.k_block
    size = sum(a.size * a.dtype.itemsize for a in (q, k, v)) + q.size // dim * v.shape[-1] * q.dtype.itemsize
    flops = 2 * pairs * (products[0] * dim + products[1] * v.shape[-1])
    return pl.CostEstimate(flops=flops, transcendentals=pairs, bytes_accessed=size)


def flat(table: Float[Array, "N R"] | None) -> Float[Array, " NR"] | None:
    return None if table is None else table.reshape(-1)
