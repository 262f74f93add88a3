"""Mixtral 8x7B (Jiang et al. 2024): Mistral's layer with eight SwiGLU experts, of which each token takes two."""

from dataclasses import dataclass
from typing import Any

from transformer import spec as s
from transformer.checkpoints.table import Row, Table
from transformer.families import _hf, _llama, _rows, mistral

MODEL_TYPES = ("mixtral",)


@dataclass(frozen=True, kw_only=True)
class Dims(mistral.Dims):
    """Mistral's numbers; `d_ff` is an expert's."""

    num_experts: int
    top_k: int


def spec(dims: Dims) -> s.Model:
    """The decoder of Mixtral: softmax over all experts, the picked ones always renormalised."""
    router = s.Router(
        score="softmax", normalize=True, scale=1.0, bias=False, correction=False, groups=1, top_groups=1,
        group_score="max",
    )  # fmt: skip
    moe = s.MoE(
        num_experts=dims.num_experts, top_k=dims.top_k, expert=_llama.swiglu(dims.d_ff), router=router, shared=None
    )
    attention, norm = _llama.attention(dims, window=dims.window), _llama.rms_norm(dims.norm_eps)
    layer = s.Block(mixer=attention, ffn=moe, norm=norm, placement="pre")
    return _llama.decoder(dims, (layer,) * dims.num_layers, tied=dims.tied)


def table(model: s.Model) -> Table:
    """Mixtral's names: w1, w3 and w2 are gate, up and down."""
    prefix = _rows.LAYER + "block_sparse_moe."
    router = Row(paths=("ffn/router/kernel",), name=prefix + "gate.weight", pattern="e d -> d e")

    def layer(block: s.Block) -> tuple[Row, ...]:
        experts = _rows.experts(block.ffn, prefix + "experts.", gate="w1", up="w3", down="w2")
        return (*_rows.attention(block.mixer), router, *experts, *_rows.norms(_rows.PRE_NORMS))

    return Table(around=_rows.around(model), layers=tuple(map(layer, model.decoder.layers)), ignored=_rows.BUFFERS)


def from_hf(c: _hf.HFConfig) -> Dims:
    """The dimensions that a Hugging Face config states."""
    base = mistral.from_hf(c)
    return Dims(**vars(base), num_experts=c.take("num_local_experts"), top_k=c.take("num_experts_per_tok"))


def to_hf(dims: Dims) -> dict[str, Any]:
    """The Hugging Face config of the dimensions."""
    return mistral.to_hf(dims) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": dims.num_experts,
        "num_experts_per_tok": dims.top_k,
    }
