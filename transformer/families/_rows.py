"""Weight rows that Llama-style checkpoints share, from the spec of a block."""

from transformer import spec as s
from transformer.checkpoints.table import Row, Table

LAYER = "model.layers.{i}."
PRE_NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def linear(
    path: str, name: str, pattern: str, *, bias: bool = False, bias_pattern: str = "o -> o", **sizes: int
) -> list[Row]:
    """Rows of a projection: kernel, and bias where there is one."""
    rows = [Row(paths=(f"{path}/kernel",), name=f"{name}.weight", pattern=pattern, sizes=sizes)]
    if bias:
        lengths = {axis: length for axis, length in sizes.items() if axis in bias_pattern}
        rows.append(Row(paths=(f"{path}/bias",), name=f"{name}.bias", pattern=bias_pattern, sizes=lengths))
    return rows


def same(path: str, name: str) -> Row:
    """A vector that both keep alike."""
    return Row(paths=(path,), name=name, pattern="d -> d")


def attention(
    a: s.Attention,
    prefix: str = LAYER + "self_attn.",
    path: str = "attention",
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
) -> list[Row]:
    """The projections of query, key, value and out under their `names`; q_norm and k_norm; sinks."""
    rows, (*inward, out) = [], names
    parts = ("query", a.num_heads), ("key", a.num_kv_heads), ("value", a.num_kv_heads)
    for (part, heads), name in zip(parts, inward, strict=True):
        sizes = dict(bias=a.qkv_bias, bias_pattern="(n h) -> n h", n=heads)
        rows += linear(f"{path}/{part}", prefix + name, "(n h) d -> d n h", **sizes)
    rows += linear(f"{path}/out", prefix + out, "d (n h) -> n h d", bias=a.out_bias, n=a.num_heads)
    if a.qk_norm:
        rows += [same(f"{path}/query_norm/scale", prefix + "q_norm.weight")]
        rows += [same(f"{path}/key_norm/scale", prefix + "k_norm.weight")]
    if a.sinks:
        rows += [same(f"{path}/sinks", prefix + "sinks")]
    return rows


def layer_norm(path: str, name: str) -> list[Row]:
    """Scale and bias of a LayerNorm."""
    return [same(f"{path}/scale", f"{name}.weight"), same(f"{path}/bias", f"{name}.bias")]


def feed_forward(f: s.FeedForward, path: str = "ffn", prefix: str = LAYER + "mlp.") -> list[Row]:
    """gate_proj, up_proj, down_proj."""
    names = ("gate", "up", "down") if f.gated else ("up", "down")
    return [row for n in names for row in linear(f"{path}/{n}", f"{prefix}{n}_proj", "o i -> i o", bias=f.bias)]


def experts(m: s.MoE, prefix: str, gate: str, up: str, down: str) -> list[Row]:
    """One tensor an expert and projection, stacked in ours."""
    return [
        Row(
            paths=(f"ffn/experts/{ours}_kernel",),
            name=f"{prefix}{{e}}.{theirs}.weight",
            pattern="o i -> i o",
            experts=m.num_experts,
        )
        for ours, theirs in (("gate", gate), ("up", up), ("down", down))
    ]


def norms(names: dict[str, str]) -> list[Row]:
    """The norms of a block, ours to theirs."""
    return [same(f"{ours}/scale", f"{LAYER}{theirs}.weight") for ours, theirs in names.items()]


def around(model: s.Model) -> tuple[Row, ...]:
    """Token table, final norm and, if it is not tied, the head."""
    rows = [
        Row(paths=("embedding/token",), name="model.embed_tokens.weight", pattern="v d -> v d"),
        same("decoder/final_norm/scale", "model.norm.weight"),
    ]
    if not model.head.tied:
        rows.append(Row(paths=("head/kernel",), name="lm_head.weight", pattern="v d -> v d"))
    return tuple(rows)


# Old checkpoints keep the frequencies of their rotary embedding.
BUFFERS = (r".*\.rotary_emb\.inv_freq",)


def dense_decoder(model: s.Model, names: dict[str, str] = PRE_NORMS) -> Table:
    """The table of a Llama-style model without experts; `names` of a block's norms, ours to theirs."""
    layers = (attention(b.mixer) + feed_forward(b.ffn) + norms(names) for b in model.decoder.layers)
    return Table(around=around(model), layers=tuple(map(tuple, layers)), ignored=BUFFERS)
