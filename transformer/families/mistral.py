"""Mistral 7B (Jiang et al. 2023): Llama's layer with a sliding window in every layer."""

from dataclasses import dataclass
from typing import Any

from transformer import spec as s
from transformer.families import _hf, _llama, _rows

MODEL_TYPES = ("mistral",)


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Numbers of the published config; `window` None attends to everything (v0.2 on)."""

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    max_length: int
    window: int | None
    rope_theta: float
    norm_eps: float
    tied: bool


def attention(dims, window: int | None) -> s.Attention:
    """Llama's attention with a window."""
    return s.Attention(
        num_heads=dims.num_heads,
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        mask=s.Mask(causal=True, window=window),
        scale=dims.head_dim**-0.5,
        rope=s.Rope(theta=dims.rope_theta, dim=dims.head_dim, interleaved=False),
        qkv_bias=False,
        out_bias=False,
    )


def spec(dims: Dims) -> s.Model:
    """The decoder of Mistral 7B."""
    norm = _llama.rms_norm(dims.norm_eps)
    layer = s.Block(mixer=attention(dims, dims.window), ffn=_llama.swiglu(dims.d_ff), norm=norm, placement="pre")
    return _llama.decoder(
        (layer,) * dims.num_layers,
        vocab_size=dims.vocab_size,
        d_model=dims.d_model,
        max_length=dims.max_length,
        tied=dims.tied,
    )


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
