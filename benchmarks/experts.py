"""Speed of the expert layer's bodies beside `dense`, and how fast a collapsed router recovers.

    python benchmarks/experts.py speed
    python benchmarks/experts.py balance --figure docs/figures/balance.svg

Times are taken in turns in one process and reported as ratios, so that a machine that is busy with something else
slows all alike. They decide `choose` (ops/experts/__init__.py) and the tiles (ops/experts/products.py). `balance`
starts from a router that sends every token to one expert, prints the largest load over the mean, per step, and draws
it.
"""

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from transformer import config, sharding
from transformer.nn.model import Transformer
from transformer.ops import experts
from transformer.ops.experts import products
from transformer.settings import Mesh
from transformer.spec import FeedForward
from transformer.tokenizer import load_tokenizer
from transformer.training import data
from transformer.training.examples import shape_of
from transformer.training.state import init_state
from transformer.training.step import compile_train_step

BODIES = ("dense", "grouped", "capacity")


def passes(body: str, call: experts.Call, backward: bool):
    """A jitted (x, index, weight, w) -> y, or the gradients of x, weight and w."""

    def value(x, weight, w, index):
        return experts.apply(body, call, x, index, weight, w)[0]

    def loss(*args):
        return jnp.sum(value(*args).astype(jnp.float32) ** 2)

    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2)) if backward else value)
    return lambda x, index, weight, w: run(x, weight, w, index)


def inputs(args, num_experts: int):
    keys = jax.random.split(jax.random.key(0), 5)
    width, hidden = args.d_model, args.d_ff
    shapes = ((num_experts, width, hidden), (num_experts, width, hidden), (num_experts, hidden, width))
    w = experts.ExpertWeights(*(jax.random.normal(k, s) / s[1] ** 0.5 for k, s in zip(keys, shapes, strict=False)))
    x = jax.random.normal(keys[3], (1, args.tokens, width))
    logits = jax.random.normal(keys[4], (1, args.tokens, num_experts))
    weight, index = jax.lax.top_k(jax.nn.softmax(logits), args.top_k)
    return x, index, weight, w


def paired(functions, values, tries: int) -> list[list[float]]:
    """Seconds of each function, called in turns."""
    for f in functions:
        jax.block_until_ready(f(*values))
    taken = [[] for _ in functions]
    for _ in range(tries):
        for f, row in zip(functions, taken, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(f(*values))
            row.append(time.perf_counter() - start)
    return taken


def print_speed(args) -> None:
    print(f"N={args.tokens} top-{args.top_k} D={args.d_model} F={args.d_ff}, float32, {jax.default_backend()}")
    print("time of dense / time of the body: median of pairs")
    print(f"{'experts':>8} {'pass':>9} {'dense':>10} {'tile':>5} " + " ".join(f"{body:>9}" for body in BODIES[1:]))
    spec = FeedForward(d_ff=args.d_ff, activation="silu", gated=True, bias=False)
    for num_experts in args.experts:
        call, values = experts.Call(spec, num_experts), inputs(args, num_experts)
        tile = products.tile_rows(args.tokens * args.top_k, num_experts)
        for backward in (False, True):
            functions = [passes(body, call, backward) for body in BODIES]
            base, *rest = (np.array(row) for row in paired(functions, values, args.tries))
            ratios = " ".join(f"{np.median(base / row):8.1f}x" for row in rest)
            name = "gradient" if backward else "forward"
            print(f"{num_experts:8d} {name:>9} {np.median(base) * 1e3:8.1f}ms {tile:5d} {ratios}", flush=True)


# What balances, alone: a field of `balance`, its value, and a family whose tiny size it balances.
REMEDIES = {
    "none": ("correction_rate", 0.0, "deepseek_v3"),
    "loss-free": ("correction_rate", 0.02, "deepseek_v3"),
    "auxiliary": ("auxiliary", 0.1, "mixtral"),
    "sequence": ("sequence", 0.1, "deepseek_v3"),
}


def recovery(remedy: str, steps: int) -> Iterator[float]:
    """Largest load over the mean, in the worst layer, at each step of training from a collapsed router."""
    field, value, family = REMEDIES[remedy]
    page = config.load_config(f"{family}:tiny")
    page.data.seq_len, page.data.batch_size, page.train.steps = 64, 16, steps
    page.balance.update(dict.fromkeys(page.balance, 0.0) | {field: value})
    run = config.resolve(page)
    model, mesh = Transformer(run.spec, run.settings.compute), sharding.make_mesh(Mesh(), jax.devices()[:1])
    state = init_state(model, run.settings, mesh)
    state = state.replace(params=collapsed(state.params))
    batches = data.train_iterator(run.settings.data, load_tokenizer(run.settings.data.tokenizer), shape_of(run.spec))
    with jax.set_mesh(mesh):
        train_step = compile_train_step(model, run.settings)
        for _ in range(steps):
            state, values = train_step(state, next(batches))
            yield max(float(jnp.max(layer["violation"])) for layer in values["experts"].values())
    batches.close()


def collapsed(params: dict) -> dict:
    """Parameters with which all tokens point in one direction, and every router sends that direction to expert 0."""

    def push(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name == "embedding/token":
            return leaf + 1 / math.sqrt(leaf.shape[-1])
        return leaf.at[..., 0].add(1 / math.sqrt(leaf.shape[-2])) if name.endswith("router/kernel") else leaf

    return jax.tree.map_with_path(push, params)


def print_balance(args) -> None:
    print(f"largest load / mean load in the worst layer, from a collapsed router; first step below {args.below}")
    curves = {remedy: list(recovery(remedy, args.steps)) for remedy in args.remedies}
    print(f"{'step':>6} " + " ".join(f"{remedy:>10}" for remedy in curves))
    for step in sorted({0, *range(0, args.steps, args.every), args.steps - 1}):
        print(f"{step:6d} " + " ".join(f"{curve[step]:10.3f}" for curve in curves.values()))
    reached = [next((str(i) for i, v in enumerate(curve) if v < args.below), "never") for curve in curves.values()]
    print(f"{'below':>6} " + " ".join(f"{step:>10}" for step in reached))
    if args.figure:
        args.figure.parent.mkdir(parents=True, exist_ok=True)
        args.figure.write_text(drawn(curves, args.below))


COLORS = ("#4477aa", "#ee6677", "#228833", "#aa3377")  # told apart by colour-blind readers, too (Paul Tol)


def drawn(curves: dict[str, list[float]], below: float) -> str:
    """A picture of the curves, as SVG; the dashed line is at `below`."""
    width, height, left, bottom = 560, 260, 40, 30
    steps, top = max(map(len, curves.values())), math.ceil(max(map(max, curves.values())))

    def x(step: float) -> float:
        return left + (width - left - 10) * step / steps

    def y(value: float) -> float:
        return 10 + (height - 10 - bottom) * (top - value) / (top - 1)

    def text(x: float, y: float, words: str, rest: str = "") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" {rest}>{words}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="Arial" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<path d="M{left} 10V{y(1):.0f}H{width - 10}" fill="none" stroke="black"/>',
        f'<path d="M{left} {y(below):.1f}H{width - 10}" stroke="gray" stroke-dasharray="4"/>',
        *(text(left - 6, y(value) + 4, value, 'text-anchor="end"') for value in (*range(1, top + 1), below)),
        *(text(x(step), height - 14, step, 'text-anchor="middle"') for step in range(0, steps + 1, 50)),
        text(left + 8, 20, "largest load / mean load, in the worst layer"),
        text(width - 10, height - 2, "step", 'text-anchor="end"'),
    ]
    for i, (remedy, curve) in enumerate(curves.items()):
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in enumerate(curve))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLORS[i]}"/>')
        parts.append(text(width - 100, 40 + 16 * i, remedy, f'fill="{COLORS[i]}"'))
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    speed = commands.add_parser("speed", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    speed.set_defaults(run=print_speed)
    speed.add_argument("--tokens", type=int, default=4096, help="N")
    speed.add_argument("--experts", type=int, nargs="+", default=[4, 8, 16, 64], help="E of each line")
    speed.add_argument("--top-k", type=int, default=2, help="experts of a token")
    speed.add_argument("--d-model", type=int, default=256, help="D")
    speed.add_argument("--d-ff", type=int, default=512, help="F, hidden width of an expert")
    speed.add_argument("--tries", type=int, default=3, help="pairs")
    balance = commands.add_parser("balance", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    balance.set_defaults(run=print_balance)
    balance.add_argument("--steps", type=int, default=300, help="optimiser steps")
    balance.add_argument("--every", type=int, default=25, help="steps between lines")
    balance.add_argument("--below", type=float, default=1.3, help="load that counts as balanced")
    balance.add_argument("--figure", type=Path, help="SVG to write")
    balance.add_argument("--remedies", nargs="+", default=list(REMEDIES), choices=REMEDIES)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
