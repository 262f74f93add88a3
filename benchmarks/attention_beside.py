"""Compiles tokamax's splash attention as `attention_kernels.py` compiles this project's, and measures both alike.

    python benchmarks/attention_beside.py --write docs/kernels.md     (--chips, --shapes: some)

needs what `attention_kernels.py` needs, and tokamax, which the project does without: `pip install tokamax` beside the
same JAX and libtpu, in an environment of its own. Nothing runs, nothing is timed.
"""

import argparse
import dataclasses
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import pages
from benchmarks.attention_kernels import (
    PROBLEMS,
    Problem,
    Schedule,
    Schedules,
    compiled,
    device,
    flops_ratio,
    vmem_used,
)
from transformer import settings, sharding
from transformer.kernels import blocks

SHAPES = "Llama 3 8B", "Gemma 3 27B local", "gpt-oss local", "gpt-oss full"
CHIPS = "v5p", "v6e"
HEAD = [
    *("shape", "chip", "kernel", "blocks, forward", "blocks, backward", "FLOPs / needed"),
    *("bundles a thousand needed pairs", "VMEM, MiB", "HBM beside the arrays, MB"),
]


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Whose they are, their names, and the products that they make of a pair of blocks: forward, and backward."""

    whose: str
    names: tuple[tuple[str, ...], tuple[str, ...]]
    products: tuple[int, int]


# Each of two backward kernels makes the scores and the gradients of the weights.
OURS = Kernels("this one", (("splash_forward",), ("splash_d_queries", "splash_d_keys_values")), (2, 7))
THEIRS = Kernels("tokamax", (("splash_mha_fwd",), ("splash_mha_dkv",)), (2, 5))


def compiled_peer(problem: Problem, on: jax.Device, forward: blocks.Blocks, backward: blocks.Blocks):
    """`attention_kernels.compiled` of tokamax's kernels, in these blocks."""
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    p, mesh = problem, sharding.make_mesh(settings.Mesh(data=1), [on])
    here, square = NamedSharding(mesh, PartitionSpec()), (problem.length, problem.length)
    config = splash.SplashConfig(
        block_q=forward.q, block_kv=forward.k, block_q_dkv=backward.q, block_kv_dkv=backward.k
    )  # fmt: skip

    def of(*shape, dtype=p.dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    def with_gradients(q, k, v, sinks):
        mask = masks.CausalMask(square) if p.mask.window is None else masks.LocalMask(square, (p.mask.window - 1, 0), 0)
        attend = splash.make_splash_mha(mask, config=config, q_seq_shards=1)
        out, pull = jax.vjp(lambda q, k, v, sinks: attend(q * p.dim**-0.5, k, v, sinks=sinks), q, k, v, sinks)
        return out, pull(jnp.ones_like(out))

    q, k, v = of(p.heads, p.length, p.dim), of(p.kv_heads, p.length, p.dim), of(p.kv_heads, p.length, p.v_dim)
    with jax.set_mesh(mesh):
        sinks = of(p.heads, dtype=jnp.float32) if p.sinks else None
        return jax.jit(with_gradients).lower(q, k, v, sinks).compile()


def rows(chip: str, name: str, schedules: Schedules) -> list[list[str]]:
    """Two lines of the table: this project's kernels, and tokamax's in the same blocks."""
    on, problem = device(chip), PROBLEMS[name]
    best = [blocks.choose(on.device_kind, problem.shape, problem.mask, backward) for backward in (False, True)]
    made = compiled(problem, on)
    found = schedules.take()
    # What a product of a pair of rows takes; as many heads' are in the program as share a block.
    issues = found["splash_forward"].issued / (OURS.products[0] * best[0].heads * best[0].q * best[0].k)
    lines = [cells(problem, best, OURS, made, found, issues)]
    made = compiled_peer(problem, on, *best)
    lines.append(cells(problem, best, THEIRS, made, schedules.take(), issues))
    return [[name, chip, *line] for line in lines]


def cells(
    problem: Problem,
    best: list[blocks.Blocks],
    kernels: Kernels,
    made: jax.stages.Compiled,
    found: dict[str, Schedule],
    issues: float,
) -> list[str]:
    """What was made of a problem by one of both."""
    vmem, bundles, memory = vmem_used(made.as_text()), [], []
    for names, products, size in zip(kernels.names, kernels.products, best, strict=True):
        pairs, schedules = size.q * size.k, [found[name] for name in names]
        # A program has a visit's products once a head of a group, or once for blocks that mask and once for others.
        times = round(sum(schedule.issued for schedule in schedules) / (products * pairs * issues))
        visit = sum(schedule.bundles for schedule in schedules) / times
        bundles.append(1000 * visit / pairs * flops_ratio(problem, size))
        memory.append(max(used for kernel, used in vmem.items() if kernel.startswith(names)))
    return [
        kernels.whose,
        *(f"{size.q} × {size.k}" for size in best),
        ", ".join(f"{flops_ratio(problem, size):.2f}" for size in best),
        ", ".join(f"{number:.1f}" for number in bundles),
        ", ".join(f"{used:.1f}" for used in memory),
        f"{made.memory_analysis().temp_size_in_bytes / 1e6:.0f}",
    ]


def main() -> None:
    """Compiles, prints, and writes if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=CHIPS)
    parser.add_argument("--shapes", nargs="+", choices=PROBLEMS, default=SHAPES)
    parser.add_argument("--write", type=Path, help="the page whose table gets the rows")
    args = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        schedules = Schedules(Path(folder))
        for name in args.shapes:
            for chip in args.chips:
                lines += (made := rows(chip, name, schedules))
                print(*made, sep="\n", flush=True)
    if args.write:
        pages.update(args.write, "benchmarks/attention_beside.py", HEAD, lines, keys=3)


if __name__ == "__main__":
    main()
