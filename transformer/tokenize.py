"""Trains a tokenizer on the data of a run, and shows what a tokenizer makes of a text, or of the run's rows.

    python -m transformer.tokenize train --output tok --vocab-size 4096 --config.data.source=text \
      --config.data.paths="('corpus/*.jsonl',)"
    python -m transformer.tokenize inspect --config.data.tokenizer=tok/tokenizer.json "Return the length."
    python -m transformer.tokenize inspect --config configs/llama3.py:mini --rows 8

--config and --config.group.field=value mean the data that they mean in train.py. What is held out for validation is not
trained on; bytes a token are of that. What can't be done is one line on stderr and exit status 2.
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tokenizers
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tokenizers import decoders, models, pre_tokenizers, trainers

from transformer.config import Run, load_config, override, resolve
from transformer.settings import Data, SettingsError, check
from transformer.spec import SpecError
from transformer.tokenizer import Tokenizer, load_tokenizer
from transformer.training import data
from transformer.training.examples import shape_of
from transformer.training.objectives import make_objective

ROLES = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}  # ids 0, 1, 2
LOOKED_AT = 2000  # texts that figures are of, evenly spaced
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; 2 where something can't be done."""
    flags, overrides = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        values = load_config(flags.config).to_dict()
        for name, text in overrides:
            override(values, name, text)
        run = resolve(values)
        if flags.command == "train":
            train(run.settings.data, flags)
        else:
            inspect(run, flags)
    except (SettingsError, SpecError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[tuple[str, str]]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    learn = commands.add_parser("train", help="byte-level BPE; writes tokenizer.json and tokenizer_config.json")
    learn.add_argument("--output", required=True, metavar="DIR", help="where the two files are written")
    learn.add_argument("--vocab-size", type=int, required=True, help="tokens in all: special ones, 256 bytes, merges")
    learn.add_argument("--special", nargs="*", default=[], metavar="TOKEN", help="further special tokens")
    learn.add_argument("--mask", action="store_true", help="adds [MASK], for data.objective=masked")
    learn.add_argument("--sentinels", type=int, default=0, metavar="N", help="adds N, for data.objective=spans")
    learn.add_argument("--min-frequency", type=int, default=2, help="of a pair that is merged (%(default)s)")
    look = commands.add_parser("inspect", help="tokens of a text; or packed rows, bytes a token and padding")
    look.add_argument("text", nargs="?", help="shown token by token; without it the run's rows are")
    look.add_argument("--rows", type=int, default=8, metavar="N", help="packed rows that are drawn (%(default)s)")
    for command in (learn, look):
        command.add_argument("--config", default="configs/llama3.py:mini", help="FILE.py[:size] or FAMILY[:size]")
    plain, overrides, rest = [], [], iter(arguments)
    for argument in rest:
        if argument.startswith("--config."):
            name, equals, text = argument.removeprefix("--config.").partition("=")
            overrides.append((name, text if equals else next(rest, "")))
        else:
            plain.append(argument)
    return parser.parse_args(plain), overrides


def train(settings: Data, flags: argparse.Namespace) -> None:
    """Learns a byte-level BPE of the texts that are trained on, and says how long its tokens are on the others.

    Raises:
      SettingsError: the texts can't be read, the vocabulary is too small, or the directory can't be written.
    """
    check(bool(flags.output), "--output", flags.output, "name a directory, such as tok")
    check(flags.sentinels >= 0, "--sentinels", flags.sentinels, "use 0 (none) or more")
    check(all(flags.special), "--special", flags.special, "a token has at least one character; leave the empty one out")
    sentinels = [f"<extra_id_{n}>" for n in range(flags.sentinels)]
    specials = [*ROLES.values(), *["[MASK]"] * flags.mask, *sentinels, *flags.special]
    check(len(set(specials)) == len(specials), "--special", flags.special, "name each special token once")
    least = len(specials) + 256
    remedy = f"{len(specials)} special tokens and 256 bytes need at least {least}"
    check(flags.vocab_size >= least, "--vocab-size", flags.vocab_size, remedy)
    check(flags.min_frequency >= 1, "--min-frequency", flags.min_frequency, "use 1 or more")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=flags.vocab_size,
        min_frequency=flags.min_frequency,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    parts = data.parts_of(settings)
    tokenizer.train_from_iterator(itertools.chain.from_iterable(texts(part.items) for part in parts), trainer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **ROLES}
    if flags.mask:
        config["mask_token"] = "[MASK]"
    path = Path(flags.output)
    _write(
        path, {"tokenizer.json": tokenizer.to_str(pretty=True), "tokenizer_config.json": json.dumps(config, indent=2)}
    )
    made = load_tokenizer(path)
    console = Console(highlight=False, soft_wrap=True)
    if made.vocab_size < flags.vocab_size:
        console.print(f"the texts hold no more pairs: {made.vocab_size:,} tokens, not {flags.vocab_size:,}")
    unseen = list(texts(data.held_out(settings), LOOKED_AT))
    file = path / "tokenizer.json"
    console.print(
        f"{file}: {made.vocab_size:,} tokens, {bytes_per_token(made, unseen):.2f} bytes a token of unseen text"
    )
    console.print(f"use it with --config.data.tokenizer={file} --config.model.vocab_size={made.vocab_size}")


def inspect(run: Run, flags: argparse.Namespace) -> None:
    """Prints the tokens of a text, or packed rows of the run and what they are made of.

    Raises:
      SettingsError: the tokenizer or the texts can't be read, or don't fit the model.
    """
    console = Console(highlight=False)
    settings = run.settings.data
    tokenizer = load_tokenizer(settings.tokenizer)
    if flags.text is not None:
        text = flags.text.encode(errors="replace").decode()
        check(text == flags.text, "text", text, "is not UTF-8, as the terminal gave it; give one that is")
        console.print(table_of(tokenizer, flags.text))
        ids = tokenizer.encode(flags.text)
        console.print(f"{len(ids):,} tokens, {bytes_per_token(tokenizer, [flags.text]):.2f} bytes a token")
        return
    check(flags.rows >= 1, "--rows", flags.rows, "draw at least 1")
    data.check_vocabulary(tokenizer, run.spec.vocab_size)
    shape = shape_of(run.spec)
    batches = data.train_iterator(settings, tokenizer, shape)
    rows = list(itertools.islice(_rows(batches), flags.rows))
    batches.close()
    for side in ("source_segment_ids", "segment_ids") if "source_segment_ids" in rows[0] else ("segment_ids",):
        whose = "the encoder's rows" if side.startswith("source") else "rows that are scored"
        console.print(f"{whose}: a colour and a shade an example, · padding")
        for row in rows:
            console.print(bar(row[side], min(console.width - 2, 96)))
    console.print(_figures(run, tokenizer, rows))


def table_of(tokenizer: Tokenizer, text: str) -> Table:
    """A line a token: its id, the part of the text that it stands for, and its bytes."""
    table = Table("id", "text", "bytes", "count")
    content, start = text.encode(), 0
    for token, size in zip(*tokenizer.encode_with_bytes(text), strict=True):
        part = content[start : start + size]
        table.add_row(str(token), Text(repr(part.decode(errors="backslashreplace"))), part.hex(" "), str(size))
        start += size
    return table


def bar(segments: np.ndarray, width: int) -> Text:
    """A row of examples in so many characters, each of the colour and shade of the example that its place lies in."""
    line = Text()
    for place in range(width):
        number = int(segments[place * len(segments) // width])
        line.append("▓█"[number % 2] if number else "·", style=COLOURS[number % len(COLOURS)] if number else "dim")
    return line


def texts(items: Iterable, most: int | None = None) -> Iterator[str]:
    """The texts of documents or pairs, of at most so many evenly spaced ones."""
    step = 1 if most is None else -(-len(items) // most)
    for i in range(0, len(items), step):
        yield from [items[i]] if isinstance(items[i], str) else items[i]


def bytes_per_token(tokenizer: Tokenizer, some: Iterable[str]) -> float:
    """UTF-8 bytes a token, of these texts together."""
    sizes = [(len(text.encode()), len(tokenizer.encode(text))) for text in some]
    total, tokens = np.sum(sizes, axis=0) if sizes else (0, 0)
    return float(total / max(tokens, 1))


def _rows(batches: Iterable[data.Batch]) -> Iterator[data.Batch]:
    for batch in batches:
        for row in range(len(batch["tokens"])):
            yield {name: value[row] for name, value in batch.items()}


def _figures(run: Run, tokenizer: Tokenizer, rows: list[data.Batch]) -> Table:
    settings = run.settings.data
    objective = make_objective(settings, tokenizer, shape_of(run.spec))
    parts = data.parts_of(settings)
    some = [text for part in parts for text in texts(part.items, LOOKED_AT // len(parts))]
    lengths = np.array([len(tokenizer.encode(text)) for text in some])
    ids = np.stack([row["segment_ids"] for row in rows])
    table = Table(show_header=False)
    for name, value in (
        ("texts to train on", f"{sum(len(part.items) for part in parts):,}"),
        ("held out", f"{len(data.held_out(settings)):,}"),
        ("bytes a token", f"{bytes_per_token(tokenizer, some):.2f}"),
        ("tokens of a text", f"{np.median(lengths):,.0f} (median), {lengths.max():,} (longest)"),
        ("longer than a row", f"{np.mean(lengths > objective.lengths['columns']):.1%} of {len(lengths):,} looked at"),
        ("examples a row", f"{ids.max(axis=1).mean():.1f}"),
        ("padding", f"{np.mean(ids == 0):.1%}"),
        ("scored tokens", f"{np.mean([row['weights'].mean() for row in rows]):.1%} of a row"),
    ):
        table.add_row(name, value)
    return table


def _write(directory: Path, files: dict[str, str]) -> None:
    """Each file is whole or as it was."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            partial = directory / f"{name}.partial"
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, directory / name)
    except OSError as error:
        raise SettingsError(f"--output={str(directory)!r}: can't be written ({error.strerror}); use another") from None


if __name__ == "__main__":
    sys.exit(main())
