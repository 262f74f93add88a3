"""GPT-2 (Radford et al. 2019): pre-norm decoder, learned positions, multi-head attention, GELU."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from transformer import spec as s
from transformer.checkpoints.table import Row, Spelling, Table
from transformer.families import _hf, _rows

MODEL_TYPES = ("gpt2",)


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Field names of the paper's table 2; the feed-forward is four times as wide as the model unless `d_ff` says."""

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    max_length: int
    d_ff: int | None = None


def block(d_model: int, d_ff: int, num_heads: int, head_dim: int, window: int | None = None) -> s.Block:
    """One GPT layer, with biases everywhere."""
    attention = s.Attention(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        mask=s.Mask(causal=True, window=window),
        scale=head_dim**-0.5,
        rope=None,
        qkv_bias=True,
        out_bias=True,
    )
    ffn = s.FeedForward(d_ff=d_ff, activation="gelu_tanh", gated=False, bias=True)
    return s.Block(mixer=attention, ffn=ffn, norm=NORM, placement="pre")


NORM = s.Norm(kind="layer", eps=1e-5, offset=0.0, bias=True, scale_in_float32=True)


def spec(dims: Dims) -> s.Model:
    """The decoder of GPT-2; the head is the token table."""
    if dims.d_model % dims.num_heads:
        raise s.SpecError(f"model.d_model={dims.d_model}: must be a multiple of num_heads={dims.num_heads}")
    layer = block(dims.d_model, dims.d_ff or 4 * dims.d_model, dims.num_heads, dims.d_model // dims.num_heads)
    return s.Model(
        vocab_size=dims.vocab_size,
        d_model=dims.d_model,
        max_length=dims.max_length,
        embedding=s.Embedding(scale=None, positions=s.LearnedPositions(max_length=dims.max_length)),
        decoder=s.Stack.of((layer,) * dims.num_layers, 1, NORM),
        head=s.Head(tied=True, bias=False),
    )


def table(model: s.Model) -> Table:
    """GPT-2's names: q, k and v in one tensor, and kernels [in, out]. The first release has no prefix."""

    def layer(block: s.Block) -> tuple[Row, ...]:
        a, prefix = block.mixer, "transformer.h.{i}."
        heads, names = dict(n=3 * a.num_heads), ("query", "key", "value")
        kernels, biases = (tuple(f"attention/{name}/{kind}" for name in names) for kind in ("kernel", "bias"))
        parts = (a.num_heads,) * 3
        rows = [
            Row(paths=kernels, name="attn.c_attn.weight", pattern="d (n h) -> d n h", sizes=heads, axis=1, parts=parts),
            Row(paths=biases, name="attn.c_attn.bias", pattern="(n h) -> n h", sizes=heads, parts=parts),
            *_rows.linear("attention/out", "attn.c_proj", "(n h) d -> n h d", bias=True, n=a.num_heads),
            *_rows.linear("ffn/up", "mlp.c_fc", "i o -> i o", bias=True),
            *_rows.linear("ffn/down", "mlp.c_proj", "i o -> i o", bias=True),
        ]
        for ours, theirs in (("attention_norm", "ln_1"), ("ffn_norm", "ln_2")):
            rows += _rows.layer_norm(ours, theirs)
        return tuple(dataclasses.replace(row, name=prefix + row.name) for row in rows)

    around = (
        Row(paths=("embedding/token",), name="transformer.wte.weight", pattern="v d -> v d"),
        Row(paths=("embedding/position",), name="transformer.wpe.weight", pattern="t d -> t d"),
        *_rows.layer_norm("decoder/final_norm", "transformer.ln_f"),
    )
    buffers = (r".*\.attn\.(masked_)?bias", r"lm_head\.weight")
    layers = tuple(map(layer, model.decoder.layers))
    return Table(around=around, layers=layers, ignored=buffers, spellings=(Spelling("transformer.", ""),))


def from_hf(c: _hf.HFConfig) -> Dims:
    """The dimensions that a Hugging Face config states."""
    c.expect("activation_function", "gelu_new", "gelu_pytorch_tanh")
    c.expect("layer_norm_epsilon", NORM.eps)
    c.expect("scale_attn_weights", True)
    c.expect("scale_attn_by_inverse_layer_idx", False)
    c.expect("add_cross_attention", False)
    c.expect("tie_word_embeddings", True)
    inner, width = c.take("n_inner", None), c.count("n_embd")
    usual = inner is None or c.count("n_inner") == 4 * width
    return Dims(
        vocab_size=c.take("vocab_size"),
        d_model=width,
        num_layers=c.take("n_layer"),
        num_heads=c.take("n_head"),
        max_length=c.take("n_positions"),
        d_ff=None if usual else inner,
    )


def to_hf(dims: Dims) -> dict[str, Any]:
    """The Hugging Face config of the dimensions."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": dims.vocab_size,
        "n_embd": dims.d_model,
        "n_layer": dims.num_layers,
        "n_head": dims.num_heads,
        "n_positions": dims.max_length,
        "n_inner": dims.d_ff,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": NORM.eps,
        "tie_word_embeddings": True,
    }
