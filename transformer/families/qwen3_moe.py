"""Qwen3, mixture-of-experts sizes (Yang et al. 2025): Qwen3's layer with routed experts and no shared one."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from transformer import spec as s
from transformer.checkpoints.table import Row, Table
from transformer.families import _hf, _llama, _rows, qwen2, qwen3

MODEL_TYPES = ("qwen3_moe",)


@dataclass(frozen=True, kw_only=True)
class Dims(qwen2.Common):
    """Numbers of the published configs.

    Attributes:
      d_ff: width of the layers that have no experts.
      moe_d_ff: width of one expert.
      normalize: picked probabilities are divided by their sum.
      sparse_step: every so-manieth layer has experts.
      dense_layers: layers that have none all the same.
      full_layers: no choice, unlike in the dense sizes: a window slides in every layer.
    """

    full_layers = 0
    moe_d_ff: int
    num_experts: int
    top_k: int
    normalize: bool
    sparse_step: int
    dense_layers: tuple[int, ...]


def spec(dims: Dims) -> s.Model:
    """The decoder of Qwen3-MoE."""
    router = s.Router(
        score="softmax", normalize=dims.normalize, scale=1.0, bias=False, correction=False, groups=1, top_groups=1,
        group_score="max",
    )  # fmt: skip
    expert = _llama.swiglu(dims.moe_d_ff)
    moe = s.MoE(num_experts=dims.num_experts, top_k=dims.top_k, expert=expert, router=router, shared=None)
    dense = qwen2.layers(dims, qkv_bias=False, qk_norm=True)
    blocks = tuple(
        dataclasses.replace(block, ffn=moe) if (i + 1) % dims.sparse_step == 0 and i not in dims.dense_layers else block
        for i, block in enumerate(dense)
    )
    return _llama.decoder(dims, blocks, tied=dims.tied, period=_hf.period_of(blocks))


def table(model: s.Model) -> Table:
    """Experts one by one; `gate` is the router."""
    prefix = _rows.LAYER + "mlp."
    router = Row(paths=("ffn/router/kernel",), name=prefix + "gate.weight", pattern="e d -> d e")

    def ffn(f: s.FeedForward | s.MoE) -> list[Row]:
        if isinstance(f, s.FeedForward):
            return _rows.feed_forward(f)
        return [router, *_rows.experts(f, prefix + "experts.", "gate_proj", "up_proj", "down_proj")]

    layers = ((*_rows.attention(b.mixer), *ffn(b.ffn), *_rows.norms(_rows.PRE_NORMS)) for b in model.decoder.layers)
    return Table(around=_rows.around(model), layers=tuple(layers), ignored=_rows.BUFFERS)


def from_hf(c: _hf.HFConfig) -> Dims:
    """The dimensions that a Hugging Face config states; older files say num_experts, newer num_local_experts."""
    experts = c.take("num_local_experts", None)
    dims = vars(qwen3.from_hf(c))
    del dims["full_layers"]
    # Whatever max_window_layers says (transformers, models/qwen3_moe/modeling_qwen3_moe.py, Qwen3MoeModel.forward).
    window = c.take("sliding_window", None) if c.take("use_sliding_window", False) else None
    everywhere = [window is not None] * dims["num_layers"]
    slides = _hf.sliding(c, dims["num_layers"], everywhere)
    c.require(
        slides == everywhere, "layer_types", slides, "expected every layer to slide if use_sliding_window, or none"
    )
    return Dims(
        **dims | {"window": window},
        moe_d_ff=c.take("moe_intermediate_size"),
        num_experts=c.take("num_experts") if experts is None else experts,
        top_k=c.take("num_experts_per_tok"),
        normalize=c.take("norm_topk_prob"),
        sparse_step=c.take("decoder_sparse_step"),
        dense_layers=tuple(c.take("mlp_only_layers", None) or ()),
    )


def to_hf(dims: Dims) -> dict[str, Any]:
    """The Hugging Face config of the dimensions."""
    return qwen3.to_hf(dims) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": dims.moe_d_ff,
        "num_experts": dims.num_experts,
        "num_experts_per_tok": dims.top_k,
        "norm_topk_prob": dims.normalize,
        "decoder_sparse_step": dims.sparse_step,
        "mlp_only_layers": list(dims.dense_layers),
    }
