"""Prints what a model is, block by block, and what it costs: `python -m transformer.explain --config llama3:8b`."""

import argparse
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table

from transformer import config, spec
from transformer.planning import accounting
from transformer.settings import SettingsError

PIPE_WIDTH = 160  # columns where the output is no terminal: the table takes what it needs


@dataclass(frozen=True)
class Span:
    """Equal neighbouring blocks of one part of a stack.

    Attributes:
      part: "head", "body" or "tail".
      first, last: indices within the part, both included.
      repeats: how often the part runs.
    """

    part: str
    first: int
    last: int
    repeats: int
    block: spec.Block

    @property
    def layers(self) -> int:
        """Number of layers of the model that look like this."""
        return (self.last - self.first + 1) * self.repeats


def spans(stack: spec.Stack) -> tuple[Span, ...]:
    """The stack as runs of equal blocks, in order."""
    found = []
    for part, repeats in (("head", 1), ("body", stack.repeats), ("tail", 1)):
        first = 0
        for block, run in itertools.groupby(getattr(stack, part)):
            last = first + len(list(run)) - 1
            found.append(Span(part, first, last, repeats, block))
            first = last + 1
    return tuple(found)


def totals(model: spec.Model, seq_len: int) -> dict[str, Any]:
    """Parameters, bytes, cache and FLOPs of a model; FLOPs a token of rows of `seq_len` tokens."""
    count = accounting.parameters(model)
    cache = accounting.cache_numbers(model, model.max_length)
    forward, training = (accounting.flops_per_token(model, seq_len, training=t) for t in (False, True))
    return {
        "parameters": count.total,
        "active_parameters": count.active,
        "parameter_bytes": {dtype: count.total * size for dtype, size in accounting.BYTES.items()},
        "kv_bytes_per_token_bfloat16": sum(cache.per_token) * accounting.BYTES["bfloat16"],
        "kv_bytes_at_max_length_bfloat16": cache.bytes("bfloat16"),
        "forward_flops_per_token": dataclasses.asdict(forward) | {"total": forward.total},
        "training_flops_per_token": dataclasses.asdict(training) | {"total": training.total},
    }


def describe(model: spec.Model, seq_len: int) -> dict[str, Any]:
    """The whole explanation as plain data, in the order in which the model runs."""
    count = accounting.parameters(model)
    stack = []
    for span in spans(model.decoder):
        parameters = accounting.block_parameters(span.block, model.d_model)
        flops = accounting.block_flops(span.block, model.d_model, seq_len)
        stack.append(
            {
                "part": span.part,
                "blocks": list(range(span.first, span.last + 1)),
                "repeats": span.repeats,
                "layers": span.layers,
                **_plain(span.block),
                "parameters": dataclasses.asdict(parameters) | {"total": parameters.total, "active": parameters.active},
                "parameters_of_all_layers": parameters.total * span.layers,
                "kv_numbers_per_token": _kv_numbers(span.block),
                "forward_flops_per_token": dataclasses.asdict(flops) | {"total": flops.total},
            }
        )
    return {
        "vocab_size": model.vocab_size,
        "d_model": model.d_model,
        "max_length": model.max_length,
        "num_layers": model.decoder.num_layers,
        "seq_len": seq_len,
        "embedding": _plain(model.embedding) | {"parameters": count.embedding},
        "stack": stack,
        "final_norm": _plain(model.decoder.final_norm),
        "head": _plain(model.head) | {"parameters": count.head},
        "totals": totals(model, seq_len),
    }


def render(model: spec.Model, seq_len: int) -> Group:
    """The explanation as tables."""
    count, width = accounting.parameters(model), model.d_model
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("block", "attention", "feed-forward", "norm"):
        table.add_column(name, overflow="fold")
    for name in ("parameters", "KV/token", "FLOPs/token"):
        table.add_column(name, justify="right", overflow="fold")
    row = functools.partial(table.add_row, end_section=True)
    row("embedding", _embedding_text(model), "", "", f"{count.embedding:,}", "", "")
    for span in spans(model.decoder):
        block = span.block
        parameters = accounting.block_parameters(block, width).total
        flops = accounting.block_flops(block, width, seq_len)
        row(
            _span_text(span),
            _attention_text(block.mixer),
            _ffn_text(block.ffn),
            f"{block.placement}\n{_norm_text(block.norm)}",
            f"{parameters:,}" + (f"\n× {span.layers} =\n{parameters * span.layers:,}" if span.layers > 1 else ""),
            f"{_kv_numbers(block):,}",
            f"{_si(flops.total)}\nproj {_si(flops.projections)}\nscores {_si(flops.scores)}\nffn {_si(flops.ffn)}",
        )
    final = model.decoder.final_norm
    row("final norm", "", "", _norm_text(final) if final else "none", f"{count.final_norm:,}", "", "")
    head_flops = accounting.flops_per_token(model, seq_len, training=False).head
    row("head", _head_text(model.head), "", "", f"{count.head:,}", "", _si(head_flops))
    heading = (
        f"d_model {width:,}   vocab_size {model.vocab_size:,}   max_length {model.max_length:,}   "
        f"{model.decoder.num_layers} layers"
    )
    notes = f"KV/token: numbers a layer.   FLOPs/token: forward, a layer, on average over rows of {seq_len:,} tokens."
    return Group(heading, table, notes, "", _totals_table(totals(model, seq_len), model, seq_len))


def _totals_table(t: dict[str, Any], model: spec.Model, seq_len: int) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    training = t["training_flops_per_token"]
    parts = ", ".join(f"{name} {value / training['total']:.1%}" for name, value in training.items() if name != "total")
    table.add_row("parameters", f"{t['parameters']:,} in all, {t['active_parameters']:,} active a token")
    table.add_row("their bytes", ", ".join(f"{_si(n)}B in {dtype}" for dtype, n in t["parameter_bytes"].items()))
    windowed = any(b.mixer.mask.window for b in model.decoder.layers)
    note = " until windows are full" if windowed else ""
    table.add_row("KV cache, bfloat16", f"{t['kv_bytes_per_token_bfloat16']:,} B a token{note}")
    table.add_row("", f"{_si(t['kv_bytes_at_max_length_bfloat16'])}B a row of {model.max_length:,} tokens")
    table.add_row("training FLOPs", f"{_si(training['total'])} a token at T = {seq_len:,} ({parts})")
    return table


def _span_text(span: Span) -> str:
    blocks = str(span.first) if span.first == span.last else f"{span.first}–{span.last}"
    number = span.last - span.first + 1
    product = f"{number} × {span.repeats}" if span.repeats > 1 else f"{number}"
    return f"{span.part} {blocks}\n{product} layer{'s' * (span.layers > 1)}"


def _attention_text(a: spec.Attention | spec.LatentAttention) -> str:
    if isinstance(a, spec.LatentAttention):
        return _latent_text(a)
    groups = f"{a.num_heads} heads" if a.num_heads == a.num_kv_heads else f"{a.num_heads} heads / {a.num_kv_heads} kv"
    sight = "causal" if a.mask.causal else "both ways"
    lines = [f"{groups} × {a.head_dim}", f"{sight}, window {a.mask.window:,}" if a.mask.window else sight]
    lines += _rope_lines(a.rope, a.head_dim) if a.rope else ["no rope"]
    lines += [f"q, k: {_norm_name(a.qk_norm)}{' over all heads' * a.qk_norm_joint}"] if a.qk_norm else []
    lines += [f"softcap {a.softcap:g}"] if a.softcap else []
    lines += ["sinks"] if a.sinks else []
    # The usual scale needs no words.
    lines += [f"scale {a.scale:.4g}"] if abs(a.scale * a.head_dim**0.5 - 1) > 1e-6 else []
    biases = [name for name, has in (("qkv", a.qkv_bias), ("out", a.out_bias)) if has]
    lines += [f"bias on {', '.join(biases)}"] if biases else []
    return "\n".join(lines)


def _latent_text(a: spec.LatentAttention) -> str:
    key = f"{a.nope_dim}+{a.rope_dim}"
    lines = [f"{a.num_heads} heads × {key}, v {a.v_dim}", f"latent {a.kv_rank}+{a.rope_dim} a token"]
    lines += [f"query latent {a.q_rank}"] if a.q_rank else []
    lines += ["causal" if a.mask.causal else "both ways", *_rope_lines(a.rope, a.rope_dim)]
    lines += [f"latents: {_norm_name(a.latent_norm)}", f"scale {a.scale:.4g}"]
    return "\n".join([*lines, *["bias"] * a.bias])


def _rope_lines(rope: spec.Rope, head_dim: int) -> list[str]:
    lines = [f"rope θ {rope.theta:,.0f}"]
    lines += [f"  {rope.dim} of {head_dim} features"] if rope.dim < head_dim else []
    lines += ["  interleaved"] if rope.interleaved else []
    if rope.scaling is not None:
        lines += [f"  {type(rope.scaling).__name__.removesuffix('Scaling').lower()} × {rope.scaling.factor:g}"]
    return lines


def _ffn_text(f: spec.FeedForward | spec.MoE) -> str:
    if isinstance(f, spec.FeedForward):
        clamp = [f"clamped at {f.clamp.limit:g}"] if f.clamp else []
        return "\n".join([f"{f.d_ff:,}", f.activation, *["gated"] * f.gated, *["bias"] * f.bias, *clamp])
    r = f.router
    lines = [f"{f.top_k} of {f.num_experts} experts ×", _ffn_text(f.expert), f"router: {r.score}"]
    lines += [f"  best {r.top_groups} of {r.groups} groups"] if r.groups > 1 else []
    lines += ["  correction bias"] if r.correction else []
    lines += ["  normalized"] if r.normalize else []
    lines += [f"  × {r.scale:g}"] if r.scale != 1 else []
    return "\n".join([*lines, *([f"shared {f.shared.d_ff:,}"] if f.shared else [])])


def _norm_name(norm: spec.Norm) -> str:
    scale = f" {norm.offset:g}+scale" if norm.offset else ""
    return f"{'RMS' if norm.kind == 'rms' else 'layer'}{scale}{', bias' if norm.bias else ''}"


def _norm_text(norm: spec.Norm) -> str:
    return f"{_norm_name(norm)}\nε {norm.eps:g}"


def _embedding_text(model: spec.Model) -> str:
    match model.embedding.positions:
        case spec.LearnedPositions(max_length=length):
            positions = f"{length:,} learned positions"
        case spec.SinusoidalPositions(base=base):
            positions = f"sinusoids, base {base:,.0f}"
        case None:
            positions = "no position vectors"
    scale = model.embedding.scale
    return positions if scale is None else f"× {scale:.4g}\n{positions}"


def _head_text(head: spec.Head) -> str:
    lines = ["tied to the embedding" if head.tied else "a table of its own"]
    return "\n".join([*lines, *["bias"] * head.bias, *([f"softcap {head.softcap:g}"] if head.softcap else [])])


def _kv_numbers(block: spec.Block) -> int:
    return block.mixer.cache_dims.numbers


def _si(value: float) -> str:
    """Three digits and a decimal prefix: 27.0 G."""
    value = float(f"{value:.3g}")  # rounded first, so that 999,999 becomes 1.00 M and not 1000 k
    power = min(max(len(f"{value:.0f}") - 1, 0) // 3, 5)
    value /= 1000**power
    digits = 0 if power == 0 or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {' kMGTP'[power].strip()}"


def _plain(value: Any) -> Any:
    """A spec as plain data; a dataclass keeps the name of its class under "type"."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    return value


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m transformer.explain", description=__doc__.split(":")[0] + ".")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--config", help="a config page and a size: configs/llama3.py:8b or llama3:8b")
    model.add_argument("--hf", metavar="DIR", help="a Hugging Face directory; only its config.json is read")
    model.add_argument("--workdir", help="what train.py or convert wrote")
    parser.add_argument("--seq-len", type=int, help="tokens a row for the FLOPs (default: the model's max_length)")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    return parser.parse_args(argv)


def _load(arguments: argparse.Namespace) -> spec.Model:
    if arguments.config:
        return config.resolve(config.load_config(arguments.config)).spec
    from transformer.checkpoints import source  # here, so that a config page does not wait for JAX

    return source.HuggingFace(arguments.hf).spec if arguments.hf else source.TrainedRun(arguments.workdir).spec


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0, or 2 after one line on stderr."""
    arguments = _arguments(argv)
    try:
        model = _load(arguments)
        seq_len, limit = model.max_length if arguments.seq_len is None else arguments.seq_len, model.length_limit
        if not 1 <= seq_len <= (limit or seq_len):
            most = f"at most {limit}, where the learned positions end" if seq_len >= 1 else "at least 1"
            raise SettingsError(f"--seq-len={seq_len}: use {most}")
    except ValueError as error:  # SettingsError, SpecError, CheckpointError, WorkdirError
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        given = arguments.config or arguments.hf or arguments.workdir
        print(json.dumps({"config": given, **describe(model, seq_len)}, indent=2))
    else:
        console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
        console.print(render(model, seq_len), highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
