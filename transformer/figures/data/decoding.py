"""What a step of generation costs with and without a key/value cache: by the formula, and as compiled."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from transformer import api, spec
from transformer.figures.data import published
from transformer.ops import cache as caches
from transformer.planning.accounting import mean_visible
from transformer.planning.chips import CHIPS
from transformer.planning.decoding import step_bytes, step_flops


@dataclass(frozen=True)
class Work:
    """Vectors and scores that one head of one layer computes to predict token t + 1 from t tokens, t = 1, 2 …

    Attributes:
      keys: of each step; as many values.
      scores: visible ones.
    """

    keys: np.ndarray
    scores: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """Keys, values and scores of all steps until now."""
        return np.cumsum(2 * self.keys + self.scores)


def work(steps: int, mask: spec.Mask | None = None) -> dict[str, Work]:
    """Both ways to generate: without a cache t, t and t(t + 1) / 2 under a causal mask; with one 1, 1 and t."""
    mask, t = mask or spec.Mask(causal=True), np.arange(1, steps + 1)
    seen = np.array([round(mean_visible(mask, length) * length) for length in t])
    return {"without": Work(t, seen), "with": Work(np.ones_like(t), np.diff(seen, prepend=0))}


@dataclass(frozen=True)
class Compiled:
    """FLOPs of the compiled program of one step after `lengths` tokens, by way ("without" or "with" a cache)."""

    lengths: tuple[int, ...]
    flops: dict[str, tuple[float, ...]]


def compiled(reference: str = "llama3:tiny", lengths: tuple[int, ...] = (1, 8, 16, 32, 64)) -> Compiled:
    """What XLA counts in the programs that compute the features of the last of `lengths` tokens; nothing runs.

    Layers are unrolled, as in decoding: XLA counts the body of a loop once.
    """
    model = api.build(reference, attention="reference").spec
    if model.decoder is None or model.encoder is not None:
        raise ValueError(f"reference={reference!r}: shown for a decoder alone")
    model = api.build(dataclasses.replace(model, decoder=model.decoder.unrolled), attention="reference")
    params = api.init(model, abstract=True)

    def whole(params, tokens):
        return model.apply({"params": params}, tokens, method="features")[0][:, -1]

    def step(params, token, positions, cache):
        return model.apply({"params": params}, token, positions, None, cache, method="features")

    def count(function, *args) -> float:
        return jax.jit(function).lower(params, *args).compile().cost_analysis()["flops"]

    def ids(length: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, length), jnp.int32)

    empty = [jax.eval_shape(lambda n=n: caches.init(model.spec.decoder, 1, n, "float32")) for n in lengths]
    return Compiled(
        lengths,
        {
            "without": tuple(count(whole, ids(n)) for n in lengths),
            "with": tuple(count(step, ids(1), ids(1), cache) for cache in empty),
        },
    )


@dataclass(frozen=True)
class Limits:
    """What one step of decoding in bfloat16 asks of a chip, over the texts that are decoded together.

    Attributes:
      rows: texts.
      flops: of the step.
      weights, cache: bytes that it reads.
      compute, memory: the least seconds that the products take and that the bytes take to arrive, at published rates.
      peak, bandwidth: those rates: FLOP/s, and bytes/s.
      context: tokens that the model was trained for.
    """

    rows: tuple[int, ...]
    flops: tuple[float, ...]
    weights: tuple[float, ...]
    cache: tuple[float, ...]
    compute: tuple[float, ...]
    memory: tuple[float, ...]
    peak: float
    bandwidth: float
    context: int


def limits(
    reference: str = "llama3:8b", length: int = 8192, rows: tuple[int, ...] = (1, 4, 16, 64, 256), chip: str = "v5p"
) -> Limits:
    """Work and bytes of a step that adds one token to each of `rows` texts of `length` tokens.

    Raises:
      ValueError: an unknown chip, or a model that writes no text.
    """
    known = {one.name: one for one in CHIPS.values()}
    if chip not in known:
        raise ValueError(f"chip={chip!r}: use one of {', '.join(known)}")
    model, core = published.model(reference), known[chip]
    flops = tuple(step_flops(model, length).total * n for n in rows)
    weights, cache = zip(*(step_bytes(model, n, length) for n in rows), strict=True)
    compute = tuple(f / core.device_flops for f in flops)
    memory = tuple((w + c) / core.device_bandwidth for w, c in zip(weights, cache, strict=True))
    rates = core.device_flops, core.device_bandwidth
    return Limits(rows, flops, weights, cache, compute, memory, *rates, model.max_length)
