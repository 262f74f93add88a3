"""What the parts of a model are, in a few words a line."""

from transformer import spec


def attention(a: spec.Attention | spec.LatentAttention) -> str:
    """Heads, sight, rotation and whatever else is not usual."""
    if isinstance(a, spec.LatentAttention):
        return _latent(a)
    groups = f"{a.num_heads} heads" if a.num_heads == a.num_kv_heads else f"{a.num_heads} heads / {a.num_kv_heads} kv"
    sight = "causal" if a.mask.causal else "both ways"
    lines = [f"{groups} × {a.head_dim}", f"{sight}, window {a.mask.window:,}" if a.mask.window else sight]
    lines += _rope(a.rope, a.head_dim) if a.rope else _relative(a)
    lines += [f"q, k: {_norm_name(a.qk_norm)}{' over all heads' * a.qk_norm_joint}"] if a.qk_norm else []
    lines += [f"softcap {a.softcap:g}"] if a.softcap else []
    lines += ["sinks"] if a.sinks else []
    # The usual scale needs no words.
    lines += [f"scale {a.scale:.4g}"] if abs(a.scale * a.head_dim**0.5 - 1) > 1e-6 else []
    biases = [name for name, has in (("qkv", a.qkv_bias), ("out", a.out_bias)) if has]
    lines += [f"bias on {', '.join(biases)}"] if biases else []
    return "\n".join(lines)


def _relative(a: spec.Attention) -> list[str]:
    match a.relative:
        case spec.RelativeBias(num_buckets=buckets, max_distance=far):
            return [f"relative bias, {buckets} buckets to {far}"]
        case spec.RelativeKeys(base=base):
            return [f"relative keys, base {base:,.0f}"]
    return ["no rope"]


def mixing(block: spec.Block) -> str:
    """Attention, and cross-attention where there is any."""
    own = attention(block.mixer)
    if block.cross is None:
        return own
    sight, usual = "both ways\nno rope", "all of the other text"  # said once for all: it is always so
    return f"{own}\ncross: {attention(block.cross).replace(sight, usual)}"


def _latent(a: spec.LatentAttention) -> str:
    key = f"{a.nope_dim}+{a.rope_dim}"
    lines = [f"{a.num_heads} heads × {key}, v {a.v_dim}", f"latent {a.kv_rank}+{a.rope_dim} a token"]
    lines += [f"query latent {a.q_rank}"] if a.q_rank else []
    lines += ["causal" if a.mask.causal else "both ways", *_rope(a.rope, a.rope_dim)]
    lines += [f"latents: {_norm_name(a.latent_norm)}", f"scale {a.scale:.4g}"]
    return "\n".join([*lines, *["bias"] * a.bias])


def _rope(rope: spec.Rope, head_dim: int) -> list[str]:
    lines = [f"rope θ {rope.theta:,.0f}"]
    lines += [f"  {rope.dim} of {head_dim} features"] if rope.dim < head_dim else []
    lines += ["  interleaved"] if rope.interleaved else []
    if rope.scaling is not None:
        lines += [f"  {type(rope.scaling).__name__.removesuffix('Scaling').lower()} × {rope.scaling.factor:g}"]
    return lines


def feed_forward(f: spec.FeedForward | spec.MoE) -> str:
    """Widths and activation; experts and how they are picked."""
    if isinstance(f, spec.FeedForward):
        clamp = [f"clamped at {f.clamp.limit:g}"] if f.clamp else []
        return "\n".join([f"{f.d_ff:,}", f.activation, *["gated"] * f.gated, *["bias"] * f.bias, *clamp])
    r = f.router
    lines = [f"{f.top_k} of {f.num_experts} experts ×", feed_forward(f.expert), f"router: {r.score}"]
    lines += [f"  best {r.top_groups} of {r.groups} groups"] if r.groups > 1 else []
    lines += ["  correction bias"] if r.correction else []
    lines += ["  normalized"] if r.normalize else []
    lines += [f"  × {r.scale:g}"] if r.scale != 1 else []
    return "\n".join([*lines, *([f"shared {f.shared.d_ff:,}"] if f.shared else [])])


def _norm_name(norm: spec.Norm) -> str:
    scale = f" {norm.offset:g}+scale" if norm.offset else ""
    return f"{'RMS' if norm.kind == 'rms' else 'layer'}{scale}{', bias' if norm.bias else ''}"


def norm(norm: spec.Norm) -> str:
    """Kind and epsilon."""
    return f"{_norm_name(norm)}\nε {norm.eps:g}"


def embedding(model: spec.Model) -> str:
    """Scale, positions, token types and norm."""
    match model.embedding.positions:
        case spec.LearnedPositions(max_length=length):
            positions = f"{length:,} learned positions"
        case spec.SinusoidalPositions(base=base):
            positions = f"sinusoids, base {base:,.0f}"
        case None:
            positions = "no position vectors"
    e = model.embedding
    lines = [*([f"× {e.scale:.4g}"] if e.scale is not None else []), positions]
    lines += [f"{e.token_types} token types"] if e.token_types else []
    return "\n".join([*lines, *([f"norm: {_norm_name(e.norm)}"] if e.norm else [])])


def head(head: spec.Head | None) -> str:
    """Which table, and what is done before and to its scores."""
    if head is None:
        return "none: features are what it gives"
    lines = ["tied to the embedding" if head.tied else "a table of its own"]
    lines += [f"after a {head.transform.activation} layer"] if head.transform else []
    lines += [f"× {head.scale:.4g}"] if head.scale else []
    return "\n".join([*lines, *["bias"] * head.bias, *([f"softcap {head.softcap:g}"] if head.softcap else [])])


def pooler(pooler: spec.Pooler) -> str:
    """What it looks at, and its classifier."""
    classes = [f"{pooler.classes} classes"] if pooler.classes else []
    return "\n".join(["tanh of the first token's features", *classes])


def si(value: float) -> str:
    """Three digits and a decimal prefix: 27.0 G."""
    value = float(f"{value:.3g}")  # rounded first, so that 999,999 becomes 1.00 M and not 1000 k
    power = min(max(len(f"{value:.0f}") - 1, 0) // 3, 5)
    value /= 1000**power
    digits = 0 if power == 0 or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {' kMGTP'[power].strip()}"
