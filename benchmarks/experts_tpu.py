"""Compiles a training step of a mixture of experts for a TPU slice that isn't there, and counts what travels.

    python benchmarks/experts_tpu.py --topology v5p:2x2x4 --model deepseek_v3:671b --cut num_layers=5

needs the libtpu of `jax[tpu]` (or TPU_LIBRARY_PATH=.../libtpu.so) and no TPU. The step is the real one: optimiser,
multi-token prediction and balancing included. Nothing runs: what is printed is what the compiler made of it. `--write
docs/experts.md` puts the row into that page's table, which says what its columns are. A step that the compiler refuses,
such as for want of memory, prints the reason instead and leaves the table alone.
"""

import argparse
import math
import os
import re
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax

from benchmarks import pages
from transformer import config, programs, sharding, spec
from transformer.nn.model import Transformer
from transformer.planning import chips, topology
from transformer.training.state import abstract_state
from transformer.training.step import compile_train_step

HEAD = ["model", "layers", "slice", "mesh", "rows x length", "GiB of", "ragged", "MB at most", "of the rows'", "CPU s"]
NAME = "benchmarks/experts_tpu.py"


def resolved(args) -> config.Run:
    """The run: the published model with some of its numbers cut; bfloat16, remat."""
    page = config.load_config(args.model)
    page.model.update({name: int(value) for name, value in (word.split("=") for word in args.cut)})
    if not page.model.get("mtp", 0):
        page.train.mtp_weight = 0.0
    page.data.update(dict(seq_len=args.seq_len, batch_size=args.rows * args.devices))
    exchange = dict(experts="grouped", expert_exchange=args.exchange, expert_buffer=args.buffer)
    page.compute.update(dict(dtype="bfloat16", remat="full", **exchange))
    page.mesh.update(dict(data=1, fsdp=-1, expert=args.expert))
    return config.resolve(page)


def exchanged_bytes(text: str) -> list[int]:
    """Bytes that a device can send by each ragged all-to-all: those of its operand or of its output, what is less."""
    shapes = {name: (kind, dims) for name, kind, dims in re.findall(r"%(\S+) = \(?(\w+)\[([\d,]*)\]", text)}

    def size(name: str) -> int:
        kind, dims = shapes[name]
        return {"bf16": 2, "f32": 4}[kind] * math.prod(map(int, dims.split(",")))

    found = re.findall(r" ragged-all-to-all(?:-start)?\((.*?)\)", text)
    return sorted(min(map(size, re.findall(r"%([\w.\-]+)", operands)[:2])) for operands in found)


def layers(run: config.Run, model: str) -> str:
    """Layers without and with experts, of the published number of layers, and the modules behind them."""
    sparse = [isinstance(block.ffn, spec.MoE) for block in run.spec.decoder.layers]
    published = config.load_config(model).model
    further = f", {run.spec.mtp.depth} mtp" if run.spec.mtp else ""
    return f"{sparse.count(False)} + {sparse.count(True)} of {published.num_layers}{further}"


def row(run: config.Run, args, compiled, seconds: float) -> list[str]:
    """What the compiler made of the step: cells for `HEAD`."""
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    used = max(memory.peak_memory_in_bytes, held + memory.temp_size_in_bytes)
    mixture = next(b.ffn for b in run.spec.decoder.layers if isinstance(b.ffn, spec.MoE))
    rows = args.rows * args.seq_len * mixture.top_k * run.spec.d_model * 2
    sent = exchanged_bytes(compiled.as_text())
    return [
        args.model,
        layers(run, args.model),
        args.topology,
        f"fsdp {args.devices // args.expert} x expert {args.expert}",
        f"{args.rows} x {args.seq_len}",
        f"{used / 2**30:.1f} of {chips.of_kind(args.kind).offered / chips.GIB:.2f}",
        str(len(sent)),
        _spread([size / 1e6 for size in sent], "{:.1f}"),
        _spread([size / rows for size in sent], "{:.2f}"),
        f"{seconds:.0f}",
    ]


def _spread(values: list[float], form: str) -> str:
    return " to ".join(dict.fromkeys(form.format(value) for value in (values[:1] + values[-1:]))) or "none"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5p:2x2x4", help="such as v5e:4x4, v5p:4x4x4, v6e:4x8, tpu7x:2x2x2")
    parser.add_argument("--model", default="qwen3_moe:30b-a3b", help="family:size")
    parser.add_argument(
        "--cut", nargs="*", default=[], metavar="NAME=NUMBER", help="of the model, such as num_layers=5"
    )
    parser.add_argument("--expert", type=int, default=16, help="size of the expert axis; fsdp takes the rest")
    parser.add_argument("--exchange", default="all_to_all", help="compute.expert_exchange")
    parser.add_argument("--rows", type=int, default=1, help="rows of a device")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--buffer", type=float, default=1.25, help="compute.expert_buffer")
    parser.add_argument("--write", type=Path, help="the page whose table gets the row")
    return parser.parse_args()


def main() -> None:
    """Compiles, prints, and writes if asked."""
    args = arguments()
    devices = topology.parse(args.topology).describe()
    args.devices, args.kind = len(devices), devices[0].device_kind
    run = resolved(args)
    mesh = sharding.make_mesh(run.settings.mesh, devices)
    model = Transformer(run.spec, run.settings.compute)
    state = abstract_state(model, run.settings, mesh)
    # Made outside of the mesh, on which nothing can be computed.
    train_step, batch, start = (
        compile_train_step(model, run.settings),
        programs.abstract_batch(run, mesh),
        time.process_time(),
    )
    with jax.set_mesh(mesh):
        try:
            compiled = train_step.lower(state, batch).compile()
        except jax.errors.JaxRuntimeError as error:
            sys.exit(f"{args.model} on {args.topology}: " + " ".join(str(error).split())[:600])
    made = row(run, args, compiled, time.process_time() - start)
    print(f"| {' | '.join(made)} |")
    if args.write:
        pages.update(args.write, NAME, HEAD, [made], keys=5)


if __name__ == "__main__":
    main()
