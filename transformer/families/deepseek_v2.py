"""DeepSeek-V2 (DeepSeek-AI 2024): latent attention and softmax routing, greedy or limited to groups."""

from dataclasses import dataclass
from typing import Any

from transformer import spec as s
from transformer.families import _hf, deepseek_v3

MODEL_TYPES = ("deepseek_v2",)
METHODS = ("greedy", "group_limited_greedy")


@dataclass(frozen=True, kw_only=True)
class Dims(deepseek_v3.Decoder):
    """Version 3's numbers, and how experts are picked; `normalize` is stated but never applied to the weights."""

    method: str


def spec(dims: Dims) -> s.Model:
    """The decoder of DeepSeek-V2."""
    if dims.method not in METHODS:
        raise s.SpecError(f"model.method={dims.method!r}: use one of {METHODS}")
    limited = dims.method == "group_limited_greedy"
    router = s.Router(
        score="softmax", normalize=False, scale=dims.routed_scale, bias=False, correction=False,
        groups=dims.groups if limited else 1, top_groups=dims.top_groups if limited else 1, group_score="max",
    )  # fmt: skip
    return deepseek_v3.model(dims, router)


table = deepseek_v3.table


def from_hf(c: _hf.HFConfig) -> Dims:
    """The dimensions that a Hugging Face config states."""
    c.expect("scoring_func", "softmax")
    c.expect("num_nextn_predict_layers", 0)
    return Dims(**deepseek_v3.take_dims(c), rope_interleaved=True, method=c.take("topk_method", "greedy"))


def to_hf(dims: Dims) -> dict[str, Any]:
    """The Hugging Face config of the dimensions."""
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        **deepseek_v3.fields(dims),
        "scoring_func": "softmax",
        "topk_method": dims.method,
    }
