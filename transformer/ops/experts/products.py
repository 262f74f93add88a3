"""Rows grouped by expert through their experts: the matrix products of the sparse bodies."""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer.ops.activations import activate, gate
from transformer.ops.experts.call import ExpertWeights, activated, enter, one_expert
from transformer.ops.experts.slots import Slots
from transformer.sharding import platform
from transformer.spec import FeedForward

# Rows of a tile: at most a quarter of an expert's even share, at most as many as larger products gain anything from
# (benchmarks/experts.py).
SHARE, MOST_ROWS = 4, 128
# An even share of fewer rows lies in tiles alone: so few tokens may not ask for all experts.
LEAST_SHARE = 8


def tile_rows(rows: int, num_experts: int) -> int:
    """The tile, a power of two, for that many assignments to that many experts.

    An expert fills up its last tile: E · tile / M is at most 1 / `SHARE`, whatever the shape, and shrinks with the
    batch.
    """
    share = max(rows // (SHARE * num_experts), 1)
    return min(1 << (share.bit_length() - 1), MOST_ROWS)


def room(rows: int, num_experts: int) -> int:
    """Rows of every expert that are multiplied at once, in use or not: an even share, in whole tiles.

    One batch of products is up to twice as fast as tiles, one by one (docs/performance.md). So many rows are run even
    where all is padding, and with the tiles that hold what exceeds them at most M (2 - 1 / E) + tile.
    """
    share, tile = rows // num_experts, tile_rows(rows, num_experts)
    return share // tile * tile if share >= LEAST_SHARE else 0


def compiler_options() -> dict[str, bool | int] | None:
    """What `jax.jit` of a training step, or of anything with `ragged` in it, tells the platform's compiler.

    TPU compilers from libtpu 0.0.52 on else multiply every row by every expert (docs/experts.md); XLA:CPU takes half
    of the vectors that a processor has for elementwise work (docs/performance.md).
    """
    return {"tpu": {"xla_tpu_enable_ragged_dot_kernel": True}, "cpu": {"xla_cpu_prefer_vector_width": 512}}.get(
        platform()
    )


def batched(spec: FeedForward, x: Float[Array, "E C D"], w: ExpertWeights) -> Float[Array, "E C D"]:
    """As many rows for each expert, all at once."""
    # With two axes of rows, as `over_tokens` wants them.
    rows = x.reshape(x.shape[0], math.gcd(2, x.shape[1]), -1, x.shape[2])
    return jax.vmap(functools.partial(one_expert, spec))(rows, w).reshape(x.shape)


def ragged(spec: FeedForward, x: Float[Array, "S D"], slots: Slots, w: ExpertWeights) -> Float[Array, "S D"]:
    """Tiles of one row through `jax.lax.ragged_dot`, which has kernels on accelerators; on a CPU it is dense.

    Empty rows must be zeros in x, and hold anything in what is returned.

    On TPUs see that programs get `compiler_options`. JAX's megablox kernel, the other choice there, has no types for
    `jax.shard_map`, and moves more bytes on most chips (docs/experts.md).
    """
    # Kernels leave rows beyond the last group as they find them: nothing may come of those that are in sums of
    # products, of the hidden features and their gradients. Of what goes in and out, only rows that are held are read.
    held = (slots.source < slots.row.size)[:, None]

    def linear(x, kernel, bias):
        y = jax.lax.ragged_dot(x, kernel.astype(x.dtype), slots.sizes)
        return y if bias is None else y + bias.astype(x.dtype)[slots.expert]

    def inward(kernel, bias):
        return jnp.where(held, linear(x, kernel, bias), 0)

    up = inward(w.up, w.up_bias)
    hidden = gate(spec, inward(w.gate, w.gate_bias), up) if spec.gated else activate(spec.activation, up)
    return linear(hidden, w.down, w.down_bias)


def tiled(
    spec: FeedForward, x: Float[Array, "S D"], slots: Slots, w: ExpertWeights, room: int = 0
) -> Float[Array, "S D"]:
    """Each expert's `room` at once, then one used tile after the other; for CPUs.

    Tiles keep nothing but their rows for the gradient: where loads are near even, they are few.
    """
    rooms, parts = w.up.shape[0] * room, []
    if room:
        parts.append(batched(spec, x[:rooms].reshape(-1, room, x.shape[-1]), w))
    if rooms < x.shape[0]:
        tiles, first = x[rooms:].reshape(-1, slots.tile, x.shape[-1]), rooms // slots.tile
        parts.append(_tiled(spec, tiles, slots.expert[first:], slots.used - first, w))
    return jnp.concatenate([part.reshape(-1, x.shape[-1]) for part in parts])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(spec: FeedForward, x: Float[Array, "tiles t D"], expert: Int[Array, " tiles"], used, w):
    def run(i, y):
        return y.at[i].set(one_expert(spec, x[i], _pick(w, expert[i])))

    return jax.lax.fori_loop(0, used, run, jnp.zeros_like(x))


def _tiled_forward(spec, x, expert, used, w):
    return _tiled(spec, x, expert, used, w), (x, expert, used, w)


def _tiled_backward(spec, kept, g):
    """Derived automatically, each tile would add zeros to the gradients of all other experts."""
    x, expert, used, w = kept

    def run(i, carry):
        dx, dw = carry
        more, grads = _pull(spec, x[i], g[i], _pick(w, expert[i]))
        dw = jax.tree.map(lambda total, part: total.at[expert[i]].add(part.astype(total.dtype)), dw, grads)
        return dx.at[i].set(more), dw

    # Sums over tiles are kept in float32, whatever the weights are in.
    start = jnp.zeros_like(x), jax.tree.map(lambda k: jnp.zeros_like(k, dtype=jnp.float32), w)
    dx, dw = jax.lax.fori_loop(0, used, run, start)
    return dx, None, None, jax.tree.map(lambda total, k: total.astype(k.dtype), dw, w)


def _pull(spec: FeedForward, x: Float[Array, "t D"], g: Float[Array, "t D"], w: ExpertWeights):
    """Gradients of one tile's rows and of its expert's weights."""
    inner, pull = jax.vjp(functools.partial(activated, spec), enter(x, w))
    (d,) = pull(_back(g, w.down))
    dx = _back(d.up, w.up) if w.gate is None else _back(d.up, w.up) + _back(d.gate, w.gate)

    def kernel(k, x, g):
        return None if k is None else x.T @ g

    def bias(b, g):
        return None if b is None else jnp.sum(g, axis=0)

    return dx, ExpertWeights(
        up=kernel(w.up, x, d.up),
        gate=kernel(w.gate, x, d.gate),
        down=kernel(w.down, inner, g),
        up_bias=bias(w.up_bias, d.up),
        gate_bias=bias(w.gate_bias, d.gate),
        down_bias=bias(w.down_bias, g),
    )


def _back(g: Float[Array, "t out"], kernel: Float[Array, "in out"]) -> Float[Array, "t in"]:
    return g @ kernel.astype(g.dtype).T


_tiled.defvjp(_tiled_forward, _tiled_backward)


def _pick(w: ExpertWeights, expert: Int[Array, ""]) -> ExpertWeights:
    return jax.tree.map(lambda k: jax.lax.dynamic_index_in_dim(k, expert, keepdims=False), w)
