"""Converts checkpoints between Hugging Face directories, GGUF files and training workdirs.

    python -m transformer.convert from-hf DIR WORKDIR     a workdir to generate from, or to give to train.py --init-from
    python -m transformer.convert to-hf WORKDIR DIR       what `transformers` loads
    python -m transformer.convert from-gguf FILE DIR      Llama's architecture, dequantised; also package:NAME

Nothing is overwritten. What can't be done is one line on stderr and exit status 2.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import get_args

from transformer.settings import DType, Settings


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The options; a wrong one ends the process with status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m transformer.convert", description="Convert checkpoints. Nothing is overwritten."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    from_hf = commands.add_parser("from-hf", help="a Hugging Face directory to a training workdir")
    from_hf.add_argument("source", metavar="DIR", help="config.json, *.safetensors and tokenizer.json")
    from_hf.add_argument("target", metavar="WORKDIR", help="a new directory; parameters are kept as float32")
    from_hf.add_argument("--tokenizer", help='"bytes" or a tokenizer.json (default: that of DIR)')
    to_hf = commands.add_parser("to-hf", help="the newest checkpoint of a workdir to a Hugging Face directory")
    to_hf.add_argument("source", metavar="WORKDIR", help="what train.py or from-hf wrote")
    from_gguf = commands.add_parser("from-gguf", help="a GGUF file to a Hugging Face directory")
    from_gguf.add_argument("source", metavar="FILE", help="a *.gguf file, or package:NAME of an installed package")
    for command in (to_hf, from_gguf):
        command.add_argument("target", metavar="DIR", help="a new directory")
        command.add_argument("--dtype", choices=get_args(DType), default="float32", help="(%(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; the exit status."""
    args = parse_args(argv)
    start = time.perf_counter()
    try:
        _require_new(args.target)
        if args.command == "from-hf":
            to_workdir(args.source, args.target, args.tokenizer)
        else:
            to_directory(args.source, args.target, args.dtype, gguf=args.command == "from-gguf")
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    size = sum(file.stat().st_size for file in Path(args.target).rglob("*") if file.is_file())
    print(f"wrote {args.target}: {size / 1e6:,.1f} MB in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return 0


def to_workdir(directory: str, workdir: str, tokenizer_name: str | None = None) -> None:
    """Writes a workdir whose step 0 holds the float32 parameters of a Hugging Face directory, and no optimiser state.

    Raises:
      CheckpointError, SettingsError, WorkdirError: naming the file, field or tensor.
    """
    # Here and not above, so that --help does not wait for JAX.
    from transformer import api
    from transformer.checkpoints import source as sources
    from transformer.checkpoints.workdir import Workdir
    from transformer.tokenizer import load_tokenizer

    source = sources.HuggingFace(directory)
    name = tokenizer_name or source.tokenizer_name()
    tokenizer = load_tokenizer(name, published=True)
    _, params = api.read(source, show=True)
    values = dataclasses.asdict(Settings())
    values["data"]["tokenizer"] = name
    values = {"model": sources.model_values(source.spec), **values, "init_from": sources.record(source)}
    place = Workdir(workdir)
    try:
        place.open_config(values)
        place.keep_tokenizer(name)
        place.save(0, {"params": params}, {}, tokenizer.identity)
        place.wait()
    finally:
        place.close()


def to_directory(source: str, directory: str, dtype: str, gguf: bool = False) -> None:
    """Writes a Hugging Face directory from a workdir or a GGUF file, with the tokenizer and chat template it has.

    Raises:
      CheckpointError, SettingsError, WorkdirError: naming the file, field or tensor.
    """
    import numpy as np

    from transformer import api
    from transformer.checkpoints import source as sources
    from transformer.checkpoints import weights

    opened = sources.GGUF(source) if gguf else sources.TrainedRun(source)
    model, params = api.read(opened, show=True)
    total = sum(x.size for x in weights.flatten(params).values()) * np.dtype(dtype).itemsize
    with sources.progress_bar(total, f"writing {Path(directory).name}") as advance:
        options = dict(dtype=dtype, tokenizer=opened.tokenizer(), companions=opened.companions)
        api.to_hf(model, params, directory, progress=advance, **options)


def _require_new(target: str) -> None:
    path = Path(target)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{target}: exists and is not empty; give a new directory")


if __name__ == "__main__":
    sys.exit(main())
