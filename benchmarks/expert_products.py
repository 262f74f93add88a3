"""Compiles the matrix products of experts for TPUs that aren't there, one way beside the other, and counts FLOPs.

    python benchmarks/expert_products.py --write docs/experts.md

needs the libtpu of `jax[tpu]` (or TPU_LIBRARY_PATH=.../libtpu.so) and no TPU. Nothing runs. `products` is what experts
run (`ops/experts/products.py`); the other ways are single products of the same shape.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import pages
from benchmarks.decode_kernels import CHIPS, one_device
from transformer.ops.experts import ExpertWeights, products
from transformer.ops.experts.slots import Slots
from transformer.spec import FeedForward

NAME = "benchmarks/expert_products.py"
HEAD = ["shape", "chip", "how", "FLOPs, forward", "with gradients", "MB accessed"]
KERNEL = {"xla_tpu_enable_ragged_dot_kernel": True}


@dataclass(frozen=True)
class Shape:
    """Rows and experts of one device, and their widths."""

    rows: int
    experts: int
    d_model: int
    d_ff: int


SHAPES = {
    "Qwen3-30B-A3B, 1 of 16 devices": Shape(32768, 8, 2048, 768),
    "DeepSeek-V3, 1 of 16 devices": Shape(32768, 16, 7168, 2048),
    "Qwen3-30B-A3B, 8 tokens": Shape(64, 128, 2048, 768),
}


def ragged_dot(x, kernel, sizes):
    return jax.lax.ragged_dot(x, kernel, sizes)


def megablox(x, kernel, sizes):
    tiles = tuple(min(size, most) for size, most in zip((*x.shape, kernel.shape[2]), (512, 1024, 1024), strict=True))
    return gmm(x, kernel, sizes, x.dtype, tiles)


# A product, and the compiler's options.
WAYS: dict[str, tuple[Callable, dict]] = {
    "ragged_dot": (ragged_dot, {}),
    "ragged_dot, kernel asked for": (ragged_dot, KERNEL),
    "megablox": (megablox, {}),
}


def compiled(function: Callable, chip: str, arrays, options: dict | None, backward: bool) -> jax.stages.Compiled:
    """`function(x, kernels, *rest)`, or the gradients by x and kernels of a sum, for one device of the chip.

    `options` of the compiler; None: those that training gives it.
    """
    mesh = one_device(chip)
    place = NamedSharding(mesh, PartitionSpec())
    arrays = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), arrays)

    def gradients(x, kernels, *rest):
        # Of a square, so that the forward product is needed, too.
        return jax.grad(lambda *a: jnp.sum(jnp.square(function(*a, *rest).astype(jnp.float32))), (0, 1))(x, kernels)

    with jax.set_mesh(mesh):
        options = products.compiler_options() if options is None else options
        return jax.jit(gradients if backward else function, compiler_options=options).lower(*arrays).compile()


def product_arrays(shape: Shape) -> tuple:
    """Shapes of x, kernel and sizes of the first product."""
    kernel = jax.ShapeDtypeStruct((shape.experts, shape.d_model, shape.d_ff), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((shape.experts,), jnp.int32)
    return jax.ShapeDtypeStruct((shape.rows, shape.d_model), jnp.bfloat16), kernel, sizes


def layer_arrays(shape: Shape) -> tuple:
    """Shapes of x, weights and slots of a gated layer."""
    x, up, sizes = product_arrays(shape)
    down = jax.ShapeDtypeStruct((shape.experts, shape.d_ff, shape.d_model), jnp.bfloat16)
    rows, one = (jax.ShapeDtypeStruct(dims, jnp.int32) for dims in ((shape.rows,), ()))
    slots = Slots(rows, jax.ShapeDtypeStruct((shape.rows, 1), jnp.int32), rows, one, sizes)
    return x, ExpertWeights(up, up, down), slots


def layer(x, w: ExpertWeights, slots: Slots):
    """What a device runs of a gated layer: three products."""
    spec = FeedForward(d_ff=w.up.shape[-1], activation="silu", gated=True, bias=False)
    return products.ragged(spec, x, slots, w)


def measure(name: str, chip: str, how: str) -> list[str]:
    """Cells for `HEAD`: FLOPs over those that are needed."""
    shape = SHAPES[name]
    needed = 2 * shape.rows * shape.d_model * shape.d_ff
    function, options = WAYS[how]
    forward, both = (compiled(function, chip, product_arrays(shape), options, backward) for backward in (False, True))
    ratios = (program.cost_analysis()["flops"] / (times * needed) for program, times in ((forward, 1), (both, 3)))
    accessed = both.cost_analysis()["bytes accessed"] / 1e6
    return [name, chip, how, *(f"{ratio:.2f}" for ratio in ratios), f"{accessed:.0f}"]


def main() -> None:
    """Compiles, prints, and writes if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--write", type=Path, help="the page whose table is to be replaced")
    args = parser.parse_args()
    rows = []
    for name in args.shapes:
        for chip in args.chips:
            for how in WAYS:
                try:
                    rows.append(measure(name, chip, how))
                except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
                    rows.append([name, chip, how, " ".join(str(error).split())[:80].replace("|", "/"), "", ""])
                print(f"| {' | '.join(rows[-1])} |", flush=True)
    if args.write:
        pages.update(args.write, NAME, HEAD, rows, keys=3)


if __name__ == "__main__":
    main()
