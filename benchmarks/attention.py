"""Memory, scheduled work and speed of the `blockwise` attention body beside `reference`, forward and backward.

Times are taken in turns in one process and reported as ratios, so that a machine that is busy with something
else slows both alike. What it shows decides `REFERENCE_SCORES` (ops/attention/__init__.py) and `Call.block`.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from transformer.ops.attention import Call, Where, attend, blockwise
from transformer.spec import Mask

# Forward q·k and weights·v, backward q·k again, d_out·v, and one product each for dq, dk, dv.
PRODUCTS = 7


def passes(body: str, call: Call):
    """A jitted (q, k, v, where) -> gradients of q, k and v."""

    def loss(q, k, v, where):
        return jnp.sum(attend(body, call, q, k, v, where).astype(jnp.float32) ** 2)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


def inputs(args, length: int):
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((args.batch, length, heads, args.head_dim)), args.dtype)
        for heads in (args.heads, args.kv_heads, args.kv_heads)
    )
    positions = jnp.broadcast_to(jnp.arange(length), (args.batch, length))
    return q, k, v, Where(positions, positions)


def call_with(window: int | None, block: int) -> Call:
    return Call(mask=Mask(causal=True, window=window), scale=0.125, aligned=True, block=block)


def temp_bytes(body: str, call: Call, args, length: int) -> int:
    shapes = jax.eval_shape(lambda: inputs(args, length))
    return passes(body, call).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def print_memory_and_work(args) -> None:
    block = args.blocks[0]
    print(f"temporary MiB and GFLOP of one pass forward and backward, causal, block {block}")
    print(f"{'T':>6} {'reference':>10} {'blockwise':>10} {'GFLOP full':>11} {f'window {args.window}':>11}")
    for length in args.memory_lengths:
        dense_bytes = 4 * args.batch * args.heads * length**2
        sizes = [
            temp_bytes(body, call_with(None, block), args, length) / 2**20
            if body == "blockwise" or dense_bytes < args.limit_gib * 2**30
            else float("nan")
            for body in ("reference", "blockwise")
        ]
        size = blockwise.block_size(length, block)
        work = [
            int(blockwise.aligned_blocks(Mask(causal=True, window=window), length, block).sum())
            * (2 * PRODUCTS * size**2 * args.head_dim * args.batch * args.heads)
            / 1e9
            for window in (None, args.window)
        ]
        print(f"{length:6d} {sizes[0]:10.1f} {sizes[1]:10.1f} {work[0]:11.1f} {work[1]:11.1f}", flush=True)


def times(functions, values, seconds: float) -> list[float]:
    """Least seconds of each function, called in turns."""
    for f in functions:
        jax.block_until_ready(f(*values))
    taken = [[] for _ in functions]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken[0]) < 3:
        for f, row in zip(functions, taken, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(f(*values))
            row.append(time.perf_counter() - start)
    return [min(row) for row in taken]


def print_times(args) -> None:
    print(f"time of blockwise / reference, forward and backward, causal, {args.dtype}, on {jax.default_backend()}")
    print(f"{'T':>6} {'reference':>10} " + " ".join(f"{f'block {block}':>10}" for block in args.blocks))
    for length in args.lengths:
        functions = [passes("reference", call_with(None, 1))]
        functions += [passes("blockwise", call_with(None, block)) for block in args.blocks]
        base, *rest = times(functions, inputs(args, length), args.seconds)
        print(f"{length:6d} {base * 1e3:8.1f}ms " + " ".join(f"{t / base:10.2f}" for t in rest), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="sequences")
    parser.add_argument("--heads", type=int, default=6, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=6, help="key and value heads; must divide the query heads")
    parser.add_argument("--head-dim", type=int, default=64, help="features of a head")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of q, k and v")
    parser.add_argument("--window", type=int, default=512, help="visible keys in the windowed column of the work")
    parser.add_argument("--lengths", type=int, nargs="*", default=[64, 128, 256, 512, 1024], help="T that are timed")
    parser.add_argument(
        "--blocks",
        type=int,
        nargs="+",
        default=[128, 64, 256],
        help="blocks that are timed; memory and work take the first",
    )
    parser.add_argument(
        "--memory-lengths", type=int, nargs="*", default=[2048, 4096, 8192, 16384], help="T that are compiled, not run"
    )
    parser.add_argument(
        "--limit-gib",
        type=float,
        default=64,
        help="reference isn't compiled where one score matrix takes more than this",
    )
    parser.add_argument("--seconds", type=float, default=3, help="time spent a length, compilation not counted")
    args = parser.parse_args()
    print_memory_and_work(args)
    print_times(args)


if __name__ == "__main__":
    main()
