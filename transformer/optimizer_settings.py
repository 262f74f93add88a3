"""The settings of the optimiser: its rule, its schedule, and who learns otherwise."""

import math
from dataclasses import dataclass
from typing import Literal

from transformer import axes as ax
from transformer.checks import DType, check


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters that learn otherwise than the rest: those with one of some logical axes."""

    axes: tuple[str, ...]  # of axes.py, such as ("vocab",) for embedding and head, or ("experts", "routes")
    lr: float = 1.0  # times the learning rate of the others
    weight_decay: float | None = None  # of those that are decayed at all; None: as the others

    def __post_init__(self):
        unknown = [name for name in self.axes if name not in ax.ALL]
        remedy = f"{unknown or 'nothing'} names no axis; use some of {', '.join(sorted(ax.ALL))}"
        check(bool(self.axes) and not unknown, "optimizer.groups.axes", self.axes, remedy)
        check(0 <= self.lr < math.inf, "optimizer.groups.lr", self.lr, "use 0 (frozen) or a positive factor")
        decay = self.weight_decay
        check(decay is None or 0 <= decay < math.inf, "optimizer.groups.weight_decay", decay, "use 0 or more, or None")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How a clipped gradient becomes an update; every rule is followed by decoupled weight decay and a schedule."""

    name: Literal["adamw", "adafactor", "lion", "muon"] = "adamw"  # training/optimizer.py says what each does
    peak_lr: float = 3e-3
    schedule: Literal["cosine", "linear", "inverse_sqrt", "constant", "wsd"] = "cosine"  # after the warm-up
    end_lr_fraction: float = 0.1  # "cosine", "linear" and "wsd" end at this fraction of peak_lr
    decay_fraction: float = 0.2  # of train.steps, at the end, in which "wsd" falls; before that it is constant
    warmup_steps: int = 20
    b1: float = 0.9  # of the first moment, or momentum; 0 keeps none in "adafactor"
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # matrices only: norms, biases, sinks and tables of positions are exempt
    groups: tuple[Group, ...] = ()  # a parameter is of the first that names one of its axes
    average_decay: float = 0.0  # of a running average of the weights, with which is evaluated and generated; 0: none
    clip_norm: float = 1.0
    moments_dtype: DType = "float32"  # of the moments between steps; they are computed in float32
    moments_memory: Literal["device", "pinned_host"] = "device"  # where they rest; not on CPUs

    def __post_init__(self):
        check(0 < self.peak_lr < math.inf, "optimizer.peak_lr", self.peak_lr, "use a positive, finite learning rate")
        self._check_schedule()
        for name in ("b1", "b2", "average_decay"):
            check(0 <= getattr(self, name) < 1, f"optimizer.{name}", getattr(self, name), "use a value in [0, 1)")
        check(0 < self.eps < math.inf, "optimizer.eps", self.eps, "use a positive, finite epsilon")
        check(0 <= self.weight_decay < math.inf, "optimizer.weight_decay", self.weight_decay, "use 0 or more")
        self._check_moments()
        check(self.clip_norm > 0, "optimizer.clip_norm", self.clip_norm, "use a positive norm (inf: no clipping)")

    def _check_schedule(self) -> None:
        end, decay = self.end_lr_fraction, self.decay_fraction
        check(0 <= end <= 1, "optimizer.end_lr_fraction", end, "use 0 to 1")
        check(0 < decay <= 1, "optimizer.decay_fraction", decay, "use a fraction above 0, such as 0.2")
        schedule, warmup = self.schedule, self.warmup_steps
        for name, users in (("end_lr_fraction", ("cosine", "linear", "wsd")), ("decay_fraction", ("wsd",))):
            value, default = getattr(self, name), getattr(type(self), name)
            remedy = f"optimizer.schedule={schedule!r} has no use for it; leave it at {default}"
            check(schedule in users or value == default, f"optimizer.{name}", value, remedy)
        check(warmup >= 0, "optimizer.warmup_steps", warmup, "use 0 or more steps")
        remedy = f'optimizer.schedule="{schedule}" is in units of the warm-up; use 1 step or more'
        check(schedule != "inverse_sqrt" or warmup >= 1, "optimizer.warmup_steps", warmup, remedy)

    def _check_moments(self) -> None:
        for name, users in (("b2", ("adamw", "lion", "muon")), ("eps", ("adamw", "muon"))):
            value, default = getattr(self, name), getattr(type(self), name)
            remedy = f"optimizer.name={self.name!r} has no use for it; leave it at {default}"
            check(self.name in users or value == default, f"optimizer.{name}", value, remedy)
        # Of steps below half of its spacing, bfloat16 rounds every one away: a moment would never decay.
        kind, remedy = self.moments_dtype, 'optimizer.moments_dtype="bfloat16" rounds so small steps away; use at most'
        for name in ("b1", "b2"):
            fits = kind == "float32" or getattr(self, name) <= 0.99
            check(fits, f"optimizer.{name}", getattr(self, name), f'{remedy} 0.99, or "float32"')
        remedy = '"adafactor" keeps sums that change ever less, which it rounds away; use "float32"'
        check(kind == "float32" or self.name != "adafactor", "optimizer.moments_dtype", kind, remedy)
