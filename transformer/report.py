"""Writes what a training run has told so far as one HTML page: `python -m transformer.report WORKDIR OUT.html`.

Losses, learning rate, norms, speed, waits and experts step by step; norms layer by layer where `train.norms_every`
records them; the config. The page needs no other file. Of a run in progress it shows what is there.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

STYLE = """
:root {{ color-scheme: {theme} }}
body {{ margin: 0; background: {paper}; color: {ink}; font-family: {font}; line-height: 1.5 }}
main {{ max-width: 1100px; margin: 0 auto; padding: 1rem }}
td, th {{ text-align: left; padding: .2rem 1.2rem .2rem 0; border-bottom: 1px solid {line} }}
.plot, pre {{ overflow-x: auto }}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; its exit status: 0, or 2 after one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m transformer.report", description="Write what a training run has told as one HTML page."
    )
    parser.add_argument("workdir", type=Path, help="directory of the run")
    parser.add_argument("out", type=Path, metavar="OUT.html", help="the page to write; it needs no other file")
    parser.add_argument("--language", choices=("en", "zh"), default="en", help="(%(default)s)")
    parser.add_argument("--theme", choices=("light", "dark"), default="light", help="(%(default)s)")
    args = parser.parse_args(argv)
    try:
        if not args.out.absolute().parent.is_dir():
            raise ValueError(f"{args.out}: no directory {args.out.parent}; make it first")
        if args.out.is_dir():
            raise ValueError(f"{args.out}: a directory; name a file in it, such as {args.out / 'report.html'}")
        text = page(args.workdir, args.language, args.theme)
        args.out.write_text(text, encoding="utf-8")
    except (ImportError, ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(f"wrote {args.out}: {len(text.encode()) / 1e6:.1f} MB")
    return 0


def page(workdir: Path, language: str = "en", theme: str = "light") -> str:
    """The page of a run's workdir.

    Raises:
      ValueError: no run there, or it has told nothing yet.
    """
    from plotly.offline import get_plotlyjs

    from transformer.checkpoints.workdir import Workdir
    from transformer.figures import training as figures
    from transformer.figures.data import training as data
    from transformer.figures.look import Look

    config, records, look = Workdir(workdir).read_config(), data.read(workdir), Look(language, theme)
    if not records:
        raise ValueError(f"{Path(workdir) / data.FILE}: nothing told yet; wait for train.log_every steps")
    drawn = [figures.training_curves(workdir, language, theme), figures.run_panels(workdir, language, theme)]
    for what in ("gradient", "parameter", "activation"):
        if data.layers(records, what)[1]:
            drawn.append(figures.run_layers(workdir, what, language, theme))
    options = dict(full_html=False, include_plotlyjs=False, config=dict(displaylogo=False, responsive=True))
    plots = "\n".join(f'<div class="plot">{figure.to_html(**options)}</div>' for figure in drawn)
    c, title = look.colors, escape(str(Path(workdir).absolute().name))
    style = STYLE.format(theme=theme, paper=c.paper, ink=c.ink, line=c.line, font=look.font)
    lines = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(told)}</td></tr>" for name, told in summary(config, records)
    )
    return (
        f'<!doctype html>\n<html lang="{language}">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{title}</title>\n'
        f"<style>{style}</style>\n<script>{get_plotlyjs()}</script>\n</head>\n<body><main>\n<h1>{title}</h1>\n"
        f"<table>{lines}</table>\n{plots}\n<details><summary>config.json</summary>"
        f"<pre>{escape(json.dumps(config, indent=2, ensure_ascii=False))}</pre></details>\n</main></body></html>\n"
    )


def summary(config: dict[str, Any], records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(what, how much) of a run: its model, how far it is, and the last figures of either kind."""
    lines = [("model", config["model"]["family"])]
    last = {kind: r for r in records for kind in [r["kind"]]}
    step = max(r["step"] for r in records)
    lines.append(("step", f"{step:,} of {config['train']['steps']:,}"))
    for kind, told in (("train", "on batches"), ("eval", "held out")):
        if kind in last:
            numbers = {name: x for name, x in last[kind].items() if isinstance(x, int | float) and name != "step"}
            what = ", ".join(f"{name} {x:.4g}" for name, x in numbers.items())
            lines.append((f"{told}, step {last[kind]['step']:,}", what))
    return lines


if __name__ == "__main__":
    sys.exit(main())
