"""Compiles a training step of a mixture of experts for a TPU slice that isn't there, and counts what travels.

    TPU_LIBRARY_PATH=.../libtpu.so python benchmarks/experts_tpu.py --topology v5p:2x2x4 --model qwen3_moe:30b-a3b

needs the libtpu of `jax[tpu]` and no TPU. The step is the real one, the model is cut to `--layers`. Nothing runs: what
is printed is what the compiler made of it. Several at once need ALLOW_MULTIPLE_LIBTPU_LOAD=1.
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
from transformer.training.optimizer import make_optimizer
from transformer.training.state import abstract_state
from transformer.training.step import compile_train_step

COLLECTIVES = ("ragged-all-to-all", "all-to-all", "all-gather", "reduce-scatter", "all-reduce", "conditional")


def resolved(args) -> config.Run:
    """The run: the model's published widths, few layers, bfloat16, remat."""
    page = config.load_config(args.model)
    page.model.num_layers = args.layers
    if isinstance(page.model.get("dense_layers"), int):
        page.model.dense_layers = 1
    page.data.update(dict(seq_len=args.seq_len, batch_size=args.rows * args.devices))
    page.compute.update(dict(dtype="bfloat16", remat="full", expert_buffer=args.buffer, experts="grouped"))
    page.mesh.update(dict(data=1, fsdp=-1, expert=args.expert))
    return config.resolve(page)


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


def report(run: config.Run, args, compiled) -> None:
    """Collectives of the program, and what the all-to-alls carry beside the rows that there are."""
    text = compiled.as_text()
    counts = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES}
    memory = compiled.memory_analysis()
    print(f"  {counts}")
    print(f"  peak {memory.peak_memory_in_bytes / 2**30:.2f} GiB a device")
    mixture = next(b.ffn for b in run.spec.decoder.layers if isinstance(b.ffn, spec.MoE))
    tokens = args.rows * args.seq_len
    print(f"  exchange: {exchange.choose(tokens, mixture.top_k, args.expert)}")
    rows = tokens * mixture.top_k * run.spec.d_model * 2
    for line in re.findall(r"^.* ragged-all-to-all(?:-start)?\(.*$", text, re.MULTILINE):
        sent = bytes_at_most(line)
        print(f"  ragged-all-to-all: {sent:,} bytes, {sent / rows:.3f} of tokens x top-k x D x 2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5e:4x4", help="such as v5e:4x4, v5p:2x2x4, v6e:4x4, tpu7x:2x2x2")
    parser.add_argument("--model", default="qwen3_moe:30b-a3b", help="family:size")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--expert", type=int, default=16, help="size of the expert axis; fsdp takes the rest")
    parser.add_argument("--rows", type=int, default=1, help="rows of a device")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--buffer", type=float, default=1.25, help="compute.expert_buffer")
    args = parser.parse_args()
    devices = topologies.get_topology_desc(platform="tpu", topology_name=args.topology).devices
    args.devices = len(devices)
    run = resolved(args)
    mesh = sharding.make_mesh(run.settings.mesh, devices)
    model = Transformer(run.spec, run.settings.compute)
    state = abstract_state(model, make_optimizer(model, run.settings), mesh)
    # Made outside of the mesh, on which nothing can be computed.
    train_step, batch, start = compile_train_step(model, run.settings), abstract_batch(run, mesh), time.perf_counter()
    with jax.set_mesh(mesh):
        compiled = train_step.lower(state, batch).compile()
    shape = {name: size for name, size in mesh.shape.items() if size > 1}
    print(f"{args.model} on {len(devices)} {devices[0].device_kind} {shape}: {time.perf_counter() - start:.0f} s")
    report(run, args, compiled)


if __name__ == "__main__":
    main()
