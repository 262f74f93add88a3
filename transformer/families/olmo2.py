"""OLMo 2 (OLMo Team 2024, arXiv:2501.00656): Llama's layer, normed after each branch and over all heads of q and k."""

from dataclasses import dataclass
from typing import Any

from transformer import spec as s
from transformer.checkpoints.table import Table
from transformer.families import _hf, _llama, _rows

MODEL_TYPES = ("olmo2",)
NORMS = {"attention_post_norm": "post_attention_layernorm", "ffn_post_norm": "post_feedforward_layernorm"}


@dataclass(frozen=True, kw_only=True)
class Dims(_llama.Dims):
    """Numbers of the published configs."""


def spec(dims: Dims) -> s.Model:
    """The decoder of OLMo 2."""
    norm = s.Norm(kind="rms", eps=dims.norm_eps, offset=0.0, bias=False, scale_in_float32=True)
    layer = s.Block(
        mixer=_llama.attention(dims, qk_norm=norm, qk_norm_joint=True),
        ffn=_llama.swiglu(dims.d_ff),
        norm=norm,
        placement="after",
    )
    return _llama.decoder(dims, (layer,) * dims.num_layers, tied=False)


def table(model: s.Model) -> Table:
    """Llama's names, but for the norms."""
    return _rows.dense_decoder(model, NORMS)


def from_hf(c: _hf.HFConfig) -> Dims:
    """The dimensions that a Hugging Face config states."""
    c.expect("hidden_act", "silu")
    c.expect("attention_bias", False)
    c.expect("tie_word_embeddings", False)
    theta, scaling = c.rope()
    c.refuse_scaling(scaling)
    return Dims(**_hf.decoder_dims(c), rope_theta=theta)


def to_hf(dims: Dims) -> dict[str, Any]:
    """The Hugging Face config of the dimensions."""
    return {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "hidden_act": "silu",
        **_hf.decoder_fields(dims),
        "rope_parameters": _hf.rope_parameters(dims.rope_theta, None),
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
