"""DeepSeek-V3 (DeepSeek-AI 2024): latent attention, one shared and many routed experts, sigmoid routing in groups.

And multi-token prediction: layers behind the decoder's own that predict further tokens.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from transformer import spec as s
from transformer.checkpoints.table import Row, Table
from transformer.families import _hf, _llama, _rows

MODEL_TYPES = ("deepseek_v3",)
# The norms of the latents have this epsilon, whatever rms_norm_eps says.
LATENT_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Numbers that the published configs of versions 2 and 3 state alike.

    Attributes:
      d_ff: width of the `dense_layers` first layers, which have no experts.
      moe_d_ff: width of one routed expert; the shared one is `num_shared` times as wide.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    d_ff: int
    moe_d_ff: int
    num_experts: int
    num_shared: int
    top_k: int
    groups: int
    top_groups: int
    normalize: bool
    routed_scale: float
    dense_layers: int
    max_length: int
    rope_theta: float
    rope_scaling: s.YarnScaling | None
    rope_interleaved: bool
    attention_bias: bool
    norm_eps: float
    tied: bool


@dataclass(frozen=True, kw_only=True)
class Dims(Decoder):
    """Version 3's: with the number of modules of multi-token prediction."""

    mtp: int = 0


def model(dims: Decoder, router: s.Router) -> s.Model:
    """DeepSeek's decoder; versions 2 and 3 differ in the router."""
    if not 0 <= dims.dense_layers <= dims.num_layers:
        raise s.SpecError(f"dense_layers={dims.dense_layers}: use 0 to num_layers={dims.num_layers}")
    scale = (dims.nope_dim + dims.rope_dim) ** -0.5
    if dims.rope_scaling and dims.rope_scaling.mscale_all_dim:
        scale *= dims.rope_scaling.gain(dims.rope_scaling.mscale_all_dim) ** 2
    rope = s.Rope(
        theta=dims.rope_theta, dim=dims.rope_dim, interleaved=dims.rope_interleaved, scaling=dims.rope_scaling
    )
    attention = s.LatentAttention(
        num_heads=dims.num_heads,
        q_rank=dims.q_rank,
        kv_rank=dims.kv_rank,
        nope_dim=dims.nope_dim,
        rope_dim=dims.rope_dim,
        v_dim=dims.v_dim,
        mask=s.Mask(causal=True),
        scale=scale,
        rope=rope,
        latent_norm=_llama.rms_norm(LATENT_EPS),
        bias=dims.attention_bias,
    )
    moe = s.MoE(
        num_experts=dims.num_experts,
        top_k=dims.top_k,
        expert=_llama.swiglu(dims.moe_d_ff),
        router=router,
        shared=_llama.swiglu(dims.moe_d_ff * dims.num_shared) if dims.num_shared else None,
    )

    def layer(ffn: s.FeedForward | s.MoE) -> s.Block:
        return s.Block(mixer=attention, ffn=ffn, norm=_llama.rms_norm(dims.norm_eps), placement="pre")

    dense, sparse = layer(_llama.swiglu(dims.d_ff)), layer(moe)
    layers = (dense,) * dims.dense_layers + (sparse,) * (dims.num_layers - dims.dense_layers)
    return _llama.decoder(dims, layers, tied=dims.tied, head=dims.dense_layers)


def spec(dims: Dims) -> s.Model:
    """DeepSeek-V3; a module of multi-token prediction has one layer, equal to the decoder's last."""
    if dims.mtp < 0:
        raise s.SpecError(f"mtp={dims.mtp}: use 0 (none) or more modules")
    router = s.Router(
        score="sigmoid", normalize=dims.normalize, scale=dims.routed_scale, bias=False, correction=True,
        groups=dims.groups, top_groups=dims.top_groups, group_score="top2",
    )  # fmt: skip
    trunk = model(dims, router)
    if not dims.mtp:
        return trunk
    norm = trunk.decoder.final_norm
    layer = s.Stack(head=trunk.decoder.layers[-1:], body=(), repeats=0, final_norm=norm)
    return dataclasses.replace(trunk, mtp=s.MultiToken(depth=dims.mtp, norm=norm, decoder=layer))


def table(model: s.Model) -> Table:
    """DeepSeek's names; modules of multi-token prediction are further layers, left out where the model has none."""
    count = model.decoder.num_layers
    modules = range(count, count + model.mtp.depth) if model.mtp else ()
    blocks = (*model.decoder.layers, *(model.mtp.decoder.layers * model.mtp.depth if model.mtp else ()))
    layers = ((*_attention(b.mixer), *_ffn(b.ffn), *_rows.norms(_rows.PRE_NORMS)) for b in blocks)
    around = [*_rows.around(model), *(row for k, i in enumerate(modules) for row in _module(k, f"model.layers.{i}."))]
    tables = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    if model.head.tied:
        tables["shared_head.head"] = "model.embed_tokens"
    return Table(
        around=tuple(around),
        layers=tuple(layers),
        copies={f"model.layers.{i}.{a}.weight": f"{b}.weight" for i in modules for a, b in tables.items()},
        ignored=(*_rows.BUFFERS, *(() if model.mtp else [rf"model\.layers\.{count}\..*"])),
    )


def _module(depth: int, prefix: str) -> list[Row]:
    """What a module of multi-token prediction has around its layer."""
    names = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "decoder/final_norm": "shared_head.norm"}
    path = f"mtp/depth_{depth}"
    rows = [_rows.same(f"{path}/{ours}/scale", f"{prefix}{theirs}.weight") for ours, theirs in names.items()]
    return [*rows, *_rows.linear(f"{path}/projection", prefix + "eh_proj", "o i -> i o")]


def _attention(a: s.LatentAttention) -> list[Row]:
    prefix = _rows.LAYER + "self_attn."
    heads = dict(n=a.num_heads)
    if a.q_rank is None:
        rows = _rows.linear("attention/query", prefix + "q_proj", "(n h) d -> d n h", **heads)
    else:
        rows = _rows.linear("attention/query_down", prefix + "q_a_proj", "o d -> d o", bias=a.bias)
        rows += [_rows.same("attention/query_norm/scale", prefix + "q_a_layernorm.weight")]
        rows += _rows.linear("attention/query_up", prefix + "q_b_proj", "(n h) r -> r n h", **heads)
    rows += _rows.linear("attention/kv_down", prefix + "kv_a_proj_with_mqa", "o d -> d o", bias=a.bias)
    up = Row(
        paths=("attention/key_up", "attention/value_up"),
        name=prefix + "kv_b_proj.weight",
        pattern="(n h) r -> r n h",
        sizes=heads,
        axis=2,
        parts=(a.nope_dim, a.v_dim),
    )
    out = _rows.linear("attention/out", prefix + "o_proj", "d (n h) -> n h d", bias=a.bias, **heads)
    return [*rows, _rows.same("attention/kv_norm/scale", prefix + "kv_a_layernorm.weight"), up, *out]


def _ffn(f: s.FeedForward | s.MoE) -> list[Row]:
    prefix = _rows.LAYER + "mlp."
    if isinstance(f, s.FeedForward):
        return _rows.feed_forward(f)
    rows = [Row(paths=("ffn/router/kernel",), name=prefix + "gate.weight", pattern="e d -> d e")]
    if f.router.correction:
        rows += [_rows.same("ffn/router/correction", prefix + "gate.e_score_correction_bias")]
    rows += _rows.experts(f, prefix + "experts.", "gate_proj", "up_proj", "down_proj")
    return rows + (_rows.feed_forward(f.shared, "ffn/shared", prefix + "shared_experts.") if f.shared else [])


NAMES = {
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
    "moe_d_ff": "moe_intermediate_size",
    "num_experts": "n_routed_experts",
    "num_shared": "n_shared_experts",
    "top_k": "num_experts_per_tok",
    "groups": "n_group",
    "top_groups": "topk_group",
    "normalize": "norm_topk_prob",
    "routed_scale": "routed_scaling_factor",
    "dense_layers": "first_k_dense_replace",
    "attention_bias": "attention_bias",
    "tied": "tie_word_embeddings",
}


def take_dims(c: _hf.HFConfig) -> dict[str, Any]:
    """The dimensions that both versions state alike."""
    c.expect("hidden_act", "silu")
    c.expect("moe_layer_freq", 1)
    c.expect("mlp_bias", False)
    for derived in ("head_dim", "qk_head_dim"):  # follow from the others
        c.take(derived, None)
    dims = _hf.decoder_dims(c)
    del dims["num_kv_heads"], dims["head_dim"]
    theta, scaling = c.rope(theta=1e4)
    missing = {"attention_bias": False, "tie_word_embeddings": False, "n_shared_experts": 0}
    found = {ours: c.take(theirs, *([missing[theirs]] if theirs in missing else [])) for ours, theirs in NAMES.items()}
    found["routed_scale"], found["num_shared"] = float(found["routed_scale"]), found["num_shared"] or 0
    found["groups"], found["top_groups"] = found["groups"] or 1, found["top_groups"] or 1
    return {**dims, **found, "rope_theta": theta, "rope_scaling": c.scaling(scaling, dims["max_length"])}


def from_hf(c: _hf.HFConfig) -> Dims:
    """The dimensions that a Hugging Face config states."""
    c.expect("scoring_func", "sigmoid")
    c.expect("topk_method", "noaux_tc")
    mtp = c.take("num_nextn_predict_layers", 0) or 0
    known = type(mtp) is int and 0 <= mtp <= _hf.MAX_LAYERS
    c.require(known, "num_nextn_predict_layers", mtp, "expected a whole number, 0 or more")
    return Dims(**take_dims(c), rope_interleaved=c.take("rope_interleave", True), mtp=mtp)


def fields(dims) -> dict[str, Any]:
    """What both versions state alike, for export."""
    names = {ours: theirs for ours, theirs in _hf.NAMES.items() if ours != "num_kv_heads"} | NAMES
    return {
        "hidden_act": "silu",
        **{theirs: getattr(dims, ours) for ours, theirs in names.items()},
        "num_key_value_heads": dims.num_heads,
        "moe_layer_freq": 1,
        "rope_parameters": _hf.rope_parameters(dims.rope_theta, dims.rope_scaling),
    }


def to_hf(dims: Dims) -> dict[str, Any]:
    """The Hugging Face config of the dimensions."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **fields(dims),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_interleave": dims.rope_interleaved,
        "num_nextn_predict_layers": dims.mtp,
    }
