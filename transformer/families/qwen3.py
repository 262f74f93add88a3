"""Qwen3, dense sizes (Yang et al. 2025): Llama's layer with RMSNorm on each head of q and k."""

from dataclasses import dataclass
from typing import Any

from transformer import spec as s
from transformer.families import _hf, _rows, qwen2

MODEL_TYPES = ("qwen3",)


@dataclass(frozen=True, kw_only=True)
class Dims(qwen2.Dims):
    """Numbers of the published configs; `rope_scaling` is YaRN where a checkpoint is run past its native length."""


def spec(dims: Dims) -> s.Model:
    """The decoder of Qwen3."""
    return qwen2.stack(dims, qwen2.layers(dims, qkv_bias=False, qk_norm=True))


table = _rows.dense_decoder


def from_hf(c: _hf.HFConfig) -> Dims:
    """The dimensions that a Hugging Face config states."""
    c.expect("attention_bias", False)
    return Dims(**vars(qwen2.from_hf(c)))


def to_hf(dims: Dims) -> dict[str, Any]:
    """The Hugging Face config of the dimensions."""
    return qwen2.to_hf(dims) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
    }
