"""Tokens a second of the training step beside the same model in PyTorch, and beside the floor of this machine.

    TRANSFORMER_ORACLE_PYTHON=/path/to/python python benchmarks/train_step.py
    TRANSFORMER_ORACLE_PYTHON=/path/to/python python benchmarks/train_step.py --model mixtral

One run measures both, in turns: ours, torch, ours, torch … each idle while the other runs, so that what else the
machine does falls on both alike. Rows are float32 and bfloat16 (autocast in PyTorch; parameters and optimiser are
float32 in both). Both clip gradients and run AdamW (fused in PyTorch); neither has dropout; experts are balanced by
the same coefficient in both. The floor is the time that the model FLOPs (planning/accounting.py) take at the speed of
the best large matmul of the same run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from transformer import config, sharding
from transformer.config import Run
from transformer.nn.model import Transformer
from transformer.planning.accounting import flops_per_token
from transformer.planning.matmuls import matmul_flops
from transformer.training.state import init_state
from transformer.training.step import compile_train_step, make_train_step

WORKER = Path(__file__).with_name("torch_models.py")
# What is compared, without --…: rows of a step, and the dimensions of the model.
MODELS = {
    "gpt2": (16, "gpt2:small", dict(vocab_size=50257, d_model=384, num_layers=6, num_heads=6)),
    "mixtral": (
        8,
        "mixtral:8x7b",
        dict(
            vocab_size=8192,
            d_model=256,
            num_layers=4,
            num_heads=8,
            num_kv_heads=4,
            head_dim=32,
            d_ff=512,
            num_experts=8,
            top_k=2,
        ),
    ),
}


class Ours:
    """Our training step on one batch of random tokens."""

    def __init__(self, run: Run):
        self.mesh = sharding.make_mesh(run.settings.mesh)
        self.model = Transformer(run.spec, run.settings.compute)
        self.state = init_state(self.model, run.settings, self.mesh)
        self.batch = jax.device_put(random_batch(run), sharding.batch_sharding(self.mesh))
        with jax.set_mesh(self.mesh):
            # Counted before the step takes the state away. Every row is one segment, so leaving segments out runs
            # the same products, in loops whose lengths are known.
            unpacked = self.batch | {"segment_ids": None}
            step = make_train_step(self.model, run.settings)
            # How many tiles the experts' loops run depends on the loads.
            self.products = None if "top_k" in run.values["model"] else matmul_flops(step, self.state, unpacked)
        self.step = compile_train_step(self.model, run.settings)

    def run(self, steps: int) -> dict:
        """Trains `steps` steps; wall seconds and the last loss in nats a token."""
        start = time.perf_counter()
        with jax.set_mesh(self.mesh):
            for _ in range(steps):
                self.state, metrics = self.step(self.state, self.batch)
            jax.block_until_ready(self.state)
        return {"seconds": time.perf_counter() - start, "loss": float(metrics["loss"])}


class Torch:
    """The worker process, and what it answers."""

    def __init__(self, run: Run, attention: str, experts: str):
        python = os.environ.get("TRANSFORMER_ORACLE_PYTHON", sys.executable)
        self.process = subprocess.Popen([python, WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        shape, o = run.values["model"], run.settings.optimizer
        optimizer = dict(learning_rate=o.peak_lr, betas=[o.b1, o.b2], eps=o.eps, weight_decay=o.weight_decay)
        rows = dict(batch_size=run.settings.data.batch_size, seq_len=run.settings.data.seq_len)
        how = dict(dtype=run.settings.compute.dtype, attention=attention, experts=experts, clip_norm=o.clip_norm)
        self.description = self.ask(shape | optimizer | rows | how | dict(auxiliary=run.settings.balance.auxiliary))

    def ask(self, request: dict) -> dict:
        """One request, one answer."""
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            sys.exit(
                f"error: {self.process.args[0]} ended ({self.process.wait()}); it needs torch and transformers: "
                "name an interpreter that has them in TRANSFORMER_ORACLE_PYTHON, or give --no-torch"
            )
        return json.loads(line)

    def run(self, steps: int) -> dict:
        """Trains `steps` steps; wall seconds and the last loss in nats a token."""
        return self.ask({"steps": steps})

    def close(self) -> None:
        """Ends the worker."""
        self.process.stdin.close()
        self.process.wait()


class Peak:
    """The fastest square matmul seen, FLOP/s."""

    def __init__(self, dtype: str, size: int = 2048):
        self.x, self.flops, self.best = jnp.ones((size, size), dtype), 2 * size**3, 0.0
        self.multiply = jax.jit(jnp.matmul)
        self.multiply(self.x, self.x).block_until_ready()

    def measure(self, tries: int = 3) -> None:
        """Some more tries."""
        for _ in range(tries):
            start = time.perf_counter()
            self.multiply(self.x, self.x).block_until_ready()
            self.best = max(self.best, self.flops / (time.perf_counter() - start))


def random_batch(run: Run) -> dict[str, np.ndarray]:
    """Full rows of one document each; every token counts in the loss."""
    shape = run.settings.data.batch_size, run.settings.data.seq_len
    tokens = np.random.default_rng(0).integers(0, run.spec.vocab_size, (shape[0], shape[1] + 1), dtype=np.int32)
    ones = np.ones(shape, np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "target_bytes": ones,
        "segment_ids": ones,
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        "weights": np.ones(shape, np.float32),
    }


def make_run(arguments: argparse.Namespace, dtype: str) -> Run:
    """The run that the command line describes, in one dtype."""
    rows, published, shape = MODELS[arguments.model]
    values = config.load_config(published)
    given = {name: getattr(arguments, name) for name in shape if getattr(arguments, name, None) is not None}
    values.model.update(shape | given | dict(max_length=arguments.seq_len))
    values.data.update(seq_len=arguments.seq_len, batch_size=arguments.batch_size or rows)
    values.compute.update(dtype=dtype, attention=arguments.attention, loss_chunk=arguments.loss_chunk)
    return config.resolve(values)


def compare(run: Run, arguments: argparse.Namespace) -> None:
    """Measures one dtype and prints its rows."""
    dtype = run.settings.compute.dtype
    ours, peak = Ours(run), Peak(dtype)
    torch = None if arguments.no_torch else Torch(run, arguments.torch_attention, arguments.torch_experts)
    sides = [side for side in (ours, torch) if side]
    for side in sides:  # compilation and first touches
        side.run(2)
    laps = []
    for _ in range(arguments.pairs):
        laps.append([side.run(arguments.steps) for side in sides])
        peak.measure()
    if torch:
        torch.close()
    tokens = run.settings.data.batch_size * run.settings.data.seq_len
    print(f"\n{dtype}: B {run.settings.data.batch_size}, {run.values['model']}")
    for i, name in enumerate(("ours", "torch")[: len(sides)]):
        seconds = [lap[i]["seconds"] / arguments.steps for lap in laps]
        speeds = [tokens / s for s in seconds]
        spread = f"{min(speeds):,.0f} to {max(speeds):,.0f}"
        print(f"  {name:6} {statistics.median(speeds):9,.0f} tokens/s  ({spread})   loss {laps[-1][i]['loss']:.3f}")
    if torch:
        ratios = [lap[1]["seconds"] / lap[0]["seconds"] for lap in laps]
        print(f"  ratio  {statistics.median(ratios):9.3f} ours/torch  ({min(ratios):.3f} to {max(ratios):.3f})")
        print(f"  torch: {json.dumps(torch.description)}")
    print_floor(run, ours, peak.best, statistics.median(lap[0]["seconds"] / arguments.steps for lap in laps))


def print_floor(run: Run, ours: Ours, peak: float, seconds: float) -> None:
    """The time that the matrix products alone need, and what part of our step it is."""
    data = run.settings.data
    model_flops = flops_per_token(run.spec, data.seq_len, training=True).total * data.batch_size * data.seq_len
    print(f"  matmul {peak / 1e9:9,.0f} GFLOP/s at best")
    # What runs is more than the model's FLOPs: masked scores, and logits that the loss makes again.
    for name, flops in (("model FLOPs", model_flops), ("products run", ours.products)):
        if flops is not None:
            part = flops / peak / seconds
            print(f"  floor  {flops / peak:9.2f} s for {flops / 1e9:,.0f} G {name}: {part:.1%} of our step")


def main() -> None:
    """Reads the command line and compares in float32, then in bfloat16."""
    parser = argparse.ArgumentParser(description="Our training step beside the same model in PyTorch.")
    parser.add_argument("--model", default="gpt2", choices=MODELS)
    for name in ("num-layers", "d-model", "num-heads", "vocab-size", "num-experts", "top-k", "d-ff"):
        parser.add_argument(f"--{name}", type=int, help="default: MODELS")
    parser.add_argument("--seq-len", type=int, default=256, help="T")
    parser.add_argument("--batch-size", type=int, help="B; default: MODELS")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--attention", default="auto", help="our compute.attention (default: auto)")
    parser.add_argument("--loss-chunk", type=int, default=1024, help="our compute.loss_chunk (default: 1024)")
    parser.add_argument("--torch-attention", default="sdpa", choices=["sdpa", "eager"])
    parser.add_argument("--torch-experts", default="grouped_mm", choices=["grouped_mm", "batched_mm", "eager"])
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each side (default: 5)")
    parser.add_argument("--steps", type=int, default=2, help="steps of one measurement (default: 2)")
    parser.add_argument("--no-torch", action="store_true", help="measure our side and the floor alone")
    arguments = parser.parse_args()
    print(f"{arguments.pairs} pairs of {arguments.steps} steps; jax {jax.__version__}, {jax.devices()}")
    for dtype in arguments.dtypes:
        compare(make_run(arguments, dtype), arguments)


if __name__ == "__main__":
    main()
