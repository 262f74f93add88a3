"""Mistral 7B (Jiang et al. 2023): Llama's layer with a sliding window in every layer."""

from dataclasses import dataclass
from typing import Any

from transformer import spec as s
from transformer.families import _hf, _llama, _rows

MODEL_TYPES = ("mistral",)


@dataclass(frozen=True, kw_only=True)
class Dims(_llama.Dims):
    """Numbers of the published config; `window` None attends to everything (v0.2 on)."""

    window: int | None
    tied: bool


def spec(dims: Dims) -> s.Model:
    """The decoder of Mistral 7B."""
    layer = s.Block(
        mixer=_llama.attention(dims, window=dims.window),
        ffn=_llama.swiglu(dims.d_ff),
        norm=_llama.rms_norm(dims.norm_eps),
        placement="pre",
    )
    return _llama.decoder(dims, (layer,) * dims.num_layers, tied=dims.tied)


table = _rows.dense_decoder


def from_hf(c: _hf.HFConfig) -> Dims:
    """The dimensions that a Hugging Face config states."""
    c.expect("hidden_act", "silu")
    theta, scaling = c.rope()
    c.refuse_scaling(scaling)
    return Dims(
        **_hf.decoder_dims(c),
        window=c.take("sliding_window"),
        rope_theta=theta,
        tied=c.take("tie_word_embeddings", False),
    )


def to_hf(dims: Dims) -> dict[str, Any]:
    """The Hugging Face config of the dimensions."""
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": "silu",
        **_hf.decoder_fields(dims),
        "rope_parameters": _hf.rope_parameters(dims.rope_theta, None),
        "sliding_window": dims.window,
        "tie_word_embeddings": dims.tied,
    }
