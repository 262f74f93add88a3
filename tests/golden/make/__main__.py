"""Tiny random Hugging Face models and their exact outputs: a numeric oracle for a re-implementation.

    python -m tests.golden.make --out DIR [--only CASE ...] [--no-mutations]

For every case this writes  DIR/CASE/
    config.json        as written by transformers 5 `save_pretrained` (new style: rope_parameters, dtype, ...)
    config_hub.json    same model, written the way Hub checkpoints of 2019-2025 are (rope_theta, rope_scaling, ...)
    generation_config.json, model.safetensors (Hub tensor names: unfused experts, block_sparse_moe, ...)
    expected.npz       inputs and expected outputs (see README.md)
    meta.json          class, seed, noise level, margins, mutation sensitivities
Everything is float32, eager attention, eager experts, CPU, 1 thread.
"""

import argparse
import json
import os
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers

from tests.golden.make import deepseek, encoders, gemma, gpt, llama, quantized
from tests.golden.make.case import make_case

HERE = Path(__file__).parents[1]
SEEDS = HERE / "seeds.json"
# In the order in which they are made.
CASES = {}
for module in (gpt, encoders, llama, gemma, deepseek, quantized):
    CASES |= module.CASES


COLUMNS = {
    "params": "d", "seed": "d", "logit_std": ".2f", "argmax_unique": "d", "fp64_diff": ".1e", "sens_1e-6": ".1e",
    "gen_margin": ".3f", "gen_cache_vs_nocache": ".1e",
}  # fmt: skip


def table(metas: list[dict]) -> None:
    """Prints how noisy and how varied each case is."""
    print(f"{'case':22s}", *COLUMNS)
    for meta in metas:
        cells = (format(meta[name], kind) if name in meta else "-" for name, kind in COLUMNS.items())
        print(f"{meta['name']:22s}", *(f"{cell:>{len(name)}s}" for name, cell in zip(COLUMNS, cells, strict=True)))


def main() -> None:
    """Makes the cases that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(HERE))
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--no-mutations", action="store_true")
    parser.add_argument("--search", action="store_true", help="search seeds again instead of starting from SEEDS")
    args = parser.parse_args()
    seeds = json.loads(SEEDS.read_text()) if SEEDS.exists() and not args.search else {}
    metas = []
    for name, case in CASES.items():
        if args.only and name not in args.only:
            continue
        case = {**case, "seed": seeds.get(name, case.get("seed", 0))}
        metas.append(make_case(name, case, args.out, not args.no_mutations))
        seeds[name] = metas[-1]["seed"]
        print("done", name, metas[-1].get("mutations", {}), flush=True)
    table(metas)
    SEEDS.write_text(json.dumps(seeds, indent=0, sort_keys=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    main()
