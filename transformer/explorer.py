"""Writes every mechanism as one HTML page of figures: `python -m transformer.explorer OUT.html --language zh`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m transformer.explorer", description=__doc__.split(":")[0] + ".")
    parser.add_argument("out", type=Path, metavar="OUT.html", help="the page to write; it needs no other file")
    parser.add_argument("--language", choices=("en", "zh"), default="en")
    parser.add_argument("--theme", choices=("auto", "light", "dark"), default="auto", help="auto: the reader's own")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0, or 2 after one line on stderr."""
    arguments = _arguments(argv)
    if not arguments.out.parent.is_dir():
        print(f"error: {arguments.out}: no directory {arguments.out.parent}; make it first", file=sys.stderr)
        return 2
    try:
        import jax

        jax.config.update("jax_num_cpu_devices", 8)  # that stand in for a mesh
        from transformer.figures.page import page  # here, so that --help waits for nothing
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    arguments.out.write_text(page(arguments.language, arguments.theme), encoding="utf-8")
    print(f"wrote {arguments.out}: {arguments.out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
