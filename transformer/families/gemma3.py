"""Gemma 3, text model (Gemma Team 2025): sandwich norms, QK-norm, five local layers to one global, GeGLU.

The checkpoints that see images too hold it as their `text_config` and `language_model`; what sees is left out.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from transformer import spec as s
from transformer.checkpoints.table import Spelling, Table
from transformer.families import _hf, _llama, gemma2

MULTIMODAL = "gemma3"
MODEL_TYPES = ("gemma3_text", MULTIMODAL)
# Published `text_config` groups state only what differs from these (huggingface/transformers, Gemma3TextConfig).
TEXT_CONFIG = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
# Fields beside `text_config`: how images are seen, and which tokens stand for them.
IMAGES = ("vision_config", "mm_tokens_per_image", "image_token_index", "boi_token_index", "eoi_token_index",
          "image_token_id", "boi_token_id", "eoi_token_id")  # fmt: skip
# Where the text model's tensors lie in such a checkpoint: as published, and as `transformers` 5 names them inside.
SPELLINGS = (Spelling("model.", "language_model.model."), Spelling("model.", "model.language_model."))
PARTS = ("vision_tower", "multi_modal_projector")


@dataclass(frozen=True, kw_only=True)
class Dims(_llama.Dims):
    """Numbers of the published configs.

    Attributes:
      window: keys that a local layer sees.
      pattern: every `pattern`-th layer is global, the others are local.
      query_scale: scores are multiplied by query_scale ** -0.5 (not by head_dim ** -0.5).
      rope_theta_local: base of the local layers, never scaled; rope_theta and rope_scaling serve the global ones.
    """

    window: int
    pattern: int
    query_scale: float
    rope_theta_local: float
    rope_scaling: s.LinearScaling | None = None
    final_softcap: float | None = None


def _globals(dims: Dims) -> list[bool]:
    return [(i + 1) % dims.pattern == 0 for i in range(dims.num_layers)]


def spec(dims: Dims) -> s.Model:
    """The decoder of Gemma 3."""
    norm = gemma2.rms_norm(dims.norm_eps)
    everywhere = s.Rope(theta=dims.rope_theta, dim=dims.head_dim, interleaved=False, scaling=dims.rope_scaling)
    nearby = s.Rope(theta=dims.rope_theta_local, dim=dims.head_dim, interleaved=False)
    ffn = s.FeedForward(d_ff=dims.d_ff, activation="gelu_tanh", gated=True, bias=False)

    def layer(window: int | None, rope: s.Rope) -> s.Block:
        attention = s.Attention(
            num_heads=dims.num_heads,
            num_kv_heads=dims.num_kv_heads,
            head_dim=dims.head_dim,
            mask=s.Mask(causal=True, window=window),
            scale=dims.query_scale**-0.5,
            rope=rope,
            qkv_bias=False,
            out_bias=False,
            qk_norm=norm,
        )
        return s.Block(mixer=attention, ffn=ffn, norm=norm, placement="sandwich")

    local, full = layer(dims.window, nearby), layer(None, everywhere)
    layers = tuple(full if everything else local for everything in _globals(dims))
    return gemma2.decoder(dims, layers, dims.pattern, dims.final_softcap)


def table(model: s.Model) -> Table:
    """Gemma's names, wherever they lie."""
    left_out = {part: rf"(model\.)?{part}\..*" for part in PARTS}
    return dataclasses.replace(gemma2.table(model), spellings=SPELLINGS, left_out=left_out)


def from_hf(c: _hf.HFConfig) -> Dims:
    """The dimensions of the text model that a Hugging Face config states."""
    if c.take("model_type") == MULTIMODAL:
        for name in IMAGES:
            c.take(name, None)
        c.expect("tie_word_embeddings", True)
        c = c.group("text_config", TEXT_CONFIG)
    gemma2.expect(c)
    c.expect("attn_logit_softcapping", None)
    dims = _hf.decoder_dims(c)
    count = dims["num_layers"]
    pattern = c.take("sliding_window_pattern", None) or c.take("_sliding_window_pattern", None) or 6
    c.take("_sliding_window_pattern", None)  # a second spelling of the same
    slides = _hf.sliding(c, count, [(i + 1) % pattern != 0 for i in range(count)])
    if False in slides:
        pattern = slides.index(False) + 1
    c.require(
        slides == [(i + 1) % pattern != 0 for i in range(count)], "layer_types", slides, f"no period of {pattern}"
    )
    theta, local, scaling = _ropes(c)
    return Dims(
        **dims,
        window=c.take("sliding_window"),
        pattern=pattern,
        query_scale=float(c.take("query_pre_attn_scalar")),
        rope_theta=theta,
        rope_theta_local=local,
        rope_scaling=c.scaling(scaling, dims["max_length"]),
        final_softcap=c.take("final_logit_softcapping", None),
    )


def _ropes(c: _hf.HFConfig) -> tuple[float, float, dict[str, Any] | None]:
    """(global theta, local theta, global scaling): in one dict a kind of layer, or in fields of their own."""
    kinds = c.take("rope_parameters", None)
    local = c.take("rope_local_base_freq", 1e4)
    if kinds is None or "full_attention" not in kinds:
        theta, scaling = c.rope(theta=1e6)
        return theta, float(local), scaling
    wide, near = dict(kinds["full_attention"]), dict(kinds["sliding_attention"])
    theta, local = wide.pop("rope_theta", 1e6), near.pop("rope_theta", local)
    c.refuse_scaling(near)
    return float(theta), float(local), wide


def to_hf(dims: Dims) -> dict[str, Any]:
    """The Hugging Face config of the dimensions."""
    windows = [None if everything else dims.window for everything in _globals(dims)]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **gemma2.fields(dims),
        "rope_parameters": {
            "full_attention": _hf.rope_parameters(dims.rope_theta, dims.rope_scaling),
            "sliding_attention": _hf.rope_parameters(dims.rope_theta_local, None),
        },
        "sliding_window_pattern": dims.pattern,
        "layer_types": _hf.layer_types(windows),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": dims.final_softcap,
    }
