"""What distinguishes the families, read off their specs: the aspects of a model, and the parts of its block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformer import spec
from transformer.figures.data import published
from transformer.planning import accounting

# A phrase of the table of words with the values of its gaps.
Fact = tuple[str, dict[str, Any]]
ASPECTS = ("layout", "norm", "positions", "attention", "ffn", "context", "size")

# What the block of a later family may do in another way.
CHANGES = ("norm", "positions", "attention", "ffn")

# Where the norms of a branch sit: before it, on what it returns, on the sum.
NORMS = {"pre": ("in",), "post": ("sum",), "after": ("out",), "sandwich": ("in", "out")}
GATES = {"silu": "SwiGLU", "gelu": "GeGLU", "gelu_tanh": "GeGLU", "relu": "ReGLU"}
PLAIN = {"silu": "SiLU", "gelu": "GELU", "gelu_tanh": "GELU", "relu": "ReLU"}


@dataclass(frozen=True)
class Part:
    """A box of a block diagram.

    Attributes:
      slot: its place, the same in every model: "ffn norm in".
      role: "embedding", "norm", "attention", "ffn", "add" or "head".
      facts: what is said in it.
    """

    slot: str
    role: str
    facts: tuple[Fact, ...]


def aspects(reference: str | spec.Model) -> dict[str, tuple[Fact, ...]]:
    """What there is to say of a model under each of `ASPECTS`."""
    model = published.model(reference)
    count, last = accounting.parameters(model), model.layers[-1]
    size = [("parameters", dict(count=_billions(count.total)))]
    size += [("active", dict(count=_billions(count.active)))] if count.active != count.total else []
    return {
        "layout": _layout(model),
        "norm": ((f"placed {last.placement}", {}), (_norm_name(last.norm), {})),
        "positions": _positions(model),
        "attention": _attention(model),
        "ffn": _ffn(model),
        "context": (("tokens of context", dict(count=model.max_length)),),
        "size": tuple(size),
    }


def differences(one: str | spec.Model, other: str | spec.Model) -> tuple[str, ...]:
    """The aspects in which two models differ."""
    a, b = aspects(one), aspects(other)
    return tuple(name for name in ASPECTS if a[name] != b[name])


def changes(one: str | spec.Model, other: str | spec.Model) -> tuple[str, ...]:
    """Those of `CHANGES` that are of another kind in the other model, not only of another size."""
    kinds = [{name: _kind(name, aspects(each)[name]) for name in CHANGES} for each in (one, other)]
    return tuple(name for name in CHANGES if kinds[0][name] != kinds[1][name])


def _kind(aspect: str, facts: tuple[Fact, ...]) -> list[tuple]:
    """What is said but for its sizes; encoders are a matter of layout."""
    dropped = ("cross", "dense layers")
    return [(key, values.get("gate")) for key, values in facts if key not in dropped]


def parts(reference: str | spec.Model) -> tuple[Part, ...]:
    """The boxes of a model in the order in which its last layer's block runs, from embedding to head."""
    model = published.model(reference)
    told, block = aspects(model), model.layers[-1]
    placed = tuple(fact for fact in told["positions"] if fact[0] in ("learned positions", "sinusoids"))
    embedding = (("table", dict(rows=model.vocab_size, width=model.d_model)), *placed)
    found = [Part("embedding", "embedding", embedding)]
    rotary = tuple(fact for fact in told["positions"] if fact not in placed and fact[0] != "no positions")
    own = tuple(fact for fact in told["attention"] if fact[0] != "cross")
    branches = [("attention", "attention", own + rotary)]
    branches += [("cross", "attention", _cross(model))] if block.cross else []
    branches += [("ffn", "ffn", (("FFN", {}), *told["ffn"]))]
    for slot, role, facts in branches:
        norms = {
            place: Part(f"{slot} norm {place}", "norm", _norm(block.norm, place)) for place in NORMS[block.placement]
        }
        found += [norms["in"]] if "in" in norms else []
        found += [Part(slot, role, facts)]
        found += [norms["out"]] if "out" in norms else []
        found += [Part(f"{slot} add", "add", ())]
        found += [norms["sum"]] if "sum" in norms else []
    if model.trunk.final_norm:
        found.append(Part("final norm", "norm", _norm(model.trunk.final_norm, "last")))
    if model.head:
        found.append(Part("head", "head", (("tied head" if model.head.tied else "own head", {}),)))
    return tuple(found)


def _cross(model: spec.Model) -> tuple[Fact, ...]:
    return (("cross", {}), ("of the encoder", dict(layers=model.encoder.num_layers)))


def _billions(count: int) -> str:
    """Parameters as model names have them: 8.03B, 63.1M."""
    return f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"


def _layout(model: spec.Model) -> tuple[Fact, ...]:
    width = ("width", dict(width=model.d_model))
    if model.encoder and model.decoder:
        layers = dict(encoder=model.encoder.num_layers, decoder=model.decoder.num_layers)
        return (("encoder-decoder", layers), width)
    return (("decoder-only" if model.decoder else "encoder-only", dict(layers=model.trunk.num_layers)), width)


def _norm(norm: spec.Norm, place: str) -> tuple[Fact, ...]:
    return ((f"norm {place}", dict(name=_norm_name(norm))),)


def _norm_name(norm: spec.Norm) -> str:
    return "RMSNorm" if norm.kind == "rms" else "LayerNorm"


def _positions(model: spec.Model) -> tuple[Fact, ...]:
    facts = []
    match model.embedding.positions:
        case spec.LearnedPositions():
            facts.append(("learned positions", {}))
        case spec.SinusoidalPositions():
            facts.append(("sinusoids", {}))
    for rope in model.ropes:
        facts.append(("rope", dict(theta=rope.theta)))
        if rope.scaling is not None:
            kind = type(rope.scaling).__name__.removesuffix("Scaling").lower()
            facts.append((f"rope {kind}", dict(factor=rope.scaling.factor)))
    mixer = model.layers[0].mixer
    if isinstance(mixer, spec.LatentAttention):
        facts.append(("rope part", dict(dim=mixer.rope_dim)))
    relative = getattr(mixer, "relative", None)
    facts += [("relative", {})] if relative is not None else []
    return tuple(facts) or (("no positions", {}),)


def _attention(model: spec.Model) -> tuple[Fact, ...]:
    layers = model.trunk.layers
    a = layers[-1].mixer
    if isinstance(a, spec.LatentAttention):
        facts = [("MLA", dict(heads=a.num_heads)), ("latent", dict(latent=a.kv_rank, rope=a.rope_dim))]
    else:
        kind = "MHA" if a.num_kv_heads == a.num_heads else "MQA" if a.num_kv_heads == 1 else "GQA"
        facts = [(kind, dict(heads=a.num_heads, kv=a.num_kv_heads, dim=a.head_dim))]
        facts += [("QK-norm", {})] if a.qk_norm else []
        facts += [("softcap", dict(cap=a.softcap))] if a.softcap else []
        facts += [("learned sinks", {})] if a.sinks else []
    facts += windows([block.mixer.mask.window for block in layers])
    facts += [("cross", {})] if layers[-1].cross else []
    return tuple(facts)


def windows(windows: Sequence[int | None]) -> list[Fact]:
    """All layers alike, or how many with a window come to one without."""
    widths = {window for window in windows if window is not None}
    if not widths:
        return []
    window = max(widths)
    if None not in windows:
        return [("window", dict(window=window))]
    local = windows.index(None) - next(i for i, w in enumerate(windows) if w is not None)
    return [("windows", dict(window=window, local=max(local, 1)))]


def _ffn(model: spec.Model) -> tuple[Fact, ...]:
    layers = model.trunk.layers
    f = layers[-1].ffn
    if isinstance(f, spec.FeedForward):
        return (("dense", dict(gate=_activation(f), width=f.d_ff)),)
    facts = [
        ("experts", dict(count=f.num_experts, top=f.top_k)),
        ("expert", dict(gate=_activation(f.expert), width=f.expert.d_ff)),
    ]
    facts += [("shared expert", dict(width=f.shared.d_ff))] if f.shared else []
    dense = sum(isinstance(block.ffn, spec.FeedForward) for block in layers)
    facts += [("dense layers", dict(count=dense))] if dense else []
    return tuple(facts)


def _activation(f: spec.FeedForward) -> str:
    return (GATES if f.gated else PLAIN)[f.activation]
