"""What a plan found out about a run, as plain data: what the terminal, the JSON file and the page are made of.

Bytes and FLOPs are those of one device in one step (an optimiser step, the reading of all prompts, or one token a row),
unless a field says otherwise. A device is what JAX calls one: a chip, of TPU7x one of the two in a chip. What only a
compiler tells is None, or empty, in a plan that compiled nothing.
"""

import dataclasses
import json
import re
import shlex
from dataclasses import dataclass, field
from typing import Any, Literal

from transformer.mapping import from_mapping
from transformer.settings import POINTS

Kind = Literal["train", "prefill", "decode"]
# Terms of an estimate that add up to the time in which the cores are busy; and those that come on top.
COMPUTING, WAITED = ("matmul", "attention", "elementwise"), ("ici", "dcn", "host")
PURPOSES = ("parameters", "gradients", "activations", "tokens")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was to be planned.

    Attributes:
      config: of a page, such as "llama3:8b".
      topology: such as "v5p:4x4x4", or "2*v5p:4x4x4" for two slices.
      chip: the generation, a key of `chips.CHIPS`: "v5p".
      devices: of all slices together.
      chips: likewise.
      mesh: sizes of all axes of `sharding.MESH_AXES`, in their order.
      rows: of the step, on all devices and in all of its microbatches.
      length: tokens of a row, of the one that an encoder reads where there is one; to decode, slots of the cache.
      accumulate: microbatches of the step.
      overrides: settings that differ from the page's, as written: {"compute.remat": '"full"'}.
      tokens: to be trained on; None where nobody asks.
      fields: of the config page, by dotted name, that make it the run that was planned, as `train.py` takes them.
    """

    config: str
    topology: str
    chip: str
    devices: int
    chips: int
    slices: int
    mesh: dict[str, int]
    kind: Kind
    rows: int
    length: int
    accumulate: int = 1
    overrides: dict[str, str] = field(default_factory=dict)
    tokens: float | None = None
    fields: dict[str, str] = field(default_factory=dict)

    @property
    def command(self) -> str | None:
        """What trains this; None where training isn't what was planned."""
        if self.kind != "train":
            return None
        workdir = f"runs/{re.sub(r'[^A-Za-z0-9.]+', '-', self.config)}"
        words = ["python", "train.py", "--config", self.config, "--workdir", workdir]
        words += [f"--config.{name}={text}" for name, text in self.fields.items()]
        return shlex.join(words)


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """An array that a device holds."""

    name: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What of a device's memory is for what, by analysis.

    Attributes:
      parameters: in the dtype in which they rest.
      optimizer: its moments, 0 where they rest with the host, and the average of weights.
      gradients: those alive at once at the peak, and what is summed over microbatches.
      activations: by named point of a layer (`settings.POINTS`), and "layer" for what one layer needs while it is
        computed (again), "head" for the loss.
      cache: keys and values of decoding.
      buffers: whatever else: batch, parameters gathered for use, rows of experts.
    """

    parameters: int
    optimizer: int = 0
    gradients: int = 0
    activations: dict[str, int] = field(default_factory=dict)
    cache: int = 0
    buffers: int = 0

    def __post_init__(self):
        unknown = {*self.activations} - {*POINTS, "layer", "head"}
        if unknown:
            raise ValueError(f"activations={sorted(unknown)}: no points; use {', '.join(POINTS)}, layer, head")

    @property
    def named(self) -> dict[str, int]:
        """Bytes of each part that there is, activations by point."""
        parts = {"parameters": self.parameters, "optimizer": self.optimizer, "gradients": self.gradients}
        parts |= {f"activations: {name}": size for name, size in self.activations.items()}
        return {name: size for name, size in (parts | {"cache": self.cache, "buffers": self.buffers}).items() if size}

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.named.values())


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a device's HBM.

    Attributes:
      offered: what the compiler may use.
      parts: by analysis.
      largest: the biggest arrays, the largest first.
      instead: what other settings, or another slice, would need by analysis, named by options; all of them fit.
      peak: at the worst moment, as compiled.
      arguments: of the state and the batch, or of parameters and cache, as compiled.
      temporary: what else the program needs at once, as compiled.
    """

    offered: int
    parts: Parts
    largest: tuple[Buffer, ...] = ()
    instead: tuple[Buffer, ...] = ()
    peak: int | None = None
    arguments: int | None = None
    temporary: int | None = None

    @property
    def needed(self) -> int:
        """As compiled, else by analysis."""
        return self.parts.total if self.peak is None else self.peak

    @property
    def fits(self) -> bool:
        """The device has as much."""
        return self.needed <= self.offered


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of matrix products.

    Attributes:
      model: what the model asks for, by mechanism (`accounting.Flops`); nothing twice, no masked score.
      program: what the traced program multiplies, remat included, its kernels apart (`matmuls.matmul_flops`).
      compiled: what the compiled program multiplies, trips of loops counted, its kernels apart.
      kernels: what custom calls do, by kernel; by their own estimates, or by analysis where they give none.
    """

    model: dict[str, float]
    program: float | None = None
    compiled: float | None = None
    kernels: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes between HBM and the cores.

    Attributes:
      minimal: what any program must read and write: weights, moments, cache, what is kept for the backward pass.
      hbm: operands and results of all instructions, as compiled; what stays in faster memory apart.
      host: of moments that rest in the host's memory, on their way in one direction; as many go back.
    """

    minimal: float
    hbm: float | None = None
    host: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Collectives of one kind, along the same mesh axes, for one purpose.

    Attributes:
      kind: one of `collectives.KINDS`.
      axes: None where the devices lie along no axes.
      purpose: one of `PURPOSES`.
      overlapped: other work runs while they travel.
      times: how often any of them runs.
      operand: bytes of their operands, in all runs.
      sent: bytes that a device sends, in all runs.
    """

    kind: str
    axes: tuple[str, ...] | None
    purpose: str
    overlapped: bool
    times: int
    operand: float
    sent: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """How long a step may take. Nothing of this was measured.

    Attributes:
      terms: seconds of `COMPUTING`, "hbm", "ici", "dcn" and "host", each as if it ran alone; "hidden" is what of ici
        and dcn goes on beside other work.
      step: seconds of a step, by `rule`.
      mfu: model FLOPs by what the chips' peak would do in that time.
      tokens_per_second: of all devices.
      assumptions: a sentence each.
    """

    terms: dict[str, float]
    step: float
    mfu: float
    tokens_per_second: float
    assumptions: tuple[str, ...] = ()

    @property
    def rule(self) -> str:
        """How a step is made of the terms that there are, such as "max(matmul + attention, hbm) + ici"."""
        there = {name for name, seconds in self.terms.items() if seconds}
        computing = " + ".join(name for name in COMPUTING if name in there)
        busy = [part for part in (computing, *(name for name in ("hbm", "hidden") if name in there)) if part]
        after = "".join(f" + {name}" for name in WAITED if name in there) + " - hidden" * ("hidden" in there)
        return (f"max({', '.join(busy)})" if len(busy) > 1 else "".join(busy)) + after

    @property
    def longest(self) -> str:
        """The term of which the step has most."""
        of = dict.fromkeys((*COMPUTING, "hbm", "hidden", *WAITED), 0.0) | self.terms
        busy = max(("hbm", "hidden"), key=of.get)
        within = COMPUTING if sum(of[name] for name in COMPUTING) >= of[busy] else (busy,)
        # What is hidden isn't waited for: of ici first, which is where it is.
        waited = {"dcn": of["dcn"], "host": of["host"], "ici": max(of["ici"] - of["hidden"], 0.0)}
        return max((*within, *WAITED), key=lambda name: waited.get(name, of[name]))

    def days(self, tokens: float) -> float:
        """Of so many tokens, without a break."""
        return tokens / self.tokens_per_second / 86400


@dataclass(frozen=True, kw_only=True)
class Compile:
    """What it took to compile, and what the compiler says of time.

    Attributes:
      seconds: of lowering and compiling.
      cpu: seconds of processor time of all threads meanwhile.
      max_rss: bytes of memory of this process, at most.
      cycles: estimated by the compiler, by class of instruction; of collectives and kernels it estimates none.
    """

    seconds: float
    max_rss: int
    cpu: float = 0.0
    cycles: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Report:
    """A plan.

    Attributes:
      versions: of jax, libtpu and this package.
      exchanges: from the compiled program; by analysis, with `kind` as an ideal compiler chooses, without one.
    """

    request: Request
    memory: Memory
    flops: Flops
    bytes: Bytes
    exchanges: tuple[Exchange, ...]
    estimate: Estimate
    versions: dict[str, str] = field(default_factory=dict)
    compile: Compile | None = None

    def to_json(self) -> str:
        """As JSON text that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False) + "\n"


def from_json(text: str) -> Report:
    """The report that `Report.to_json` wrote.

    Raises:
      SettingsError: it isn't one; the message names the field.
    """
    values: Any = json.loads(text)
    return from_mapping(Report, values)
