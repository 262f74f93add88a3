"""Compiles a training step of a mixture of experts for a TPU slice that isn't there, and counts what travels.

    python benchmarks/experts_tpu.py --topology v5p:4x4x4 --model qwen3_moe:30b-a3b

needs the libtpu of `jax[tpu]` (or TPU_LIBRARY_PATH=.../libtpu.so) and no TPU. The step is the real one: optimiser,
multi-token prediction and balancing included. Nothing runs: what is printed is what the compiler made of it; the last
line is a row of a table (docs/experts.md names its columns). Several at once need ALLOW_MULTIPLE_LIBTPU_LOAD=1.
"""

import argparse
import math
import os
import re
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from transformer import config, sharding, spec
from transformer.nn.model import Transformer
from transformer.ops.experts import exchange
from transformer.training.state import abstract_state
from transformer.training.step import compile_train_step

COLLECTIVES = ("ragged-all-to-all", "all-to-all", "all-gather", "reduce-scatter", "all-reduce", "conditional")


def resolved(args) -> config.Run:
    """The run: the published model, or as many of its layers as asked for; bfloat16, remat."""
    page = config.load_config(args.model)
    page.model.num_layers = args.layers or page.model.num_layers
    page.data.update(dict(seq_len=args.seq_len, batch_size=args.rows * args.devices))
    page.compute.update(dict(dtype="bfloat16", remat="full", expert_buffer=args.buffer, experts="grouped"))
    page.mesh.update(dict(data=1, fsdp=-1, expert=args.expert))
    return config.resolve(page)


def topology(name: str):
    """The slice: links go around where a dimension is whole, a row of 16 in two dimensions or cubes of 4 in three."""
    sizes = [int(size) for size in name.split(":")[1].split("x")]
    ring = 16 if len(sizes) == 2 else 4
    wrap = tuple(size % ring == 0 for size in sizes) + (False,) * (3 - len(sizes))
    return topologies.get_topology_desc(platform="tpu", topology_name=name, wrap=wrap)


def abstract_batch(run: config.Run, mesh: jax.sharding.Mesh) -> dict:
    """Shapes of a batch."""
    place = sharding.batch_sharding(mesh)
    shape = run.settings.data.batch_size, run.settings.data.seq_len
    integers = ("tokens", "targets", "target_bytes", "segment_ids", "positions")
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place) for name in integers}
    return batch | {"weights": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)}


def bytes_at_most(line: str) -> int:
    """Bytes that a device can send by a ragged all-to-all: those of its operand or of its output, what is less."""
    buffers = re.findall(r"(bf16|f32)\[([\d,]+)\]", line)[:2]
    return min({"bf16": 2, "f32": 4}[kind] * math.prod(map(int, dims.split(","))) for kind, dims in buffers)


def report(run: config.Run, args, compiled, seconds: float) -> None:
    """Collectives of the program, and what the all-to-alls carry beside the rows that there are."""
    text = compiled.as_text()
    counts = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES}
    print(f"  {counts}")
    peak = compiled.memory_analysis().peak_memory_in_bytes / 2**30
    mixture = next(b.ffn for b in run.spec.decoder.layers if isinstance(b.ffn, spec.MoE))
    tokens = args.rows * args.seq_len
    print(f"  exchange: {exchange.choose(tokens, mixture.top_k, args.expert)}")
    rows = tokens * mixture.top_k * run.spec.d_model * 2
    lines = re.findall(r"^.* ragged-all-to-all(?:-start)?\(.*$", text, re.MULTILINE)
    parts = sorted(bytes_at_most(line) / rows for line in lines)
    spread = f"{parts[0]:.3f} to {parts[-1]:.3f}" if parts else "none"
    print(f"  ragged-all-to-all: {len(parts)} of {spread} times tokens x top-k x D x 2 = {rows:,} bytes")
    layers = f"{len(run.spec.decoder.layers)} of {config.load_config(args.model).model.num_layers}"
    mesh = f"fsdp {args.devices // args.expert} x expert {args.expert}"
    print(
        f"| {args.model} | {layers} | {args.topology} | {mesh} | {args.rows} x {args.seq_len} | {seconds:.0f} | "
        f"{peak:.1f} | {len(parts)} | {spread} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5e:16x16", help="such as v5e:16x16, v5p:4x4x4, v6e:8x8, tpu7x:4x4x4")
    parser.add_argument("--model", default="qwen3_moe:30b-a3b", help="family:size")
    parser.add_argument("--layers", type=int, default=0, help="the first so many layers (default: all, as published)")
    parser.add_argument("--expert", type=int, default=16, help="size of the expert axis; fsdp takes the rest")
    parser.add_argument("--rows", type=int, default=1, help="rows of a device")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--buffer", type=float, default=1.25, help="compute.expert_buffer")
    args = parser.parse_args()
    devices = topology(args.topology).devices
    args.devices = len(devices)
    run = resolved(args)
    mesh = sharding.make_mesh(run.settings.mesh, devices)
    model = Transformer(run.spec, run.settings.compute)
    state = abstract_state(model, run.settings, mesh)
    # Made outside of the mesh, on which nothing can be computed.
    train_step, batch, start = compile_train_step(model, run.settings), abstract_batch(run, mesh), time.perf_counter()
    with jax.set_mesh(mesh):
        compiled = train_step.lower(state, batch).compile()
    print(f"{args.model} on {len(devices)} devices, {devices[0].device_kind}")
    report(run, args, compiled, time.perf_counter() - start)


if __name__ == "__main__":
    main()
