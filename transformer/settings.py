"""HOW to run: strict, frozen settings. What a model *is* lives in `spec/`.

Every field takes effect or is refused with a message that names the field, the value and the remedy.
`mapping.from_mapping` reads them from nested plain data.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

from transformer.checks import HOST_MEMORY, DType, SettingsError, check
from transformer.data_settings import PAIR_SOURCES, Component, Data
from transformer.optimizer_settings import Group, Optimizer

__all__ = [
    "HOST_MEMORY", "PAIR_SOURCES", "POINTS", "Balance", "Component", "Compute", "Data", "Group", "Mesh", "Optimizer",
    "Settings", "SettingsError", "Train", "check",
]  # fmt: skip

# Points of a layer that remat can keep by name, in the order in which they are computed.
POINTS = (
    "q", "k", "v", "attended", "attention_out", "cross_out", "ffn_gate", "ffn_up", "ffn_out", "residual",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How the model's arithmetic runs; changes speed, memory and rounding, never what is computed."""

    dtype: DType = "float32"  # of activations and matmuls; parameters are float32
    attention: Literal["auto", "reference", "blockwise", "splash"] = "auto"
    context_attention: Literal["auto", "gather", "ring"] = "auto"  # how keys cross mesh.context; ops/attention/context
    attention_block: int | None = None  # rows of a query or key block of `blockwise` and `splash`; None: their choice
    decode_attention: Literal["auto", "xla", "kernel"] = "auto"  # few queries over a cache; "auto": kernel on TPUs
    experts: Literal["auto", "dense", "grouped", "capacity"] = "auto"  # "capacity" drops what overflows, others nothing
    expert_capacity: float = 1.25  # slots of an expert in "capacity", times an even share of the assignments
    expert_exchange: Literal["auto", "all_to_all", "all_gather"] = "auto"  # how tokens reach other devices' experts
    expert_buffer: float = 2.0  # rows received by all_to_all, times an even share; what overflows takes all_gather
    reduce_dtype: DType | None = None  # of the sums over devices of weights' gradients; None: dtype
    remat: Literal["none", "dots", "names", "full"] = "none"  # what the backward pass computes again: nothing … all
    remat_names: tuple[str, ...] = ()  # those of `POINTS` that remat="names" keeps
    offload_names: tuple[str, ...] = ()  # those that it keeps in the host's memory; not on CPUs
    unroll: int = 1  # body repeats unrolled per scan step
    loss_chunk: int = 1024  # positions of a device whose logits are alive at once
    rules: Literal["default", "sequence", "decode"] = "default"  # preset of sharding.py: logical axes -> mesh axes

    def __post_init__(self):
        block = self.attention_block
        fits = block is None or (block >= 16 and block % 8 == 0)
        check(fits, "compute.attention_block", block, "use a multiple of 8, at least 16, or None")
        for name in ("expert_capacity", "expert_buffer"):
            value = getattr(self, name)
            check(0 < value < math.inf, f"compute.{name}", value, "use a positive factor, such as 1.25")
        self._check_names()
        check(self.unroll >= 1, "compute.unroll", self.unroll, "use 1 (a plain scan) or more")
        check(self.loss_chunk >= 128, "compute.loss_chunk", self.loss_chunk, "use at least 128 positions")

    def _check_names(self) -> None:
        remat, kept, moved = self.remat, self.remat_names, self.offload_names
        for field_name, names in (("compute.remat_names", kept), ("compute.offload_names", moved)):
            unknown = [name for name in names if name not in POINTS]
            check(not unknown, field_name, names, f"{unknown} are no points; use some of {', '.join(POINTS)}")
            check(not names or remat == "names", field_name, names, f'compute.remat={remat!r} has no use; use "names"')
        twice = sorted({*kept} & {*moved})
        check(not twice, "compute.offload_names", moved, f"{twice} are in compute.remat_names, too; name each once")
        some = bool(kept or moved)
        check(some or remat != "names", "compute.remat", remat, 'name points in compute.remat_names, or use "full"')


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the device mesh; -1 for one axis takes the devices that the others leave."""

    slice: int = 1  # batch split over slices that a data centre's network joins, parameters replicated
    data: int = -1  # batch split, parameters replicated
    fsdp: int = 1  # batch and parameters split (ZeRO-3)
    expert: int = 1  # batch and experts split; tokens travel to their experts
    context: int = 1  # rows split along their length, and parameters; keys travel to the queries
    tensor: int = 1  # heads, hidden and vocabulary split (Megatron)

    def __post_init__(self):
        for name, size in dataclasses.asdict(self).items():
            check(size == -1 or size >= 1, f"mesh.{name}", size, "use a positive size, or -1 for what is left")
        left = [name for name, size in dataclasses.asdict(self).items() if size == -1]
        check(len(left) <= 1, "mesh", left, "only one axis may be -1")


@dataclass(frozen=True, kw_only=True)
class Balance:
    """What keeps the experts of a mixture evenly used; 0 is nothing.

    The first three multiply losses: means over the tokens of a step, summed over the layers, each by itself.
    """

    auxiliary: float = 0.0  # GShard's and Switch's, over the whole step; costs train.accumulate > 1 a forward pass
    sequence: float = 0.0  # DeepSeek-V3's loss, the same over each document
    z: float = 0.0  # ST-MoE's loss on the size of the router's logits
    correction_rate: float = 0.0  # loss-free: what a step adds to or takes from the correction that picks experts

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            check(0 <= value < math.inf, f"balance.{name}", value, "use 0 (off) or a small positive number")


@dataclass(frozen=True, kw_only=True)
class Train:
    """Length of the run, and what happens how often (all in optimiser steps; 0 = never)."""

    steps: int = 300
    accumulate: int = 1  # microbatches per optimiser step; must divide data.batch_size
    accumulate_dtype: DType = "float32"  # of the sum of the microbatches' gradients
    mtp_weight: float = 0.0  # of multi-token prediction in the loss; positive in models that have it, else 0
    z_loss: float = 0.0  # times the mean of log²Z of the head's logits is added to the loss (1e-4 in PaLM)
    label_smoothing: float = 0.0  # share of the target that the loss spreads evenly over the vocabulary
    log_every: int = 10
    eval_every: int = 100
    eval_batches: int = 8
    eval_pairs: int = 0  # held-out pairs that the model must answer exactly, for data.objective="pairs"; 0: none
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    norms_every: int = 0  # how large gradients, parameters and activations of each layer are is recorded
    wandb_project: str = ""  # of Weights & Biases, which then shows what TensorBoard does; needs the extra wandb
    check_replicas_every: int = 0  # steps after which copies of parameters and state on all devices are compared
    spike: float = (
        0.0  # standard deviations that a loss may lie above its running mean, else the step is skipped; 0: any
    )
    stop_after_skipped: int = 10  # steps skipped in a row, for that or a loss or gradient that isn't finite; 0: never
    watchdog_seconds: float = 0.0  # a run that does nothing for so long ends, with all stacks; 0: it waits for ever
    sample_every: int = 0
    sample_prompts: tuple[str, ...] = ("The ",)
    sample_tokens: int = 200
    sample_temperature: float = 0.7

    def __post_init__(self):
        kind, remedy = self.accumulate_dtype, 'train.accumulate=1 sums nothing; use "float32"'
        check(kind == "float32" or self.accumulate > 1, "train.accumulate_dtype", kind, remedy)
        for name in ("steps", "accumulate", "eval_batches", "keep_checkpoints", "sample_tokens", "log_every"):
            check(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "use at least 1")
        check(self.steps < 2**31, "train.steps", self.steps, "use at most 2**31 - 1: steps are counted in 32 bits")
        for name in ("eval_every", "checkpoint_every", "sample_every", "norms_every", "check_replicas_every"):
            check(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "use 0 (never) or more steps")
        check(0 <= self.spike < math.inf, "train.spike", self.spike, "use 0 (off) or a few deviations, such as 6")
        limit = self.stop_after_skipped
        check(limit >= 0, "train.stop_after_skipped", limit, "use 0 (never) or more steps")
        patience = self.watchdog_seconds
        check(0 <= patience < math.inf, "train.watchdog_seconds", patience, "use 0 (never) or a number of seconds")
        check(self.eval_pairs >= 0, "train.eval_pairs", self.eval_pairs, "use 0 (none) or more pairs")
        check(
            bool(self.sample_prompts) or not self.sample_every,
            "train.sample_prompts",
            (),
            "give a prompt to sample from",
        )
        weight = self.mtp_weight
        check(0 <= weight < math.inf, "train.mtp_weight", weight, "use 0 or more (0.3, then 0.1, in DeepSeek-V3)")
        check(0 <= self.z_loss < math.inf, "train.z_loss", self.z_loss, "use 0 (off) or a small factor, such as 1e-4")
        smoothing = self.label_smoothing
        check(0 <= smoothing < 1, "train.label_smoothing", smoothing, "use 0 (off) or a small fraction, such as 0.1")
        remedy = "use 0: train.mtp_weight > 0 trains on the plain loss"
        check(not (smoothing and weight), "train.label_smoothing", smoothing, remedy)
        check(self.sample_temperature >= 0, "train.sample_temperature", self.sample_temperature, "use 0 or more")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run, all but the model."""

    seed: int = 0  # of the initial parameters
    compute: Compute = field(default_factory=Compute)
    mesh: Mesh = field(default_factory=Mesh)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    balance: Balance = field(default_factory=Balance)
    train: Train = field(default_factory=Train)

    def __post_init__(self):
        check(0 <= self.seed < 2**32, "seed", self.seed, "use 0 to 2**32 - 1")
        accumulate, batch = self.train.accumulate, self.data.batch_size
        check(batch % accumulate == 0, "train.accumulate", accumulate, f"must divide data.batch_size={batch}")
        objective, weight, asked = self.data.objective, self.train.mtp_weight, self.train.eval_pairs
        remedy = f"data.objective={objective!r} predicts no further tokens; use 0, and model.mtp=0"
        check(not weight or objective == "causal", "train.mtp_weight", weight, remedy)
        check(not asked or objective == "pairs", "train.eval_pairs", asked, f"data.objective={objective!r}: use 0")
        warmup, steps = self.optimizer.warmup_steps, self.train.steps
        check(
            warmup < steps,
            "optimizer.warmup_steps",
            warmup,
            f"must be below train.steps={steps}; lower it, to 0 for no warm-up",
        )
