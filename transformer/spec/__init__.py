"""WHAT a model is: frozen specs of mechanisms, composed by the families.

A spec is pure data and says nothing of how it runs: no dtype, kernel, mesh or remat (those are `settings.py`).
A value that a paper or a published config states has no default here: a default would be a silent wrong model.
`None` and `False` mean that the mechanism is absent.
"""

from transformer.spec.check import SpecError
from transformer.spec.layers import (
    Attention,
    Block,
    CacheDims,
    ClampedGate,
    FeedForward,
    LatentAttention,
    MoE,
    Norm,
    Router,
)
from transformer.spec.model import Embedding, Head, Model, MultiToken, Origin, Pooler, Stack, Transform, streaming
from transformer.spec.positions import (
    LearnedPositions,
    LinearScaling,
    Mask,
    PiecewiseScaling,
    RelativeBias,
    RelativeKeys,
    Rope,
    Scaling,
    SinusoidalPositions,
    YarnScaling,
)

__all__ = [
    "Attention", "Block", "CacheDims", "ClampedGate", "Embedding", "FeedForward", "Head", "LatentAttention",
    "LearnedPositions", "LinearScaling", "Mask", "MoE", "Model", "MultiToken", "Norm", "Origin", "PiecewiseScaling",
    "Pooler", "RelativeBias", "RelativeKeys", "Rope", "Router", "Scaling", "SinusoidalPositions", "SpecError", "Stack",
    "Transform", "YarnScaling", "streaming",
]  # fmt: skip
