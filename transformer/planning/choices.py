"""Ways to run that a search compares, and what it came to."""

import math
from dataclasses import dataclass, field

from transformer.planning import topology
from transformer.planning.chips import GIB
from transformer.planning.fit import ROOM, DoesNotFit
from transformer.planning.report import Report
from transformer.settings import SettingsError


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A way to run, and what analysis says of it.

    Attributes:
      mesh: sizes of all axes.
      remat, names: `compute.remat` and `compute.remat_names`.
      moments: `optimizer.moments_dtype`.
      rows: of a step, on all devices.
      needed, offered: bytes of a device.
      seconds: of a step.
    """

    topology: str
    mesh: dict[str, int]
    remat: str
    names: tuple[str, ...]
    moments: str
    rows: int
    needed: int
    offered: int
    seconds: float = math.inf
    tokens_per_second: float = 0.0
    mfu: float = 0.0

    @property
    def fits(self) -> bool:
        """With `ROOM` to spare."""
        return self.needed <= ROOM * self.offered

    @property
    def words(self) -> str:
        """On a line."""
        remat = f'"{self.remat}"' + (f" {', '.join(self.names)}" if self.names else "")
        moments = "" if self.moments == "float32" else f", moments in {self.moments}"
        rows = f"{self.rows} row{'s' * (self.rows > 1)}"
        return f"{self.topology}, mesh {topology.words(self.mesh)}, remat {remat}{moments}, {rows}"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search came to.

    Attributes:
      ranked: what fits, the fastest first.
      pruned: how many meshes or choices were dropped, by reason.
      best: the first of `ranked` that the compiler confirmed; without one, the first.
      report: what the compiler made of it.
      refused: choices that the compiler refused, with its reason.
      lossy: a sentence on moments in bfloat16, which change numerics, where float32 ones don't fit.
      nearest: what needs least, where nothing fits.
      larger: options of the smallest slice that holds the model, where this one doesn't.
    """

    ranked: tuple[Choice, ...] = ()
    pruned: dict[str, int] = field(default_factory=dict)
    best: Choice | None = None
    report: Report | None = None
    refused: tuple[tuple[Choice, str], ...] = ()
    lossy: str | None = None
    nearest: Choice | None = None
    larger: str | None = None

    def check(self) -> "Found":
        """Itself, if there is something that fits.

        Raises:
          SettingsError: no mesh can hold the model; DoesNotFit: with the nearest possible choice.
        """
        if self.best is not None:
            return self
        if self.nearest is None:
            why = "; ".join(f"{count} {reason}" for reason, count in self.pruned.items())
            raise SettingsError(f"search: no mesh can hold this model ({why}); use another topology")
        near = self.nearest
        size = f"{near.needed / GIB:.1f} of {near.offered / GIB:.1f} GiB"
        why = "".join(f"; the compiler refuses {choice.words}" for choice, _ in self.refused[:1])
        larger = self.larger or "no larger slice of this chip holds it, either"
        raise DoesNotFit(f"search: nothing fits; the nearest is {near.words}, which needs {size}{why}; {larger}")
