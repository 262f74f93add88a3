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
from transformer.planning import accounting, words
from transformer.planning.caches import cache_numbers
from transformer.settings import SettingsError

# FLOPs that most models have none of.
OPTIONAL = ("cross", "mtp")
PIPE_WIDTH = 160  # columns where the output is no terminal: the table takes what it needs


@dataclass(frozen=True)
class Span:
    """Equal neighbouring blocks of one part of a stack.

    Attributes:
      stack: "encoder", "decoder" or "mtp".
      part: "head", "body" or "tail".
      first, last: indices within the part, both included.
      repeats: how often the part runs.
    """

    stack: str
    part: str
    first: int
    last: int
    repeats: int
    block: spec.Block

    @property
    def layers(self) -> int:
        """Number of layers of the model that look like this."""
        return (self.last - self.first + 1) * self.repeats


def spans(stack: spec.Stack, name: str) -> tuple[Span, ...]:
    """The stack of that name as runs of equal blocks, in order."""
    found = []
    for part, repeats in (("head", 1), ("body", stack.repeats), ("tail", 1)):
        first = 0
        for block, run in itertools.groupby(getattr(stack, part)):
            last = first + len(list(run)) - 1
            found.append(Span(name, part, first, last, repeats, block))
            first = last + 1
    return tuple(found)


def mtp_spans(model: spec.Model) -> tuple[Span, ...]:
    """The layers of multi-token prediction as runs of equal blocks."""
    found = spans(model.mtp.decoder, "mtp") if model.mtp else ()
    return tuple(dataclasses.replace(span, part="mtp", repeats=model.mtp.depth) for span in found)


def _of_stacks(model: spec.Model) -> tuple[Span, ...]:
    return tuple(span for name, stack in model.stacks.items() for span in spans(stack, name))


def totals(model: spec.Model, seq_len: int) -> dict[str, Any]:
    """Parameters, bytes, cache and FLOPs of a model; FLOPs a token of rows of `seq_len` tokens."""
    count = accounting.parameters(model)
    cache = cache_numbers(model, model.max_length)
    source = sum(cache.source.per_token) if cache.source else 0
    forward, training = (accounting.flops_per_token(model, seq_len, training=t) for t in (False, True))
    return {
        "parameters": count.total,
        "active_parameters": count.active,
        "mtp_parameters": count.mtp,
        "parameter_bytes": {dtype: count.total * size for dtype, size in accounting.BYTES.items()},
        "kv_bytes_per_token_bfloat16": sum(cache.per_token) * accounting.BYTES["bfloat16"],
        "source_kv_bytes_per_token_bfloat16": source * accounting.BYTES["bfloat16"],
        "kv_bytes_at_max_length_bfloat16": cache.bytes("bfloat16"),
        "forward_flops_per_token": dataclasses.asdict(forward) | {"total": forward.total},
        "training_flops_per_token": dataclasses.asdict(training) | {"total": training.total},
    }


def describe(model: spec.Model, seq_len: int) -> dict[str, Any]:
    """The whole explanation as plain data, in the order in which the model runs."""
    count = accounting.parameters(model)

    def described(span: Span) -> dict[str, Any]:
        parameters = accounting.block_parameters(span.block, model.d_model)
        flops = accounting.block_flops(span.block, model.d_model, seq_len)
        return {
            "stack": span.stack,
            "part": span.part,
            "blocks": list(range(span.first, span.last + 1)),
            "repeats": span.repeats,
            "layers": span.layers,
            **_plain(span.block),
            "parameters": dataclasses.asdict(parameters) | {"total": parameters.total, "active": parameters.active},
            "parameters_of_all_layers": parameters.total * span.layers,
            "kv_numbers_per_token": _kv_numbers(span),
            "forward_flops_per_token": dataclasses.asdict(flops) | {"total": flops.total},
        }

    return {
        "vocab_size": model.vocab_size,
        "d_model": model.d_model,
        "max_length": model.max_length,
        "num_layers": {name: stack.num_layers for name, stack in model.stacks.items()},
        "seq_len": seq_len,
        "embedding": _plain(model.embedding) | {"parameters": count.embedding},
        "stack": [described(span) for span in _of_stacks(model)],
        "relative_biases": {"parameters": count.relative},
        "final_norm": {name: _plain(stack.final_norm) for name, stack in model.stacks.items()},
        "head": _plain(model.head) and _plain(model.head) | {"parameters": count.head},
        "pooler": _plain(model.pooler) and _plain(model.pooler) | {"parameters": count.pooler},
        "mtp": [described(span) for span in mtp_spans(model)],
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

    def add(span: Span) -> None:
        block = span.block
        parameters = accounting.block_parameters(block, width).total
        flops = accounting.block_flops(block, width, seq_len)
        row(
            _span_text(span, model),
            words.mixing(block),
            words.feed_forward(block.ffn),
            f"{block.placement}\n{words.norm(block.norm)}",
            f"{parameters:,}" + (f"\n× {span.layers} =\n{parameters * span.layers:,}" if span.layers > 1 else ""),
            f"{_kv_numbers(span):,}",
            _flops_text(flops),
        )

    row("embedding", words.embedding(model), "", "", f"{count.embedding:,}", "", "")
    for span in _of_stacks(model):
        add(span)
    if count.relative:
        row("relative biases", "a table a stack", "", "", f"{count.relative:,}", "", "")
    final = model.trunk.final_norm
    row("final norm", "", "", words.norm(final) if final else "none", f"{count.final_norm:,}", "", "")
    head_flops = accounting.flops_per_token(model, seq_len, training=False).head
    row("head", words.head(model.head), "", "", f"{count.head:,}", "", words.si(head_flops))
    if model.pooler:
        row("pooler", words.pooler(model.pooler), "", "", f"{count.pooler:,}", "", "")
    for span in mtp_spans(model):
        add(span)
    heading = (
        f"d_model {width:,}   vocab_size {model.vocab_size:,}   max_length {model.max_length:,}   "
        f"{' + '.join(str(stack.num_layers) for stack in model.stacks.values())} layers"
    )
    notes = f"KV/token: numbers a layer.   FLOPs/token: forward, a layer, on average over rows of {seq_len:,} tokens."
    if len(model.stacks) > 1:
        notes += f"\nThe encoder reads as many tokens as the decoder.   A text begins with token {model.decoder_start}."
    return Group(heading, table, notes, "", _totals_table(totals(model, seq_len), model, seq_len))


def _flops_text(flops: accounting.Flops) -> str:
    parts = [("proj", flops.projections), ("scores", flops.scores), ("ffn", flops.ffn)]
    parts[2:2] = [("cross", flops.cross)] if flops.cross else []
    return "\n".join([words.si(flops.total), *(f"{name} {words.si(value)}" for name, value in parts)])


def _totals_table(t: dict[str, Any], model: spec.Model, seq_len: int) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    training = t["training_flops_per_token"]
    told = {name: value for name, value in training.items() if name != "total" and (value or name not in OPTIONAL)}
    parts = ", ".join(f"{name} {value / training['total']:.1%}" for name, value in told.items())
    table.add_row("parameters", f"{t['parameters']:,} in all, {t['active_parameters']:,} active a token")
    if t["mtp_parameters"]:
        table.add_row("", f"and {t['mtp_parameters']:,} of {model.mtp.depth} × multi-token prediction")
    table.add_row("their bytes", ", ".join(f"{words.si(n)}B in {dtype}" for dtype, n in t["parameter_bytes"].items()))
    if model.decoder:
        windowed = any(b.mixer.mask.window for b in model.decoder.layers)
        note = " until windows are full" if windowed else ""
        table.add_row("KV cache, bfloat16", f"{t['kv_bytes_per_token_bfloat16']:,} B a token{note}")
        if source := t["source_kv_bytes_per_token_bfloat16"]:
            table.add_row("", f"{source:,} B a token that the encoder read")
        table.add_row("", f"{words.si(t['kv_bytes_at_max_length_bfloat16'])}B a row of {model.max_length:,} tokens")
    table.add_row("training FLOPs", f"{words.si(training['total'])} a token at T = {seq_len:,} ({parts})")
    return table


def _span_text(span: Span, model: spec.Model) -> str:
    blocks = str(span.first) if span.first == span.last else f"{span.first}–{span.last}"
    number = span.last - span.first + 1
    product = f"{number} × {span.repeats}" if span.repeats > 1 else f"{number}"
    stack = f"{span.stack} " if model.encoder else ""
    return f"{stack}{span.part} {blocks}\n{product} layer{'s' * (span.layers > 1)}"


def _kv_numbers(span: Span) -> int:
    """Of one layer; an encoder's texts are read once and for all."""
    return 0 if span.stack == "encoder" else span.block.mixer.cache_dims.numbers


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
