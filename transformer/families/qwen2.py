"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's layer with biases on q, k and v."""

from dataclasses import dataclass
from typing import Any

from transformer import spec as s
from transformer.families import _hf, _llama, _rows

MODEL_TYPES = ("qwen2",)


@dataclass(frozen=True, kw_only=True)
class Common(_llama.Dims):
    """Numbers that the configs of all versions state; `window` is None in published sizes, which slide nowhere."""

    rope_scaling: s.YarnScaling | s.LinearScaling | None = None
    tied: bool
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class Dims(Common):
    """Numbers of the published configs; the first `full_layers` see everything, the others `window` keys."""

    full_layers: int | None = None


def windows(dims: Dims) -> list[int | None]:
    """What each layer sees."""
    full = dims.num_layers if dims.window is None or dims.full_layers is None else dims.full_layers
    return [None if i < full else dims.window for i in range(dims.num_layers)]


def layers(dims: Dims, *, qkv_bias: bool, qk_norm: bool) -> tuple[s.Block, ...]:
    """Qwen's layers, of which versions 2 and 3 differ in the biases and the norms of q and k."""
    norm = _llama.rms_norm(dims.norm_eps)

    def layer(window: int | None) -> s.Block:
        mechanisms = dict(qkv_bias=qkv_bias, qk_norm=norm if qk_norm else None)
        attention = _llama.attention(dims, window=window, rope_scaling=dims.rope_scaling, **mechanisms)
        return s.Block(mixer=attention, ffn=_llama.swiglu(dims.d_ff), norm=norm, placement="pre")

    return tuple(layer(window) for window in windows(dims))


def stack(dims: Dims, blocks: tuple[s.Block, ...]) -> s.Model:
    """The decoder of those layers: the full ones first, as an irregular head, where the rest slide."""
    return _llama.decoder(dims, blocks, tied=dims.tied, head=sum(block != blocks[-1] for block in blocks))


def spec(dims: Dims) -> s.Model:
    """The decoder of Qwen2."""
    return stack(dims, layers(dims, qkv_bias=True, qk_norm=False))


table = _rows.dense_decoder


def from_hf(c: _hf.HFConfig) -> Dims:
    """The dimensions that a Hugging Face config states."""
    c.expect("hidden_act", "silu")
    c.expect("use_mrope", False)
    theta, scaling = c.rope()
    dims = _hf.decoder_dims(c)
    window, full = _window(c, dims["num_layers"])
    return Dims(
        **dims,
        rope_theta=theta,
        rope_scaling=c.scaling(scaling, dims["max_length"]),
        tied=c.take("tie_word_embeddings", False),
        window=window,
        full_layers=full,
    )


def _window(c: _hf.HFConfig, num_layers: int) -> tuple[int | None, int | None]:
    """The window, which a file may state without using it, and how many layers come before those that slide."""
    used = c.take("use_sliding_window", False)
    unused = () if used else (None,)
    window, full = c.take("sliding_window", *unused), c.take("max_window_layers", *unused)
    default = [bool(used and window and i >= full) for i in range(num_layers)]
    slides = _hf.sliding(c, num_layers, default)
    if not any(slides) or not used:
        return None, None
    full = slides.index(True)
    c.require(all(slides[full:]), "layer_types", slides, "expected full layers before sliding ones")
    return window, full


def to_hf(dims: Dims) -> dict[str, Any]:
    """The Hugging Face config of the dimensions."""
    full = dims.num_layers if dims.full_layers is None else dims.full_layers
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        **_hf.decoder_fields(dims),
        "rope_parameters": _hf.rope_parameters(dims.rope_theta, dims.rope_scaling),
        "use_sliding_window": dims.window is not None,
        "sliding_window": dims.window,
        "max_window_layers": full,
        "layer_types": _hf.layer_types(windows(dims)),
        "tie_word_embeddings": dims.tied,
    }
