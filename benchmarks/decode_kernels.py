"""Compiles the decode kernel for TPUs that aren't there, at published shapes, and counts what it reads.

    python benchmarks/decode_kernels.py --write docs/decode_kernels.md     (--chips, --shapes, --steps: some)

needs the libtpu of `jax[tpu]` (or TPU_LIBRARY_PATH=.../libtpu.so) and no TPU. Nothing runs. A line of JSON a shape and
chip, and the page's tables if asked. A cache is laid out as it is inside a loop of steps (features along lanes); a
jitted function that takes one in may find it otherwise and turn it.
"""

import argparse
import dataclasses
import json
import math
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import pages
from transformer import config, families, settings, sharding
from transformer.kernels import decode, decode_blocks
from transformer.nn.context import make_context
from transformer.nn.latent_attention import LatentAttention
from transformer.ops import cache_rows
from transformer.ops.attention import Call, Extra, Where
from transformer.ops.cache import KVCache, extend
from transformer.spec import Mask

LAYERS = 2  # stacked in the cache, of which one is read


@dataclass(frozen=True)
class Chip:
    """A slice's name, and what one JAX device has: HBM GB/s and bfloat16 TFLOP/s as published."""

    topology: str
    bandwidth: float
    flops: float


CHIPS = {
    "v4": Chip("v4:2x2x1", 1228, 275),
    "v5e": Chip("v5e:2x2", 819, 197),
    "v5p": Chip("v5p:2x2x1", 2765, 459),
    "v6e": Chip("v6e:2x2", 1640, 918),
    "tpu7x": Chip("tpu7x:2x2x1", 7380 / 2, 2307 / 2),
}


@dataclass(frozen=True)
class Shape:
    """Attention of one layer at a step of decoding; key heads are those of one device."""

    batch: int
    heads: tuple[int, int]
    dims: tuple[int, int]
    slots: int
    window: int | None = None
    kept: str = "bfloat16"
    shares: int | None = None
    sinks: bool = False
    queries: int = 1


SHAPES = {
    "Llama 3 8B": Shape(8, (32, 8), (128, 128), 8192),
    "Llama 3 8B, int8 cache": Shape(8, (32, 8), (128, 128), 8192, kept="int8"),
    "Llama 3 70B, 1 of 8 devices": Shape(32, (8, 1), (128, 128), 8192),
    "Llama 3 8B, 1 row, 4 queries": Shape(1, (32, 8), (128, 128), 32768, queries=4),
    "Gemma 3 27B, local": Shape(8, (32, 16), (128, 128), 1024, window=1024),
    "Gemma 3 27B, global": Shape(8, (32, 16), (128, 128), 32768),
    "gpt-oss 120B, full": Shape(8, (64, 8), (64, 64), 8192, sinks=True),
    "gpt-oss 120B, local": Shape(8, (64, 8), (64, 64), 128, window=128, sinks=True),
    "DeepSeek-V3": Shape(8, (128, 1), (576, 0), 4096, shares=512),
    "DeepSeek-V3, int8 cache": Shape(8, (128, 1), (576, 0), 4096, shares=512, kept="int8"),
}

UNMOVED = ("bitcast", "tuple", "get-tuple-element", "parameter", "constant")
# Rows x slots of a whole layer's step.
STEPS = ("8x4096", "64x4096", "64x32768")


def one_device(chip: str) -> jax.sharding.Mesh:
    """A mesh of one device of the chip."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip].topology).devices
    return sharding.make_mesh(settings.Mesh(data=1), devices[:1])


def abstract(mesh: jax.sharding.Mesh, shape: tuple[int, ...], dtype, straight: bool = False) -> jax.ShapeDtypeStruct:
    """A whole array on every device; `straight`: its last axis lies along lanes, whatever XLA would choose."""
    place = NamedSharding(mesh, PartitionSpec())
    place = Format(Layout(tuple(range(len(shape)))), place) if straight else place
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def abstract_cache(mesh: jax.sharding.Mesh, batch: int, heads: int, slots: int, dims, kept: str) -> KVCache:
    """A stacked cache with its first layer in view."""
    lead, count = (LAYERS, batch), cache_rows.together(slots, *dims)
    shapes = [(*lead, heads, *cache_rows.shape(slots, dim, count)) for dim in dims]
    keys, values = (abstract(mesh, shape, kept, straight=shape[-1] > 0) for shape in shapes)
    scale = abstract(mesh, (*lead, heads, slots), jnp.float32, straight=True) if kept == "int8" else None
    positions, layer = abstract(mesh, (*lead, slots), jnp.int32), abstract(mesh, (), jnp.int32)
    return KVCache(keys, values, positions, scale, scale if dims[1] else None, layer)


def compile_attention(shape: Shape, mesh: jax.sharding.Mesh) -> tuple[jax.stages.Compiled, decode_blocks.Sizes]:
    """The kernel and what XLA does around it."""
    heads, kv_heads = shape.heads
    cache = abstract_cache(mesh, shape.batch, kv_heads, shape.slots, shape.dims, shape.kept)
    q = abstract(mesh, (shape.batch, shape.queries, heads, shape.dims[0]), jnp.bfloat16)
    positions = (abstract(mesh, (shape.batch, n), jnp.int32) for n in (shape.queries, shape.slots))
    extra = Extra(abstract(mesh, (heads,), jnp.float32) if shape.sinks else None)
    call = Call(Mask(causal=True, window=shape.window), shape.dims[0] ** -0.5)

    def attend(*arguments):
        return decode.attend(call, *arguments, shape.shares)

    with jax.set_mesh(mesh):
        compiled = jax.jit(attend).lower(q, cache, Where(*positions), extra).compile()
    return compiled, decode.sizes_of(call, q, cache, shape.shares)


def loop_bytes(shape: Shape, mesh: jax.sharding.Mesh) -> tuple[int, int]:
    """Temporary bytes of a loop of steps that write a token to each layer's cache and look at it, and the cache's."""
    heads, kv_heads = shape.heads
    cache = abstract_cache(mesh, shape.batch, kv_heads, shape.slots, shape.dims, shape.kept)
    q = abstract(mesh, (shape.batch, 1, heads, shape.dims[0]), jnp.bfloat16)
    call = Call(Mask(causal=True, window=shape.window), shape.dims[0] ** -0.5)

    def layer(carry, i):
        cache, q, positions = carry
        new = q[:, :, :kv_heads], q[:, :, :kv_heads, : shape.dims[1]], positions
        cache, seen = extend(cache.view(i), call.mask, *new)
        y = decode.attend(call, q, seen, Where(positions, seen.held), value_dim=shape.shares)
        return (cache.view(None), q.at[..., : y.shape[-1]].add(y), positions), None

    def steps(cache, q, positions):
        def step(i, carry):
            (cache, q, positions), _ = jax.lax.scan(layer, carry, jnp.arange(LAYERS))
            return cache, q, positions + 1

        return jax.lax.fori_loop(0, 16, step, (cache.view(None), q, positions))

    places = dataclasses.replace(jax.tree.map(lambda a: a.format if a.size else a.sharding, cache), layer=None)
    with jax.set_mesh(mesh):
        loop = jax.jit(steps, donate_argnums=0, out_shardings=(places, None, None))
        compiled = loop.lower(cache, q, abstract(mesh, (shape.batch, 1), jnp.int32)).compile()
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    return compiled.memory_analysis().temp_size_in_bytes, held


def copies(text: str, numbers: int) -> int:
    """Operations of a program that copy as many numbers as a cache has, or more."""
    found = re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", _entry(text))
    return sum(math.prod(int(n) for n in dims.split(",") if n) >= numbers for dims in found)


def moved_bytes(text: str, kernel: int, cache: int) -> int:
    """Bytes that the operations of a program read from HBM and write there.

    The compiler's own sum counts what lies in nearer memories, and both loads of what is loaded for the next call, too.
    Scatters are in place: what they move is too little to count; gathers read what they give.

    Args:
      kernel: bytes of keys and values that the decode kernel reads; what else it reads is smaller than `cache` bytes.
    """
    here, early, total = {}, set(), 0
    line = re.compile(r"^\s*(?:ROOT )?%(\S+) = (.*?) ([\w\-]+)\((.*)$", re.MULTILINE)
    for name, kind, operation, rest in line.findall(_entry(text)):
        operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
        sizes = [here.get(operand, 0) for operand in operands]
        read, here[name] = sum(sizes), _bytes(kind)
        if operation.endswith("-start"):  # what it takes along is counted where it arrives
            here[name] = 0
            early |= {name} if "cross_program_prefetch" in rest else set()
        elif operation.endswith("-done"):
            total += here[name] + (0 if operands[0] in early else _bytes(kind, everywhere=True))
        elif name.startswith("decode_attention"):  # and queries, positions and output, those in HBM
            total += kernel + sum(size for size in sizes if size < cache) + here[name]
        elif name.startswith("gather"):
            total += 2 * here[name]
        elif operation not in UNMOVED and not name.startswith("scatter"):
            total += read + here[name]
    return total


def _entry(text: str) -> str:
    """What runs; the computations before it are parts of its operations."""
    return text[text.index("\nENTRY") :]


def _bytes(kind: str, everywhere: bool = False) -> int:
    """Bytes of the arrays of a type that lie in HBM, or of all."""
    width, total = {"bf16": 2, "f32": 4, "s32": 4, "s8": 1, "pred": 1}, 0
    for dtype, dims, layout in re.findall(r"(\w+)\[([\d,]*)\]\{([^}]*)\}", kind):
        if everywhere or "S(" not in layout:
            total += width.get(dtype, 0) * math.prod(int(n) for n in dims.split(",") if n)
    return total


def measure(name: str, chip: str) -> dict:
    """A row of the table of shapes."""
    shape, start = SHAPES[name], time.time()
    compiled, sizes = compile_attention(shape, one_device(chip))
    blocks = decode_blocks.choose(sizes)
    padded = sizes.cache_bytes(padded=True)
    return dict(
        shape=name,
        chip=chip,
        block=f"{blocks.heads} x {blocks.slots}, {blocks.count}",
        vmem_MiB=round(decode_blocks.vmem_bytes(sizes, blocks.heads, blocks.slots) / 2**20, 1),
        cache_MB=round(sizes.cache_bytes() / 1e6, 2),
        padded_MB=round(padded / 1e6, 2),
        accessed_MB=round(compiled.cost_analysis()["bytes accessed"] / 1e6, 2),
        copies=copies(compiled.as_text(), LAYERS * sizes.batch * sizes.heads * sizes.slots * sizes.key),
        memory_us=round(padded / CHIPS[chip].bandwidth / 1e3, 1),
        arithmetic_us=round(decode_blocks.cost(sizes).flops / CHIPS[chip].flops / 1e6, 1),
        compile_s=round(time.time() - start, 1),
    )


def measure_latent_step(chip: str, batch: int, slots: int) -> dict:
    """Bytes of one decode step of DeepSeek-V3's attention layer, projections and write included."""
    mesh = one_device(chip)
    model = families.build_spec(config.load_config("deepseek_v3:671b").model.to_dict())
    spec = model.decoder.body[0].mixer
    net = LatentAttention(spec, settings.Compute(dtype="bfloat16", decode_attention="kernel"), 1.0)

    def apply(params, x, positions, cache):
        y, cache = net.apply({"params": params}, x, make_context((spec.rope,), positions), cache)
        return y, cache.view(None)

    def init():
        x, positions = jnp.zeros((batch, 1, model.d_model)), jnp.zeros((batch, 1), jnp.int32)
        return nn.meta.unbox(net.init(jax.random.key(0), x, make_context((spec.rope,), positions), None)["params"])

    params = jax.tree.map(lambda p: abstract(mesh, p.shape, jnp.bfloat16), jax.eval_shape(init))
    x, at = abstract(mesh, (batch, 1, model.d_model), jnp.bfloat16), abstract(mesh, (batch, 1), jnp.int32)
    dims = spec.cache_dims
    cache = abstract_cache(mesh, batch, 1, slots, (dims.key, dims.value), "bfloat16")
    places = dataclasses.replace(jax.tree.map(lambda a: a.format if a.size else a.sharding, cache), layer=None)
    with jax.set_mesh(mesh):
        step = jax.jit(apply, donate_argnums=3, out_shardings=(None, places))
        compiled = step.lower(params, x, at, cache).compile()
    weights = sum(p.size * 2 for p in jax.tree.leaves(params))
    held, positions = batch * slots * (dims.key * 2 + 4), batch * slots * 4
    rows, lanes = cache.keys.shape[-2:]
    padded = batch * rows * -(-lanes // cache_rows.LANES) * cache_rows.LANES * 2 + positions
    moved = moved_bytes(compiled.as_text(), kernel=padded - positions, cache=LAYERS * batch * slots * dims.key)
    return dict(
        step=f"DeepSeek-V3 attention layer, {batch} x {slots}",
        chip=chip,
        cache_MB=round(held / 1e6, 2),
        padded_MB=round(padded / 1e6, 2),
        weights_MB=round(weights / 1e6, 2),
        moved_MB=round(moved / 1e6, 2),
        ratio=round(moved / (held + weights), 3),
        copies=copies(compiled.as_text(), LAYERS * batch * slots * dims.key),
    )


def main() -> None:
    """Compiles, prints, and writes if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--steps", nargs="*", default=list(STEPS), help="the whole layer's steps: rows x slots")
    parser.add_argument("--write", type=Path, help="the page whose tables get the rows")
    args = parser.parse_args()
    rows = []
    for chip in args.chips:
        for name in (*args.shapes, *args.steps):
            row = measure(name, chip) if name in SHAPES else measure_latent_step(chip, *map(int, name.split("x")))
            rows.append(row)
            print(json.dumps(row), flush=True)
    for kind in ("shape", "step"):
        found = [row for row in rows if kind in row]
        if args.write and found:
            cells = [list(map(str, row.values())) for row in found]
            pages.update(args.write, f"benchmarks/decode_kernels.py, {kind}s", list(found[0]), cells, keys=2)


if __name__ == "__main__":
    main()
