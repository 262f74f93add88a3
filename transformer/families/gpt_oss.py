"""gpt-oss (OpenAI 2025): sliding and full layers in turns, learned sinks, biases, clamped SwiGLU experts, YaRN."""

from dataclasses import dataclass
from typing import Any

from transformer import spec as s
from transformer.checkpoints.table import Row, Table
from transformer.families import _hf, _llama, _rows

MODEL_TYPES = ("gpt_oss",)
# Fixed in the published code (openai/gpt-oss, torch/model.py, swiglu).
ALPHA, OFFSET = 1.702, 1.0


@dataclass(frozen=True, kw_only=True)
class Dims(_llama.Dims):
    """Numbers of the published configs; even layers see `window` keys; `d_ff` is an expert's."""

    window: int
    num_experts: int
    top_k: int
    swiglu_limit: float
    rope_scaling: s.YarnScaling | None


def spec(dims: Dims) -> s.Model:
    """The decoder of gpt-oss."""
    norm = s.Norm(kind="rms", eps=dims.norm_eps, offset=0.0, bias=False, scale_in_float32=True)
    clamp = s.ClampedGate(limit=dims.swiglu_limit, alpha=ALPHA, offset=OFFSET)
    expert = s.FeedForward(d_ff=dims.d_ff, activation="silu", gated=True, bias=True, clamp=clamp)
    router = s.Router(
        score="softmax_picked", normalize=False, scale=1.0, bias=True, correction=False, groups=1, top_groups=1,
        group_score="max",
    )  # fmt: skip
    moe = s.MoE(num_experts=dims.num_experts, top_k=dims.top_k, expert=expert, router=router, shared=None)

    def layer(window: int | None) -> s.Block:
        mechanisms = dict(qkv_bias=True, out_bias=True, sinks=True)
        attention = _llama.attention(dims, window=window, rope_scaling=dims.rope_scaling, **mechanisms)
        return s.Block(mixer=attention, ffn=moe, norm=norm, placement="pre")

    layers = tuple(layer(None if i % 2 else dims.window) for i in range(dims.num_layers))
    return _llama.decoder(dims, layers, tied=False, period=2)


def table(model: s.Model) -> Table:
    """Experts of a layer in one tensor, gate and up in alternate columns."""
    prefix = _rows.LAYER + "mlp."

    def layer(block: s.Block) -> tuple[Row, ...]:
        width = block.ffn.expert.d_ff
        fused = dict(parts=(width, width), sizes={"s": 2})
        names = [f"ffn/experts/{part}_{{}}" for part in ("gate", "up")]
        kernels, biases = (tuple(name.format(kind) for name in names) for kind in ("kernel", "bias"))
        ffn = [
            Row(paths=("ffn/router/kernel",), name=prefix + "router.weight", pattern="e d -> d e"),
            Row(paths=("ffn/router/bias",), name=prefix + "router.bias", pattern="e -> e"),
            Row(paths=kernels, name=prefix + "experts.gate_up_proj", pattern="e d (f s) -> e d (s f)", axis=2, **fused),
            Row(paths=biases, name=prefix + "experts.gate_up_proj_bias", pattern="e (f s) -> e (s f)", axis=1, **fused),
            Row(paths=("ffn/experts/down_kernel",), name=prefix + "experts.down_proj", pattern="e f d -> e f d"),
            Row(paths=("ffn/experts/down_bias",), name=prefix + "experts.down_proj_bias", pattern="e d -> e d"),
        ]
        return (*_rows.attention(block.mixer), *ffn, *_rows.norms(_rows.PRE_NORMS))

    return Table(around=_rows.around(model), layers=tuple(map(layer, model.decoder.layers)))


def from_hf(c: _hf.HFConfig) -> Dims:
    """The dimensions that a Hugging Face config states."""
    c.expect("hidden_act", "silu")
    c.expect("attention_bias", True)
    c.expect("tie_word_embeddings", False)
    c.expect("swiglu_alpha", ALPHA)
    dims = _hf.decoder_dims(c)
    default = [i % 2 == 0 for i in range(dims["num_layers"])]
    slides = _hf.sliding(c, dims["num_layers"], default)
    c.require(slides == default, "layer_types", slides, "expected sliding and full layers in turns")
    theta, scaling = c.rope(theta=150000.0)
    # Theirs fills in YaRN by numbers of its own, even for null.
    c.require(scaling is not None, "rope_scaling", scaling, "state it, or rope_parameters with rope_type 'default'")
    top_k = c.take("num_experts_per_tok")
    c.expect("experts_per_token", top_k)
    c.take("initial_context_length", None)  # repeats the scaling's original_max_position_embeddings
    return Dims(
        **dims,
        window=c.take("sliding_window"),
        num_experts=c.take("num_local_experts"),
        top_k=top_k,
        swiglu_limit=float(c.take("swiglu_limit", 7.0)),
        rope_theta=theta,
        rope_scaling=c.scaling(scaling, dims["max_length"]),
    )


def to_hf(dims: Dims) -> dict[str, Any]:
    """The Hugging Face config of the dimensions."""
    windows = [None if i % 2 else dims.window for i in range(dims.num_layers)]
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        **_hf.decoder_fields(dims),
        "rope_parameters": _hf.rope_parameters(dims.rope_theta, dims.rope_scaling),
        "attention_bias": True,
        "sliding_window": dims.window,
        "layer_types": _hf.layer_types(windows),
        "num_local_experts": dims.num_experts,
        "num_experts_per_tok": dims.top_k,
        "swiglu_limit": dims.swiglu_limit,
        "tie_word_embeddings": False,
    }
