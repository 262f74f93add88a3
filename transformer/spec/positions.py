"""Where tokens are and which of them see each other."""

import math
from dataclasses import dataclass

from transformer.spec.check import require


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Which keys a query may see; `ops.mask.visible` is its only meaning.

    Attributes:
      causal: a query sees no key of a later position.
      window: number of keys a query sees, its own position included (None: all of them). Without `causal` it
        reaches `window - 1` positions to either side.
      sinks: first positions of a sequence that every later query sees besides its window (StreamingLLM, Xiao et al.
        2023, arXiv:2309.17453). Distances are then measured in the cache: a query turns as if everything between the
        sinks and its window had been cut out, so that no distance exceeds sinks + window.
    """

    causal: bool
    window: int | None = None
    sinks: int = 0

    def __post_init__(self):
        sinks = self.sinks
        require(sinks >= 0, f"mask.sinks={sinks}: use 0 (none) or more")
        require(
            not sinks or (self.causal and self.window is not None), f"mask.sinks={sinks}: needs causal and a window"
        )
        require(self.window is None or self.window >= 1, f"mask.window={self.window}: use at least 1 visible key")


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float

    def __post_init__(self):
        require(self.factor > 0, f"rope_scaling.factor={self.factor}: must be positive")


@dataclass(frozen=True, kw_only=True)
class PiecewiseScaling:
    """Piecewise frequency scaling of Llama 3.1: long waves divided by `factor`, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_length: int

    def __post_init__(self):
        require(self.factor > 0, f"rope_scaling.factor={self.factor}: must be positive")
        low, high = self.low_freq_factor, self.high_freq_factor
        require(low < high, f"low_freq_factor={low}: must be below high_freq_factor={high}")


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): frequencies ramped by wavelength, and rotations stretched.

    Attributes:
      attention_factor: multiplies cos and sin (so scores by its square); None derives it from the mscales.
      mscale, mscale_all_dim: DeepSeek's two terms; the factor is m(mscale) / m(mscale_all_dim) if both are set,
        else m(1), with m(k) = 0.1 k ln(factor) + 1.
      truncate: round the ramp's ends to whole dimensions (False in gpt-oss).
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_length: int
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self):
        require(self.factor > 0, f"rope_scaling.factor={self.factor}: must be positive")

    def gain(self, mscale: float) -> float:
        """m(mscale); 1 where nothing is stretched."""
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0


Scaling = LinearScaling | PiecewiseScaling | YarnScaling


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864).

    Attributes:
      theta: base of the geometric row of frequencies.
      dim: leading features of a head that rotate, even; the rest passes through (partial rotary).
      interleaved: pairs are (2i, 2i+1), else (i, i + dim/2), "rotate half".
    """

    theta: float
    dim: int
    interleaved: bool
    scaling: Scaling | None = None

    def __post_init__(self):
        require(self.dim >= 2 and self.dim % 2 == 0, f"rope.dim={self.dim}: rotations need an even dimension")
        require(self.theta > 1, f"rope.theta={self.theta}: must exceed 1")


@dataclass(frozen=True, kw_only=True)
class RelativeBias:
    """A learned number for each head and bucket of distances, added to the scores (T5, arXiv:1910.10683, section 2.1).

    Near distances have a bucket each; farther ones share buckets that widen with the logarithm of the distance, and
    all from `max_distance` on are one. All layers of a stack share the table.

    Attributes:
      bidirectional: half of the buckets are for keys behind the query, the other half for keys before it; else keys
        behind the query count as distance 0.
    """

    num_buckets: int
    max_distance: int
    bidirectional: bool

    def __post_init__(self):
        buckets, sides = self.num_buckets, 1 + self.bidirectional
        require(
            buckets >= 2 * sides and buckets % sides == 0,
            f"relative.num_buckets={buckets}: use at least {2 * sides}, a multiple of {sides}",
        )
        exact, far = buckets // sides // 2, self.max_distance
        require(far > exact, f"relative.max_distance={far}: must exceed the {exact} distances with a bucket each")


@dataclass(frozen=True, kw_only=True)
class RelativeKeys:
    """Scores of content and of distance (Transformer-XL, Dai et al. 2019, arXiv:1901.02860, section 3.3).

    The score of a query q for a key k at distance d is (q + u)·k + (q + v)·W r(d) with learned u, v and W and
    sinusoidal r(d) of the model's dimension.

    Attributes:
      base: of the sinusoids' geometric row of frequencies.
    """

    base: float

    def __post_init__(self):
        require(self.base > 1, f"relative.base={self.base}: must exceed 1")


@dataclass(frozen=True, kw_only=True)
class LearnedPositions:
    """A trained table of `max_length` position vectors, added to the token vectors (GPT-2, BERT)."""

    max_length: int

    def __post_init__(self):
        require(self.max_length >= 1, f"positions.max_length={self.max_length}: use at least 1")


@dataclass(frozen=True, kw_only=True)
class SinusoidalPositions:
    """Fixed sines and cosines added to the token vectors (Vaswani et al. 2017, section 3.5).

    Attributes:
      interleaved: sin and cos alternate (the paper), else all sines come first (Marian, tensor2tensor).
    """

    base: float
    interleaved: bool
