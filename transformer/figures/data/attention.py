"""Attention step by step: of a toy whose weights are set by hand, or of any head of a model."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from transformer import spec
from transformer.figures.data import captured
from transformer.nn.attention import Attention
from transformer.nn.context import make_context
from transformer.nn.model import Transformer
from transformer.ops.mask import visible
from transformer.settings import Compute

# Six tokens of the running example, and their features: animate, action, time, state.
TOY_TOKENS = (10, 11, 12, 13, 15, 16)
TOY_VECTORS = np.array([[2, 0, 0, 0], [0, 2, 0, 0], [0, 1, 1, 0], [0, 0, 2, 0], [1, 0, 0, 1], [0, 0, 0, 2]], np.float32)
# A state asks for actions, then for times and states; actions ask who acts, and times what happened.
TOY_QUERY = np.array([[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0.5, 0.5]], np.float32)
TOY_KEY = np.eye(4, dtype=np.float32)
TOY_VALUE = np.array([[1, -1, 0, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 0, -1, 1]], np.float32)


@dataclass(frozen=True)
class Steps:
    """One head's way from queries to outputs.

    Attributes:
      q, k, v: [T, H].
      scale, softcap: of the scores.
      scores: q·k [T, T].
      scaled: times the scale, and capped where there is a softcap.
      masked: -inf where a query may not look.
      weights: [T, T]; rows sum to 1 (to less where a learned sink takes its part).
      output: [T, H].
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    softcap: float | None
    scores: np.ndarray
    scaled: np.ndarray
    masked: np.ndarray
    weights: np.ndarray
    output: np.ndarray


def toy(causal: bool = True) -> Steps:
    """Six tokens, d_k = 4, through the attention layer with weights set by hand."""
    mixer = spec.Attention(
        num_heads=1, num_kv_heads=1, head_dim=4, mask=spec.Mask(causal=causal), scale=0.5, rope=None, qkv_bias=False,
        out_bias=False,
    )  # fmt: skip
    kernels = {
        "query": TOY_QUERY[:, None],
        "key": TOY_KEY[:, None],
        "value": TOY_VALUE[:, None],
        "out": np.eye(4)[None],
    }
    layer = Attention(mixer, Compute(attention="reference"), gain=1.0)
    context = make_context((), jnp.arange(len(TOY_TOKENS))[None])
    params = {name: {"kernel": jnp.asarray(kernel, jnp.float32)} for name, kernel in kernels.items()}
    _, seen = layer.apply({"params": params}, TOY_VECTORS[None], context, None, mutable="intermediates")
    return steps(mixer, jax.device_get(seen["intermediates"]), 0)


def of_head(model: Transformer, params: dict, tokens: list[int], layer: int, head: int) -> Steps:
    """The steps of one query head of a decoder (or an encoder alone) that reads `tokens`.

    Raises:
      ValueError: no such layer or head, or scores that are more than q·k.
    """
    stack = model.spec.trunk
    _check("layer", layer, stack.num_layers)
    mixer = stack.layers[layer].mixer
    _check("head", head, mixer.num_heads)
    if getattr(mixer, "relative", None) is not None or mixer.mask.sinks:
        raise ValueError(f"layer={layer}: its scores depend on distances too; attention_heads shows their weights")
    return steps(mixer, _seen(model, params, tokens)[layer]["attention"], head)


def heads(model: Transformer, params: dict, tokens: list[int], layer: int) -> np.ndarray:
    """Attention weights [N, T, T] of every head of a layer.

    Raises:
      ValueError: no such layer.
    """
    _check("layer", layer, model.spec.trunk.num_layers)
    return _seen(model, params, tokens)[layer]["attention"]["probabilities"][0]


def steps(mixer: spec.Attention | spec.LatentAttention, seen: dict[str, np.ndarray], head: int) -> Steps:
    """The steps of query head `head`, from what a layer of that spec captured of a single row."""
    group = seen["q"].shape[2] // seen["k"].shape[2]
    q, k, v = seen["q"][0, :, head], seen["k"][0, :, head // group], seen["v"][0, :, head // group]
    softcap = getattr(mixer, "softcap", None)
    scores = q @ k.T
    scaled = scores * mixer.scale
    scaled = scaled if softcap is None else softcap * np.tanh(scaled / softcap)
    positions = jnp.arange(len(q))
    seeing = np.asarray(visible(mixer.mask, positions, positions))
    weights = seen["probabilities"][0, head]
    return Steps(q, k, v, mixer.scale, softcap, scores, scaled, np.where(seeing, scaled, -np.inf), weights, weights @ v)


def _seen(model: Transformer, params: dict, tokens: list[int]) -> list[dict]:
    stack = "decoder" if model.spec.decoder is not None else "encoder"
    if model.spec.encoder is not None and model.spec.decoder is not None:
        raise ValueError("model: has an encoder and a decoder; attention is shown of one that reads a single text")
    _, seen = captured.run(model, params, np.asarray(tokens)[None])
    return captured.layers(model.spec.trunk, seen[stack])


def _check(name: str, value: int, count: int) -> None:
    if not 0 <= value < count:
        raise ValueError(f"{name}={value}: use 0 to {count - 1}")
