"""The training step beside the same model in PyTorch, beside plain JAX, and beside the floor of this machine.

    export TRANSFORMER_ORACLE_PYTHON=/path/to/python    (has torch, transformers and a C++ compiler; default: this one)
    python benchmarks/train_step.py --write docs/performance.md
    python benchmarks/train_step.py --shapes gpt2-6 --dtypes float32 --sides ours eager --set compute.loss_chunk=2048

Each side is a process of its own (`workers.py`); one runs at a time, the others idle, and who begins changes from lap
to lap, so that what else the machine does falls on all alike. Rows of a page that aren't measured again stay.
docs/performance.md says what is compared.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

from benchmarks import pages
from benchmarks.workers import ENVIRONMENT, Worker
from transformer import config, families, huge_pages
from transformer.config import Run
from transformer.planning.accounting import flops_per_token, parameters

NAME = "benchmarks/train_step.py"
SIDES = {
    "ours": "benchmarks.our_model",
    "eager": "benchmarks.torch_models",
    "compiled": "benchmarks.torch_models",
    "naive": "benchmarks.naive_jax",
}
SMALL = "model.d_model=384,model.num_layers=6,model.num_heads=6,model.max_length=256,data.seq_len=256,"
SHAPES = {
    "gpt2-6": "gpt2:small," + SMALL + "data.batch_size=16",
    "gpt2-12": "gpt2:small,model.max_length=512,data.seq_len=512,data.batch_size=16",
    "llama": "llama3:8b,model.vocab_size=32000,model.num_kv_heads=2,model.head_dim=64,model.d_ff=1024,"
    + SMALL + "data.batch_size=16",
    "mixtral": "mixtral:8x7b,model.vocab_size=8192,model.d_model=256,model.num_layers=4,model.num_heads=8,"
    "model.num_kv_heads=4,model.head_dim=32,model.d_ff=512,model.max_length=256,data.seq_len=256,data.batch_size=8",
    "bert": "bert:base,model.d_ff=1536,model.pooler=False,model.next_sentence=False,data.objective=masked,"
    + SMALL + "data.batch_size=16",
}  # fmt: skip
# The same rule on every side from the first step on: no warm-up.
OPTIMIZER = "optimizer.schedule=constant,optimizer.warmup_steps=0,optimizer.peak_lr=1e-4"
# Laps, and steps of one: seconds in all.
LAPS = {"gpt2-12": (3, 1), "mixtral": (5, 4)}
USUAL = (5, 1)
# Too large for the memory of all sides at once: ours beside one of the others after the other.
APART = ("gpt2-12",)
MISSING = "–"
HEAD = [
    "layers/width/heads/context", "dtype", "tokens/s", "torch eager", "torch.compile", "naive JAX",
    "ratio to torch eager", "to torch.compile", "floor, s", "of our step", "peak GiB", "trace + compile, s",
]  # fmt: skip
MODELS_HEAD = ["layers/width/heads/context", "parameters", "rows", "vocabulary", "TFLOP a step"]
MACHINE_HEAD = ["dtype", "cores", "matmul, GFLOP/s: JAX", "torch", "versions"]


class Measured:
    """What one model in one dtype gives.

    Attributes:
      laps: seconds a step of each side that lived through the lap.
      first: seconds and nats of each side's first step.
      peaks: bytes of memory that a side's process held at most.
      matmuls: FLOP/s of the best large product, by side.
      descriptions: what each side says of itself.
    """

    def __init__(self, run: Run):
        self.run = run
        self.laps: list[dict[str, float]] = []
        self.first: dict[str, dict] = {}
        self.peaks: dict[str, int] = {}
        self.matmuls: dict[str, float] = {}
        self.descriptions: dict[str, dict] = {}

    def take_turns(self, sides: dict[str, Worker], pairs: int, steps: int) -> None:
        """First steps of those that had none, then laps, which another side begins each.

        A turn begins with a step that isn't timed: a virtual machine may have given back the memory that a side freed
        while it waited, and then has to get it again, as it never does in training.
        """
        first = {name: side.ask({"steps": 1}) for name, side in sides.items() if name not in self.first}
        names, laps = list(sides), []
        for i in range(pairs):
            turn, lap = i % len(names), {}
            for name in names[turn:] + names[:turn]:
                sides[name].ask({"steps": 1})
                lap[name] = sides[name].ask({"steps": steps})
            laps.append(lap)
            for name in {"ours", "eager"} & {*names}:
                if answer := sides[name].ask({"matmul": 3}):
                    self.matmuls[name] = max(self.matmuls.get(name, 0.0), answer["flops"])
        for name, side in sides.items():
            peak = side.ask({"peak": True})
            if side.failure:
                print(f"  {name:8} left out: {side.failure}", flush=True)
            else:
                self.peaks[name], self.descriptions[name] = peak["bytes"], side.description
        self.first |= {name: answer for name, answer in first.items() if name in self.peaks}
        self.laps += [{name: lap[name]["seconds"] / steps for name in names if name in self.peaks} for lap in laps]

    def median(self, side: str) -> float:
        """Seconds of a step."""
        return statistics.median(lap[side] for lap in self.laps if side in lap)

    def ratios(self, side: str) -> list[float]:
        """A side's seconds over ours, lap by lap."""
        return [lap[side] / lap["ours"] for lap in self.laps if side in lap]

    @property
    def compiling(self) -> dict[str, float]:
        """Seconds to trace and compile, of the sides that do."""
        alone = {name: what["compile"] for name, what in self.descriptions.items() if "compile" in what}
        if "compiled" in self.first:  # it compiles within its first step
            alone["compiled"] = max(self.first["compiled"]["seconds"] - self.median("compiled"), 0.0)
        return alone

    @property
    def floor(self) -> float:
        """Seconds that the model's FLOPs take at the speed of the best product."""
        return flops(self.run) / max(self.matmuls.values())


def make_run(shape: str, dtype: str, fields: list[str]) -> tuple[str, Run]:
    """The config of a shape, as one text, and the run that it means."""
    text = ",".join([SHAPES[shape], OPTIMIZER, f"compute.dtype={dtype}", *fields])
    return text, config.resolve(config.load_config(text))


def task_of(text: str, run: Run) -> dict:
    """What every side is told."""
    settings, origin = run.settings, run.spec.origin
    rule = {name: getattr(settings.optimizer, name) for name in ("peak_lr", "b1", "b2", "eps", "weight_decay")}
    return dict(
        config=text,
        model=run.values["model"],
        hugging_face=families.get(origin.family).to_hf(origin.dims),
        rows=settings.data.batch_size,
        length=settings.data.seq_len,
        masked=settings.data.objective == "masked",
        dtype=settings.compute.dtype,
        auxiliary=settings.balance.auxiliary,
        optimizer=rule | dict(clip_norm=settings.optimizer.clip_norm),
    )


def tokens(run: Run) -> int:
    """Tokens of a step."""
    return run.settings.data.batch_size * run.settings.data.seq_len


def flops(run: Run) -> float:
    """FLOPs of a step, nothing computed twice."""
    return flops_per_token(run.spec, run.settings.data.seq_len, training=True).total * tokens(run)


def begin(name: str, task: dict, expected: int) -> Worker:
    """Starts a side. One with other parameters ends the program, and so does ours or torch's where it fails."""
    torch = SIDES[name].endswith("torch_models")
    python = os.environ.get("TRANSFORMER_ORACLE_PYTHON", sys.executable) if torch else sys.executable
    # As train.py starts itself. Others are as their own programs are.
    environment = huge_pages.advised(os.environ | ENVIRONMENT) if name == "ours" else {}
    side = Worker(python, SIDES[name], task | dict(compiled=name == "compiled"), environment)
    if side.failure and name in ("ours", "eager"):
        sys.exit(
            f"error: {name}: {side.failure}; what it said is above. PyTorch's sides run under the interpreter that "
            "TRANSFORMER_ORACLE_PYTHON names, with torch and transformers; --sides ours naive needs none"
        )
    if side.failure is None:
        count = side.description["parameters"]
        assert count == expected, f"{name}: {count} parameters; expected {expected}"
        print(f"  {name:8} {side.description}", flush=True)
    return side


def measure(run: Run, task: dict, names: list[str], apart: bool, pairs: int, steps: int) -> Measured:
    """Ours beside all others at once, or beside one after the other."""
    measured, expected = Measured(run), parameters(run.spec).total
    ours, others = begin("ours", task, expected), names[1:]
    for group in [[name] for name in others] if apart and others else [others]:
        sides = {name: begin(name, task, expected) for name in group}
        measured.take_turns({"ours": ours, **sides}, pairs, steps)
        for side in sides.values():
            side.close()
    products = ours.ask({"products": True})
    ours.close()
    if "ours" not in measured.peaks or ours.failure:
        sys.exit(f"error: our side failed: {ours.failure}; what it said is above")
    print("  nats of the first step: " + ", ".join(f"{name} {x['loss']:.3f}" for name, x in measured.first.items()))
    if products["flops"] is not None:
        # Masked scores, and logits that the loss makes again.
        print(f"  products of our step: {products['flops'] / flops(run):.3f} of the model's FLOPs")
    return measured


def label(run: Run) -> str:
    """A model's cell."""
    m = run.values["model"]
    return f"{m['family']} {m['num_layers']}/{m['d_model']}/{m['num_heads']}/{run.settings.data.seq_len}"


def row(measured: Measured) -> list[str]:
    """Cells for `HEAD`."""

    def each(values: dict[str, float], words: str) -> str:
        return " / ".join(format(values[name], words) if name in values else MISSING for name in SIDES)

    def ratio(side: str) -> str:
        if side not in measured.peaks:
            return MISSING
        ratios = measured.ratios(side)
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"

    speeds = [
        f"{tokens(measured.run) / measured.median(name):,.0f}" if name in measured.peaks else MISSING for name in SIDES
    ]
    return [
        label(measured.run),
        measured.run.settings.compute.dtype,
        *speeds,
        ratio("eager"),
        ratio("compiled"),
        f"{measured.floor:.2f}",
        f"{measured.floor / measured.median('ours'):.0%}",
        each({name: size / 2**30 for name, size in measured.peaks.items()}, ".1f"),
        each(measured.compiling, ".1f"),
    ]


def model_row(run: Run) -> list[str]:
    """Cells for `MODELS_HEAD`."""
    count, rows = parameters(run.spec).total, run.settings.data.batch_size
    return [label(run), f"{count:,}", str(rows), f"{run.spec.vocab_size:,}", f"{flops(run) / 1e12:.2f}"]


def machine_row(measured: Measured) -> list[str]:
    """Cells for `MACHINE_HEAD`."""
    speeds = [f"{measured.matmuls[name] / 1e9:.0f}" if name in measured.matmuls else MISSING for name in SIDES][:2]
    versions = ", ".join(dict.fromkeys(", ".join(x["versions"] for x in measured.descriptions.values()).split(", ")))
    return [measured.run.settings.compute.dtype, str(os.cpu_count()), *speeds, versions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES], choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--sides", nargs="+", default=[*SIDES], choices=SIDES, help="ours is always among them")
    parser.add_argument("--pairs", type=int, help="laps (default: 5; gpt2-12: 3)")
    parser.add_argument("--steps", type=int, help="steps of a lap (default: 1; mixtral: 4)")
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="fields of our config")
    parser.add_argument("--write", type=Path, help="the page")
    args = parser.parse_args()
    names = [name for name in SIDES if name in ("ours", *args.sides)]
    if args.write and args.set:
        parser.error("--write: a page has our defaults; leave out --set")
    for shape in args.shapes:
        for dtype in args.dtypes:
            text, run = make_run(shape, dtype, args.set)
            pairs, steps = LAPS.get(shape, USUAL)
            print(f"{shape}, {dtype}: {text}", flush=True)
            laps = args.pairs or pairs, args.steps or steps
            measured = measure(run, task_of(text, run), names, shape in APART, *laps)
            cells = row(measured)
            print("\n".join(f"  {name}: {cell}" for name, cell in zip(HEAD, cells, strict=True)), flush=True)
            if args.write:
                pages.update(args.write, NAME, HEAD, [cells], keys=2)
                pages.update(args.write, f"{NAME}: models", MODELS_HEAD, [model_row(run)], keys=1)
                pages.update(args.write, f"{NAME}: machine", MACHINE_HEAD, [machine_row(measured)], keys=1)


if __name__ == "__main__":
    main()
