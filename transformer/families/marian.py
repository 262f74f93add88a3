"""Marian (Junczys-Dowmunt et al. 2018, arXiv:1804.00344): the transformer of 2017 as OPUS-MT's translators publish it.

Sines come before cosines instead of in turns, the head has a bias, and the activation is a swish.
"""

from dataclasses import dataclass
from typing import Any

from transformer import spec as s
from transformer.checkpoints.table import Row, Table
from transformer.families import _hf, _rows, vaswani

MODEL_TYPES = ("marian",)
# Theirs to ours; the first of equal ones is written.
ACTIVATIONS = {"swish": "silu", "silu": "silu", "relu": "relu", "gelu": "gelu"}


@dataclass(frozen=True, kw_only=True)
class Dims(vaswani.Dims):
    """Numbers of the published configs."""

    activation: str


def spec(dims: Dims) -> s.Model:
    """Marian's encoder and decoder."""
    return vaswani.encoder_decoder(dims, activation=dims.activation, interleaved=False, head_bias=True)


def table(model: s.Model) -> Table:
    """Marian's names; one table is the embedding of both stacks and the head."""
    projections = ("q_proj", "k_proj", "v_proj", "out_proj")

    def layer(stack: str, block: s.Block) -> tuple[Row, ...]:
        at = f"model.{stack}.layers.{{i}}."
        rows = _rows.attention(block.mixer, at + "self_attn.", names=projections)
        rows += _rows.layer_norm("attention_norm", at + "self_attn_layer_norm")
        if block.cross:
            rows += _rows.attention(block.cross, at + "encoder_attn.", "cross", projections)
            rows += _rows.layer_norm("cross_norm", at + "encoder_attn_layer_norm")
        rows += _rows.linear("ffn/up", at + "fc1", "o i -> i o", bias=True)
        rows += _rows.linear("ffn/down", at + "fc2", "o i -> i o", bias=True)
        return (*rows, *_rows.layer_norm("ffn_norm", at + "final_layer_norm"))

    table, bias = "model.shared.weight", "final_logits_bias"
    shares = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    return Table(
        around=(
            Row(paths=("embedding/token",), name=table, pattern="v d -> v d"),
            Row(paths=("head/bias",), name=bias, pattern="1 v -> v"),
        ),
        layers=tuple(layer(name, block) for name, stack in model.stacks.items() for block in stack.layers),
        echoes=dict.fromkeys(shares, table),
        # The sinusoids, which are computed.
        ignored=(r"model\.(encoder|decoder)\.embed_positions\.weight",),
    )


def from_hf(c: _hf.HFConfig) -> Dims:
    """The dimensions that a Hugging Face config states."""
    c.expect("is_encoder_decoder", True)
    for name in ("normalize_before", "normalize_embedding", "add_final_layer_norm", "add_bias_logits"):
        c.expect(name, False)
    for name in ("static_position_embeddings", "share_encoder_decoder_embeddings", "tie_word_embeddings"):
        c.expect(name, True)
    scaled = c.take("scale_embedding", False)
    c.require(scaled is True, "scale_embedding", scaled, "expected true")
    vocab_size, layers = c.count("vocab_size"), c.count("encoder_layers")
    heads, d_ff = c.count("encoder_attention_heads"), c.count("encoder_ffn_dim")
    for name, same in (
        ("decoder_attention_heads", heads),
        ("decoder_ffn_dim", d_ff),
        ("decoder_vocab_size", vocab_size),
        ("num_hidden_layers", layers),
    ):
        c.expect(name, same)
    c.take("extra_pos_embeddings", None)  # rows of the table of positions, which is computed
    activation = c.take("activation_function", "gelu")
    c.require(
        isinstance(activation, str) and activation in ACTIVATIONS,
        "activation_function",
        activation,
        f"expected one of {', '.join(ACTIVATIONS)}",
    )
    return Dims(
        vocab_size=vocab_size,
        d_model=c.count("d_model"),
        num_layers=layers,
        num_decoder_layers=c.count("decoder_layers"),
        num_heads=heads,
        d_ff=d_ff,
        max_length=c.count("max_position_embeddings"),
        activation=ACTIVATIONS[activation],
        decoder_start=c.take("decoder_start_token_id"),
    )


def to_hf(dims: Dims) -> dict[str, Any]:
    """The Hugging Face config of the dimensions."""
    return {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "is_encoder_decoder": True,
        "vocab_size": dims.vocab_size,
        "decoder_vocab_size": dims.vocab_size,
        "d_model": dims.d_model,
        "encoder_layers": dims.num_layers,
        "decoder_layers": dims.num_decoder_layers,
        "encoder_attention_heads": dims.num_heads,
        "decoder_attention_heads": dims.num_heads,
        "encoder_ffn_dim": dims.d_ff,
        "decoder_ffn_dim": dims.d_ff,
        "max_position_embeddings": dims.max_length,
        "activation_function": next(theirs for theirs, ours in ACTIVATIONS.items() if ours == dims.activation),
        "normalize_before": False,
        "normalize_embedding": False,
        "add_final_layer_norm": False,
        "static_position_embeddings": True,
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
        "decoder_start_token_id": dims.decoder_start,
    }
