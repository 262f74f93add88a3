"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's layer with biases on q, k and v."""

from dataclasses import dataclass
from typing import Any

from transformer import spec as s
from transformer.families import _hf, _llama, _rows

MODEL_TYPES = ("qwen2",)


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Numbers of the published configs.

    Attributes:
      windows: keys that each layer sees, None where it sees all; published sizes slide nowhere.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    max_length: int
    rope_theta: float
    rope_scaling: s.YarnScaling | s.LinearScaling | None = None
    norm_eps: float
    tied: bool
    window: int | None = None
    full_layers: int | None = None  # the first so many layers see everything, the others `window` keys


def windows(dims: Dims) -> list[int | None]:
    """What each layer sees."""
    full = dims.num_layers if dims.window is None or dims.full_layers is None else dims.full_layers
    return [None if i < full else dims.window for i in range(dims.num_layers)]


def layers(dims: Dims, *, qkv_bias: bool, qk_norm: bool) -> tuple[s.Block, ...]:
    """Qwen's layers, of which versions 2 and 3 differ in the biases and the norms of q and k."""
    norm = _llama.rms_norm(dims.norm_eps)

    def layer(window: int | None) -> s.Block:
        attention = s.Attention(
            num_heads=dims.num_heads,
            num_kv_heads=dims.num_kv_heads,
            head_dim=dims.head_dim,
            mask=s.Mask(causal=True, window=window),
            scale=dims.head_dim**-0.5,
            rope=s.Rope(theta=dims.rope_theta, dim=dims.head_dim, interleaved=False, scaling=dims.rope_scaling),
            qkv_bias=qkv_bias,
            out_bias=False,
            qk_norm=norm if qk_norm else None,
        )
        return s.Block(mixer=attention, ffn=_llama.swiglu(dims.d_ff), norm=norm, placement="pre")

    return tuple(layer(window) for window in windows(dims))


def stack(dims: Dims, blocks: tuple[s.Block, ...]) -> s.Model:
    """The decoder of those layers: the full ones first, as an irregular head, where the rest slide."""
    return _llama.decoder(
        blocks,
        vocab_size=dims.vocab_size,
        d_model=dims.d_model,
        max_length=dims.max_length,
        tied=dims.tied,
        head=sum(block != blocks[-1] for block in blocks),
    )


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
    used, window = c.take("use_sliding_window", False), c.take("sliding_window", None)
    full = c.take("max_window_layers", num_layers)
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
