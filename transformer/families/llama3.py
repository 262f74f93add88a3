"""Llama 3 (Grattafiori et al. 2024): pre-RMSNorm decoder, rotary positions, grouped queries, SwiGLU."""

from dataclasses import dataclass
from typing import Any

from transformer import spec as s
from transformer.families import _hf, _llama, _rows

MODEL_TYPES = ("llama",)


@dataclass(frozen=True, kw_only=True)
class Dims(_llama.Dims):
    """Numbers of the published configs; `rope_scaling` is None in 3.0 and piecewise from 3.1 on."""

    rope_scaling: s.Scaling | None = None
    attention_bias: bool
    mlp_bias: bool
    tied: bool


def spec(dims: Dims) -> s.Model:
    """The decoder of Llama; a bias only where a derived checkpoint adds one."""
    attention = _llama.attention(
        dims, rope_scaling=dims.rope_scaling, qkv_bias=dims.attention_bias, out_bias=dims.attention_bias
    )
    ffn = s.FeedForward(d_ff=dims.d_ff, activation="silu", gated=True, bias=dims.mlp_bias)
    layer = s.Block(mixer=attention, ffn=ffn, norm=_llama.rms_norm(dims.norm_eps), placement="pre")
    return _llama.decoder(dims, (layer,) * dims.num_layers, tied=dims.tied)


table = _rows.dense_decoder


def from_hf(c: _hf.HFConfig) -> Dims:
    """The dimensions that a Hugging Face config states."""
    c.expect("hidden_act", "silu")
    theta, scaling = c.rope(theta=1e4)  # Llama 1 and 2 leave it out
    return Dims(
        **_hf.decoder_dims(c),
        rope_theta=theta,
        rope_scaling=c.scaling(scaling, c.take("max_position_embeddings")),
        attention_bias=c.take("attention_bias", False),
        mlp_bias=c.take("mlp_bias", False),
        tied=c.take("tie_word_embeddings", False),
    )


def to_hf(dims: Dims) -> dict[str, Any]:
    """The Hugging Face config of the dimensions."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        **_hf.decoder_fields(dims),
        "rope_parameters": _hf.rope_parameters(dims.rope_theta, dims.rope_scaling),
        "attention_bias": dims.attention_bias,
        "mlp_bias": dims.mlp_bias,
        "tie_word_embeddings": dims.tied,
    }
