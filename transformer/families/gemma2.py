"""Gemma 2 (Gemma Team 2024): sandwich norms, alternating local and global layers, softcaps, GeGLU."""

from dataclasses import dataclass
from typing import Any

from transformer import spec as s
from transformer.checkpoints.table import Table
from transformer.families import _hf, _llama, _rows

MODEL_TYPES = ("gemma2",)
NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, kw_only=True)
class Dims(_llama.Dims):
    """Numbers of the published configs; even layers see `window` keys; scores are scaled by query_scale ** -0.5."""

    window: int
    query_scale: float
    attention_softcap: float | None
    final_softcap: float | None


def rms_norm(eps: float) -> s.Norm:
    """Gemma's norm: stored scales are centred on zero, and multiply in float32."""
    return s.Norm(kind="rms", eps=eps, offset=1.0, bias=False, scale_in_float32=True)


def decoder(dims, layers: tuple[s.Block, ...], period: int, softcap: float | None) -> s.Model:
    """Gemma's decoder: token vectors are scaled by sqrt(d_model) and serve as the head."""
    return s.Model(
        vocab_size=dims.vocab_size,
        d_model=dims.d_model,
        max_length=dims.max_length,
        embedding=s.Embedding(scale=dims.d_model**0.5, positions=None),
        decoder=s.Stack.of(layers, period, layers[0].norm),
        head=s.Head(tied=True, bias=False, softcap=softcap),
    )


def spec(dims: Dims) -> s.Model:
    """The decoder of Gemma 2."""
    ffn = s.FeedForward(d_ff=dims.d_ff, activation="gelu_tanh", gated=True, bias=False)

    def layer(window: int | None) -> s.Block:
        mechanisms = dict(scale=dims.query_scale**-0.5, softcap=dims.attention_softcap)
        attention = _llama.attention(dims, window=window, **mechanisms)
        return s.Block(mixer=attention, ffn=ffn, norm=rms_norm(dims.norm_eps), placement="sandwich")

    layers = tuple(layer(None if i % 2 else dims.window) for i in range(dims.num_layers))
    return decoder(dims, layers, 2, dims.final_softcap)


def table(model: s.Model) -> Table:
    """Gemma's names, those of its four norms included."""
    return _rows.dense_decoder(model, NORMS)


def from_hf(c: _hf.HFConfig) -> Dims:
    """The dimensions that a Hugging Face config states."""
    expect(c)
    dims = _hf.decoder_dims(c)
    default = [i % 2 == 0 for i in range(dims["num_layers"])]
    slides = _hf.sliding(c, dims["num_layers"], default)
    c.require(slides == default, "layer_types", slides, "expected sliding and full layers in turns")
    c.expect("sliding_window_size", c.take("sliding_window"))  # a second spelling of the same
    theta, scaling = c.rope(theta=1e4)
    c.refuse_scaling(scaling)
    return Dims(
        **dims,
        window=c.take("sliding_window"),
        query_scale=float(c.take("query_pre_attn_scalar")),
        rope_theta=theta,
        attention_softcap=c.take("attn_logit_softcapping"),
        final_softcap=c.take("final_logit_softcapping"),
    )


def expect(c: _hf.HFConfig) -> None:
    """What all Gemma configs state alike."""
    c.expect("hidden_activation", "gelu_pytorch_tanh")
    c.expect("hidden_act", "gelu_pytorch_tanh", "gelu")  # ignored where hidden_activation is there
    c.expect("attention_bias", False)
    c.expect("tie_word_embeddings", True)
    c.expect("use_bidirectional_attention", False, None)


def fields(dims) -> dict[str, Any]:
    """What all Gemma configs state, for export."""
    return {
        **_hf.decoder_fields(dims),
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": dims.window,
        # An integer to those who read it.
        "query_pre_attn_scalar": int(dims.query_scale) if dims.query_scale.is_integer() else dims.query_scale,
        "attention_bias": False,
        "tie_word_embeddings": True,
    }


def to_hf(dims: Dims) -> dict[str, Any]:
    """The Hugging Face config of the dimensions."""
    windows = [None if i % 2 else dims.window for i in range(dims.num_layers)]
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        **fields(dims),
        "rope_parameters": _hf.rope_parameters(dims.rope_theta, None),
        "layer_types": _hf.layer_types(windows),
        "attn_logit_softcapping": dims.attention_softcap,
        "final_logit_softcapping": dims.final_softcap,
    }
