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
}
# A step of decoding; there are no gradients.
FEW = Shape(64, 128, 2048, 768)


def megablox(x, kernel, sizes):
    tiles = tuple(min(size, most) for size, most in zip((*x.shape, kernel.shape[2]), (512, 1024, 1024), strict=True))
    return gmm(x, kernel, sizes, x.dtype, tiles)


WAYS: dict[str, Callable] = {"ragged_dot": jax.lax.ragged_dot, "megablox": megablox}
HEAD = ["shape", "chip", *(f"{how}, {part}" for how in WAYS for part in ("forward", "with gradients", "MB"))]


def compiled(function: Callable, chip: str, arrays, backward: bool) -> jax.stages.Compiled:
    """`function(x, kernels, *rest)`, or the gradients by x and kernels of a sum, for one device of the chip."""
    mesh = one_device(chip)
    place = NamedSharding(mesh, PartitionSpec())
    arrays = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), arrays)

    def gradients(x, kernels, *rest):
        # Of a square, so that the forward product is needed, too.
        return jax.grad(lambda *a: jnp.sum(jnp.square(function(*a, *rest).astype(jnp.float32))), (0, 1))(x, kernels)

    with jax.set_mesh(mesh):
        jitted = jax.jit(gradients if backward else function, compiler_options=products.compiler_options())
        return jitted.lower(*arrays).compile()


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


def measure(name: str, chip: str) -> list[str]:
    """Cells for `HEAD`: FLOPs over those that are needed; MB that the compiler counts, gradients included."""
    shape, cells = SHAPES[name], [name, chip]
    needed = 2 * shape.rows * shape.d_model * shape.d_ff
    for function in WAYS.values():
        arrays = product_arrays(shape)
        forward, both = (compiled(function, chip, arrays, backward).cost_analysis() for backward in (False, True))
        cells += [f"{forward['flops'] / needed:.2f}", f"{both['flops'] / (3 * needed):.2f}"]
        cells += [f"{both['bytes accessed'] / 1e6:.0f}"]
    return cells


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
            rows.append(measure(name, chip))
            print(f"| {' | '.join(rows[-1])} |", flush=True)
    if args.write:
        pages.update(args.write, NAME, HEAD, rows, keys=2)


if __name__ == "__main__":
    main()
