"""Decoding: a few queries a row against a cache, read where it lies, once for all query heads of a key head.

The cache stays as `ops.cache` keeps it, [*L, B, K, S / p, p · H]: whole stacked buffers go in, and the layer, like the
blocks that a row needs, is addressed by scalars that are there before the blocks are (scalar prefetch). The grid is
(row, key heads, split, block); a step:

                    H                                            queries of a key head: its G heads of all T tokens
            +-------------+        q [R, H]
     slots  | keys        |  ---> scores [R, slots]: · scale · key scale, + bias, cap, `ops.mask.sees`
            +-------------+          |  running maximum and sum, in float32, kept from block to block (online softmax)
            | values [Hv] |  ---> acc [R, Hv] += weights · value scale · values
            +-------------+

and the same for each head of the block, up to 8 of them. In multi-head latent attention there is one key head
[latent | rotary key] for all queries, and its first features are the values: one array is loaded, once, for both
products, and no key or value of a head is ever made in HBM. Keys and values of eight bits are widened in VMEM and
their scales multiply scores and weights, which is the same and much less. Where p tokens share a row of the cache, so
that no lane is empty (`ops.cache_rows`), a block is cut into rows of a token in VMEM: in pieces of lanes.

Only blocks that show a row something are visited: positions tell (`decode_blocks.needed`), so that empty slots, a
ring's oldest ones and what lies behind a window cost nothing. The number of steps is the largest of any row; a row
that needs fewer names its last block again, which is not loaded again.

VMEM: `decode_blocks.vmem_bytes`, below 12 MiB by choice of the block: two blocks of keys and values in flight (1 MiB
each of Llama 3 8B's in bfloat16: 8 heads, 512 slots), queries, output, accumulator, and one head's scores.

HBM: the blocks that are needed, each once; queries and output are less than a thousandth of that. So it is bound by
memory, and the time to aim at is bytes / bandwidth: 4,096 tokens of Llama 3 8B are 16.8 MB a layer and row: 6.1 us on
v5p (2,765 GB/s), 20.5 us on v5e (819 GB/s). A latent cache of DeepSeek-V3 is 4.7 MB for as many, and 1.14 GFLOP for
its 128 heads: bound by v5p's arithmetic (2.5 us), not by its memory (1.7 us). Figures of the compiler:
docs/decode_kernels.md.

The reference is `ops.cached_attention.read_and_attend`. FlashDecoding (Dao et al. 2023) for the split;
DeepSeek-V2 (arXiv:2405.04434), section 2.1.2, for absorbed queries.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from transformer.kernels.decode_blocks import SUBLANES, Blocks, Sizes, choose, cost, needed, padded_positions
from transformer.kernels.decode_step import Arrays, Scalars, State, kernel
from transformer.ops import cache_rows, relative_bias
from transformer.ops.attention.call import NOTHING, Call, Extra, Where
from transformer.ops.cache import KVCache


def refuse(
    call: Call, q: Float[Array, "B T N H"], cache: KVCache, where: Where, value_dim: int | None = None
) -> str | None:
    """Why the kernel can't serve a call, or None."""
    if where.q_orders is not None or (where.q_segments is not None and where.k_segments is not None):
        return "the slots of a cache have no segments and no orders"
    if choose(sizes_of(call, q, cache, value_dim)) is None:
        return f"blocks of {cache.keys.shape[-3]} heads and {cache.keys.shape[-1]} features don't fit VMEM"
    return None


def attend(
    call: Call,
    q: Float[Array, "B T N H"],
    cache: KVCache,
    where: Where,
    extra: Extra = NOTHING,
    value_dim: int | None = None,
    *,
    slots: int | None = None,
    splits: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B T N Hv"]:
    """Attention of few queries to the layer of a cache that is in view; forward only. dtype in = dtype out.

    Args:
      where: its `k_positions` are those of what the cache holds, which the kernel has from the cache.
      value_dim: values are so many first features of the keys; None: the cache has values.
      slots: of a block, a multiple of 128 and of 32 · p unless one block holds all; None: `decode_blocks.choose`.
      splits: parts of the needed blocks that run side by side and are merged exactly; None: two where rows and heads
        give a chip of two cores nothing to share, else one.
      interpret: on other platforms than TPUs; parameters choose how closely.
    """
    batch, length, num_heads, _ = q.shape
    sizes = sizes_of(call, q, cache, value_dim)
    blocks = choose(sizes, slots)
    if splits is None:
        splits = 2 if batch * sizes.heads == blocks.heads and blocks.count > 1 else 1
    positions = padded_positions(cache.by_slot, blocks)
    counts, numbers = needed(call.mask, where.q_positions, positions, blocks)
    steps = jnp.maximum(pl.cdiv(jnp.max(counts), splits), 1)
    layer = jnp.zeros((), jnp.int32) if cache.layer is None else cache.layer
    scalars = Scalars(layer.reshape(1), steps.reshape(1), counts, numbers, where.q_positions.reshape(-1))
    arrays = _arrays(call, sizes, q, cache, where, extra, positions)
    specs = _specs(sizes, blocks, arrays)
    arrays = arrays if interpret else _in_hbm(arrays)
    out, *log_total = _pallas_call(call, sizes, blocks, length, splits, steps, specs, interpret)(scalars, arrays)
    out = _merge(out, *log_total) if splits > 1 else out[:, :, 0]
    out = out[:, :, : num_heads // sizes.heads * length].reshape(batch, sizes.heads, -1, length, sizes.value)
    return jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(batch, length, num_heads, -1).astype(q.dtype)


def sizes_of(call: Call, q: Array, cache: KVCache, value_dim: int | None) -> Sizes:
    """What a call reads."""
    batch, length, num_heads, width = q.shape
    heads, together = cache.keys.shape[-3], cache.together
    rows = pl.cdiv(num_heads // heads * length, SUBLANES // q.dtype.itemsize) * (SUBLANES // q.dtype.itemsize)
    shares = value_dim is not None
    return Sizes(
        batch, heads, cache.capacity, together, rows, key=width, shares=shares,
        value=value_dim if shares else cache.values.shape[-1] // together,
        kept=cache.keys.dtype, computed=q.dtype, scaled=cache.key_scales is not None, biased=call.relative is not None,
    )  # fmt: skip


def _arrays(call: Call, sizes: Sizes, q, cache: KVCache, where: Where, extra: Extra, positions) -> Arrays:
    batch, length, num_heads, width = q.shape
    group = num_heads // sizes.heads

    def by_layer(buffer: Array | None) -> Array | None:
        return buffer if buffer is None or cache.layer is not None else buffer[None]

    def by_row(x: Array, axis: int) -> Array:
        pad = [(0, 0)] * x.ndim
        pad[axis] = (0, sizes.rows - group * length)
        return jnp.pad(x, pad)

    q = jnp.transpose(q.reshape(batch, length, sizes.heads, group, width), (0, 2, 3, 1, 4))
    sinks = bias = None
    if extra.sinks is not None:
        sinks = jnp.repeat(extra.sinks.astype(jnp.float32).reshape(sizes.heads, group, 1), length, axis=1)
        sinks = by_row(sinks, 1)
    if call.relative is not None:
        bucket = relative_bias.buckets(call.relative, where.q_positions, cache.by_slot)
        bias = by_row(relative_bias.bias(extra.bias, bucket).reshape(batch, sizes.heads, group * length, -1), 2)
    return Arrays(
        q=by_row(q.reshape(batch, sizes.heads, group * length, width), 2),
        positions=positions[:, None],
        keys=by_layer(cache.keys),
        values=None if sizes.shares else by_layer(cache.values),
        key_scales=by_layer(cache.key_scales),
        value_scales=None if sizes.shares else by_layer(cache.value_scales),
        sinks=sinks,
        bias=bias,
    )


def _in_hbm(arrays: Arrays) -> Arrays:
    """The cache pinned where it lies: else XLA on 7x copies one that is small, all layers of it, to VMEM first."""
    kept = ("keys", "values", "key_scales", "value_scales")
    held = {name: getattr(arrays, name) for name in kept if getattr(arrays, name) is not None}
    pinned = {name: pltpu.with_memory_space_constraint(array, pltpu.HBM) for name, array in held.items()}
    return arrays._replace(**pinned)


def _specs(sizes: Sizes, blocks: Blocks, arrays: Arrays) -> Arrays:
    """Where each step finds its blocks."""
    heads, slots, count = blocks

    def number(b, p, j, s: Scalars):
        at = jnp.minimum(p * s.steps[0] + j, s.counts[b] - 1)
        return s.numbers[b * count + jnp.maximum(at, 0)]

    def kept(width: int) -> pl.BlockSpec:
        block = (None, None, heads, *cache_rows.shape(slots, width, sizes.together))
        return pl.BlockSpec(block, lambda b, k, p, j, s: (s.layer[0], b, k, number(b, p, j, s), 0))

    scales = pl.BlockSpec((None, None, heads, slots), lambda b, k, p, j, s: (s.layer[0], b, k, number(b, p, j, s)))
    every = Arrays(
        q=pl.BlockSpec((None, heads, sizes.rows, sizes.key), lambda b, k, p, j, s: (b, k, 0, 0)),
        positions=pl.BlockSpec((None, 1, slots), lambda b, k, p, j, s: (b, 0, number(b, p, j, s))),
        keys=kept(sizes.key),
        values=kept(sizes.value),
        key_scales=scales,
        value_scales=scales,
        sinks=pl.BlockSpec((heads, sizes.rows, 1), lambda b, k, p, j, s: (k, 0, 0)),
        bias=pl.BlockSpec((None, heads, sizes.rows, slots), lambda b, k, p, j, s: (b, k, 0, number(b, p, j, s))),
    )
    return Arrays(*(None if array is None else spec for array, spec in zip(arrays, every, strict=True)))


def _pallas_call(call: Call, sizes: Sizes, blocks: Blocks, length: int, splits: int, steps, specs: Arrays, interpret):
    shape = (sizes.batch, sizes.heads, splits, sizes.rows)

    def out(width: int, dtype) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
        block = (None, blocks.heads, None, sizes.rows, width)
        return jax.ShapeDtypeStruct((*shape, width), dtype), pl.BlockSpec(block, lambda b, k, p, j, s: (b, k, p, 0, 0))

    # Parts are merged in float32, by the logs of their sums.
    outs = [out(sizes.value, sizes.computed)] if splits == 1 else [out(sizes.value, jnp.float32), out(1, jnp.float32)]
    shapes, out_specs = zip(*outs, strict=True)
    state = State(*(pltpu.VMEM((blocks.heads, sizes.rows, width), jnp.float32) for width in (sizes.value, 1, 1)))
    return pl.pallas_call(
        functools.partial(kernel, call, sizes, blocks, length),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(sizes.batch, sizes.heads // blocks.heads, splits, steps),
            in_specs=[specs],
            out_specs=list(out_specs),
            scratch_shapes=[state],
        ),
        out_shape=list(shapes),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=cost(sizes),
        interpret=interpret,
        name="decode_attention",
    )


def _merge(out: Float[Array, "B K P R Hv"], log_total: Float[Array, "B K P R 1"]) -> Float[Array, "B K R Hv"]:
    """The softmax over all parts, from those over each; exact, and zero where no part sees anything."""
    share = jax.nn.softmax(log_total, axis=2)
    return jnp.sum(share * out, axis=2)
