"""T5 (Raffel et al. 2019, arXiv:1910.10683) and its version 1.1: encoder and decoder with relative biases, no biases.

Version 1.1 has a gated feed-forward and a head of its own. The first T5's head is the token table, and scales the
features by d_model ** -0.5 first. Queries are not scaled: the initial weights were.
"""

from dataclasses import dataclass
from typing import Any

from transformer import spec as s
from transformer.checkpoints.table import Row, Table
from transformer.families import _hf, _llama, _rows

MODEL_TYPES = ("t5",)
# Tokens a row in training (section 3.1.2); relative biases go on beyond it.
TRAINED = 512


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Numbers of the published configs.

    Attributes:
      num_layers, num_decoder_layers: of the encoder and of the decoder.
      num_buckets, max_distance: of the relative biases.
      gated: a GELU-gated feed-forward, else ReLU.
      tied: the head is the token table, and scales features by d_model ** -0.5.
      decoder_start: the token with which a decoded text begins.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_decoder_layers: int
    num_heads: int
    head_dim: int
    d_ff: int
    max_length: int
    num_buckets: int
    max_distance: int
    norm_eps: float
    gated: bool
    tied: bool
    decoder_start: int


def spec(dims: Dims) -> s.Model:
    """The encoder and the decoder of T5."""
    norm = _llama.rms_norm(dims.norm_eps)

    def attention(causal: bool, relative: bool) -> s.Attention:
        bias = s.RelativeBias(num_buckets=dims.num_buckets, max_distance=dims.max_distance, bidirectional=not causal)
        return s.Attention(
            num_heads=dims.num_heads,
            num_kv_heads=dims.num_heads,
            head_dim=dims.head_dim,
            mask=s.Mask(causal=causal),
            scale=1.0,
            rope=None,
            qkv_bias=False,
            out_bias=False,
            relative=bias if relative else None,
        )

    activation = "gelu_tanh" if dims.gated else "relu"
    ffn = s.FeedForward(d_ff=dims.d_ff, activation=activation, gated=dims.gated, bias=False)
    reads = s.Block(mixer=attention(False, True), ffn=ffn, norm=norm, placement="pre")
    writes = s.Block(mixer=attention(True, True), cross=attention(False, False), ffn=ffn, norm=norm, placement="pre")
    return s.Model(
        vocab_size=dims.vocab_size,
        d_model=dims.d_model,
        max_length=dims.max_length,
        embedding=s.Embedding(scale=None, positions=None),
        encoder=s.Stack.of((reads,) * dims.num_layers, 1, norm),
        decoder=s.Stack.of((writes,) * dims.num_decoder_layers, 1, norm),
        head=s.Head(tied=dims.tied, bias=False, scale=dims.d_model**-0.5 if dims.tied else None),
        decoder_start=dims.decoder_start,
    )


def table(model: s.Model) -> Table:
    """T5's names; the first layer of a stack keeps the table of relative biases."""
    projections = ("q", "k", "v", "o")

    def layer(stack: str, block: s.Block) -> tuple[Row, ...]:
        at = stack + ".block.{i}.layer."
        last = 2 if block.cross else 1
        rows = _rows.attention(block.mixer, f"{at}0.SelfAttention.", names=projections)
        rows += [_rows.same("attention_norm/scale", f"{at}0.layer_norm.weight")]
        if block.cross:
            rows += _rows.attention(block.cross, f"{at}1.EncDecAttention.", "cross", projections)
            rows += [_rows.same("cross_norm/scale", f"{at}1.layer_norm.weight")]
        inward = (("gate", "wi_0"), ("up", "wi_1")) if block.ffn.gated else (("up", "wi"),)
        for ours, theirs in (*inward, ("down", "wo")):
            rows += _rows.linear(f"ffn/{ours}", f"{at}{last}.DenseReluDense.{theirs}", "o i -> i o")
        rows += [_rows.same("ffn_norm/scale", f"{at}{last}.layer_norm.weight")]
        return tuple(rows)

    around = [Row(paths=("embedding/token",), name="shared.weight", pattern="v d -> v d")]
    for stack in model.stacks:
        biases = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        around += [
            Row(paths=(f"{stack}/relative_bias",), name=biases, pattern="r n -> r n"),
            _rows.same(f"{stack}/final_norm/scale", f"{stack}.final_layer_norm.weight"),
        ]
    shares = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    if model.head.tied:
        shares.append("lm_head.weight")
    else:
        around.append(Row(paths=("head/kernel",), name="lm_head.weight", pattern="v d -> v d"))
    return Table(
        around=tuple(around),
        layers=tuple(layer(name, block) for name, stack in model.stacks.items() for block in stack.layers),
        echoes=dict.fromkeys(shares, "shared.weight"),
        # Early files have a table for cross-attention, which was never used.
        ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    )


def from_hf(c: _hf.HFConfig) -> Dims:
    """The dimensions that a Hugging Face config states.

    Whether the head is tied is what `tie_word_embeddings` said until `transformers` 5, which writes it as true of all
    and keeps the difference in `scale_decoder_outputs`. Where a config has both, the head is tied if both say so.
    The weights are held to it: an untied head has to be there, and beside a tied one only an equal one may be.
    """
    c.expect("architectures", ["T5ForConditionalGeneration"], ["T5WithLMHeadModel"])
    c.expect("is_encoder_decoder", True)
    kind = c.take("feed_forward_proj", "relu")
    c.require(kind in ("relu", "gated-gelu"), "feed_forward_proj", kind, 'expected "relu" or "gated-gelu"')
    gated = kind == "gated-gelu"
    c.expect("dense_act_fn", "gelu_new" if gated else "relu")
    c.expect("is_gated_act", gated)
    tied = c.take("tie_word_embeddings", True)
    scaled = c.take("scale_decoder_outputs", tied)
    c.require(
        tied or not scaled, "scale_decoder_outputs", scaled, "contradicts tie_word_embeddings=False; set it False"
    )
    layers = c.count("num_layers")
    decoder_layers = c.take("num_decoder_layers", None)
    start = c.take("decoder_start_token_id", c.take("pad_token_id", 0))
    return Dims(
        vocab_size=c.count("vocab_size"),
        d_model=c.count("d_model"),
        num_layers=layers,
        num_decoder_layers=layers if decoder_layers is None else c.count("num_decoder_layers"),
        num_heads=c.count("num_heads"),
        head_dim=c.count("d_kv"),
        d_ff=c.count("d_ff"),
        max_length=c.count("n_positions", TRAINED),
        num_buckets=c.count("relative_attention_num_buckets", 32),
        max_distance=c.count("relative_attention_max_distance", 128),
        norm_eps=c.number("layer_norm_epsilon", 1e-6),
        gated=gated,
        tied=tied and scaled,
        decoder_start=start,
    )


def to_hf(dims: Dims) -> dict[str, Any]:
    """The Hugging Face config of the dimensions; of an untied head as every version of `transformers` reads it."""
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": dims.vocab_size,
        "d_model": dims.d_model,
        "num_layers": dims.num_layers,
        "num_decoder_layers": dims.num_decoder_layers,
        "num_heads": dims.num_heads,
        "d_kv": dims.head_dim,
        "d_ff": dims.d_ff,
        "n_positions": dims.max_length,
        "relative_attention_num_buckets": dims.num_buckets,
        "relative_attention_max_distance": dims.max_distance,
        "layer_norm_epsilon": dims.norm_eps,
        "feed_forward_proj": "gated-gelu" if dims.gated else "relu",
        "tie_word_embeddings": dims.tied,
        "scale_decoder_outputs": dims.tied,
        "decoder_start_token_id": dims.decoder_start,
    }
