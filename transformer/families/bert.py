"""BERT (Devlin et al. 2018, arXiv:1810.04805): post-norm encoder, learned positions, token types, two heads."""

from dataclasses import dataclass
from typing import Any

from transformer import spec as s
from transformer.checkpoints.table import Row, Spelling, Table
from transformer.families import _hf, _rows

MODEL_TYPES = ("bert",)

# What a file of each class holds besides the encoder; one with more parts is read with all of them.
ARCHITECTURES = {
    "BertForPreTraining": dict(masked_lm=True, pooler=True, next_sentence=True),
    "BertForMaskedLM": dict(masked_lm=True, pooler=False, next_sentence=False),
    "BertForNextSentencePrediction": dict(masked_lm=False, pooler=True, next_sentence=True),
    "BertModel": dict(masked_lm=False, pooler=True, next_sentence=False),
}
PARTS = {
    "masked_lm": "cls.predictions.transform.dense.weight",
    "pooler": "pooler.dense.weight",
    "next_sentence": "cls.seq_relationship.weight",
}
# Left over from the first release, which reads none of them.
UNREAD = (
    "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
    "pooler_type",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Numbers of the published configs, and which parts a checkpoint has.

    Attributes:
      masked_lm: the head that guesses masked tokens; without it the features are the model's output.
      pooler: a vector for the whole text.
      next_sentence: a classifier on top of it: does the second sentence follow the first?
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    d_ff: int
    max_length: int
    token_types: int
    norm_eps: float
    masked_lm: bool = False
    pooler: bool = False
    next_sentence: bool = False


def spec(dims: Dims) -> s.Model:
    """The encoder of BERT, with the parts that its checkpoint has."""
    if dims.d_model % dims.num_heads:
        raise s.SpecError(f"model.d_model={dims.d_model}: must be a multiple of num_heads={dims.num_heads}")
    if dims.next_sentence and not dims.pooler:
        raise s.SpecError("model.next_sentence=True: needs pooler=True, on whose vector it judges")
    norm = s.Norm(kind="layer", eps=dims.norm_eps, offset=0.0, bias=True, scale_in_float32=True)
    head_dim = dims.d_model // dims.num_heads
    attention = s.Attention(
        num_heads=dims.num_heads,
        num_kv_heads=dims.num_heads,
        head_dim=head_dim,
        mask=s.Mask(causal=False),
        scale=head_dim**-0.5,
        rope=None,
        qkv_bias=True,
        out_bias=True,
    )
    ffn = s.FeedForward(d_ff=dims.d_ff, activation="gelu", gated=False, bias=True)
    layer = s.Block(mixer=attention, ffn=ffn, norm=norm, placement="post")
    return s.Model(
        vocab_size=dims.vocab_size,
        d_model=dims.d_model,
        max_length=dims.max_length,
        embedding=s.Embedding(
            scale=None,
            positions=s.LearnedPositions(max_length=dims.max_length),
            token_types=dims.token_types,
            norm=norm,
        ),
        encoder=s.Stack.of((layer,) * dims.num_layers, 1, None),
        decoder=None,
        head=s.Head(tied=True, bias=True, transform=s.Transform(activation="gelu", norm=norm))
        if dims.masked_lm
        else None,
        pooler=s.Pooler(classes=2 if dims.next_sentence else None) if dims.pooler else None,
    )


def table(model: s.Model) -> Table:
    """BERT's names. The encoder's begin with "bert." unless there is nothing else; old files have gamma and beta."""
    classes = model.pooler.classes if model.pooler else None
    bare = model.head is None and classes is None
    prefix = "" if bare else "bert."

    def layer(block: s.Block) -> tuple[Row, ...]:
        at = prefix + "encoder.layer.{i}."
        names = ("self.query", "self.key", "self.value", "output.dense")
        return (
            *_rows.attention(block.mixer, at + "attention.", names=names),
            *_rows.layer_norm("attention_norm", at + "attention.output.LayerNorm"),
            *_rows.linear("ffn/up", at + "intermediate.dense", "o i -> i o", bias=True),
            *_rows.linear("ffn/down", at + "output.dense", "o i -> i o", bias=True),
            *_rows.layer_norm("ffn_norm", at + "output.LayerNorm"),
        )

    tables = {"token": "word", "position": "position", "token_type": "token_type"}
    around = [
        Row(paths=(f"embedding/{ours}",), name=f"{prefix}embeddings.{theirs}_embeddings.weight", pattern="v d -> v d")
        for ours, theirs in tables.items()
    ]
    around += _rows.layer_norm("embedding/norm", prefix + "embeddings.LayerNorm")
    echoes = {}
    if model.head is not None:
        at = "cls.predictions."
        around += _rows.linear("head/transform", at + "transform.dense", "o i -> i o", bias=True)
        around += _rows.layer_norm("head/transform_norm", at + "transform.LayerNorm")
        around += [Row(paths=("head/bias",), name=at + "bias", pattern="v -> v")]
        echoes = {at + "decoder.weight": around[0].name, at + "decoder.bias": at + "bias"}
    if model.pooler is not None:
        around += _rows.linear("pooler/dense", prefix + "pooler.dense", "o i -> i o", bias=True)
    if classes is not None:
        around += _rows.linear("pooler/classifier", "cls.seq_relationship", "o i -> i o", bias=True)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    spellings = [Spelling(endings=old)]
    if bare:
        spellings += [Spelling("", "bert."), Spelling("", "bert.", endings=old)]
    return Table(
        around=tuple(around),
        layers=tuple(map(layer, model.encoder.layers)),
        echoes=echoes,
        ignored=(r"(bert\.)?embeddings\.position_ids",),
        spellings=tuple(spellings),
    )


def from_hf(c: _hf.HFConfig) -> Dims:
    """The dimensions that a Hugging Face config states; the parts are those that the weights beside it have.

    Without weights, the parts are those of `architectures`.
    """
    c.expect("hidden_act", "gelu")
    c.expect("position_embedding_type", "absolute")
    c.expect("is_decoder", False)
    c.expect("add_cross_attention", False)
    c.expect("tie_word_embeddings", True)
    for name in UNREAD:
        c.take(name, None)
    parts = {part: c.holds(ending) for part, ending in PARTS.items()}
    if None in parts.values():
        stated = c.take("architectures")
        known = [[name] for name in ARCHITECTURES]
        c.require(stated in known, "architectures", stated, f"expected one of {', '.join(ARCHITECTURES)}")
        parts = ARCHITECTURES[stated[0]]
    return Dims(
        vocab_size=c.count("vocab_size"),
        d_model=c.count("hidden_size"),
        num_layers=c.count("num_hidden_layers"),
        num_heads=c.count("num_attention_heads"),
        d_ff=c.count("intermediate_size"),
        max_length=c.count("max_position_embeddings"),
        token_types=c.count("type_vocab_size", 2),
        norm_eps=c.number("layer_norm_eps", 1e-12),
        **parts,
    )


def to_hf(dims: Dims) -> dict[str, Any]:
    """The Hugging Face config of the dimensions."""
    parts = {part: getattr(dims, part) for part in PARTS}
    # A class for each set of parts, but for two: a pooler unused by the head, and no part at all.
    spare = "BertForMaskedLM" if dims.masked_lm else "BertModel"
    return {
        "architectures": [next((name for name, held in ARCHITECTURES.items() if held == parts), spare)],
        "model_type": "bert",
        "vocab_size": dims.vocab_size,
        "hidden_size": dims.d_model,
        "num_hidden_layers": dims.num_layers,
        "num_attention_heads": dims.num_heads,
        "intermediate_size": dims.d_ff,
        "hidden_act": "gelu",
        "max_position_embeddings": dims.max_length,
        "type_vocab_size": dims.token_types,
        "layer_norm_eps": dims.norm_eps,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
    }
