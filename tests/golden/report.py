"""Writes docs/families.md: what the recorded outputs of Hugging Face models say about every family.

    .venv/bin/python -m tests.golden.report

Every cell is computed here, by the same functions that the tests call. The exit status is 1 where a cell is red.
"""

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

import transformer
from tests.checkpoints import common as golden
from tests.checkpoints import parity, published
from transformer import families
from transformer.checkpoints.tensors import TensorFiles, block_of
from transformer.planning import accounting

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
RED = "**✗**"
NONE = "none"
COLUMNS = (
    "family", "recorded cases", "logits", "hidden states", "gradients", "greedy, no cache", "greedy, cache", "import",
    "export ∘ import", "published counts",
)  # fmt: skip
HEAD = """# Families, measured

What this page says was computed by `.venv/bin/python -m tests.golden.report` from the recorded outputs of Hugging Face
models in [`tests/golden`](../tests/golden), on a CPU in float32; run it again after a change of the model. Where a
family has several cases, a cell is about all of them and shows the worst. A cell marked {red} is wrong.

- *logits*, *hidden states*: the largest difference from `transformers`, of a batch without padding.
- *gradients*: the larger of the difference of the token table's gradient, relative to its largest element, and of the
  global norm, relative to itself; of a batch padded on the right.
- *greedy*: continuations that are theirs token by token, of prompts with and without padding: by full passes without a
  cache, and by decoding with one.
- *import*: tensors of the files that were read; of the others the reader would have refused to go on.
- *export ∘ import*: tensors that come out bit for bit as they went in. 8-bit and 4-bit tensors come out as the float32
  that they stand for.
- *published counts*: configs of released checkpoints ([`published`](../tests/golden/published)), put through the
  reader, that give the released number of parameters and the spec of our page in `configs/`.

Errors above {limit:.0e} are red. A wrong detail moves the logits of these models by 2e-3 or more.

"""


def family_of(case: str) -> str:
    """The family that a case is named after."""
    return max((name for name in families.names() if case.startswith(name)), key=len)


def cell(measure: Callable[..., str], *arguments) -> str:
    """What was measured; a failure is part of the page."""
    try:
        return measure(*arguments)
    except Exception as error:  # whatever goes wrong is what the page has to say
        return f"{RED} {type(error).__name__}: {' '.join(str(error).split())[:80]}"


def largest(cases: list[str], errors: Callable[[str], float]) -> str:
    """The worst error of the cases."""
    worst = max(map(errors, cases))
    return f"{worst:.1e}" if worst <= parity.LIMIT else f"{RED} {worst:.1e}"


def share(good: int, total: int, what: str) -> str:
    """How many of all are as they should be."""
    return f"{'' if good == total else RED + ' '}{good} of {total} {what}".rstrip()


def gradient_error(case: str) -> float:
    """The larger of the two errors of a gradient."""
    errors = parity.loss_and_gradient_errors(case)
    return max(errors["grad_embed"], errors["grad_global_norm"])


def tokens(cases: list[str], generated: Callable[[str], np.ndarray]) -> str:
    """Continuations that are theirs."""
    same = [(generated(case) == parity.recorded_tokens(case)).all(axis=1) for case in cases]
    return share(int(np.sum(same)), sum(map(len, same)), "")


def read(cases: list[str]) -> str:
    """Tensors that were read once."""
    good = total = 0
    for case in cases:
        seen: list[str] = []
        original = TensorFiles.read
        TensorFiles.read = lambda self, name, seen=seen, original=original: seen.append(name) or original(self, name)
        try:
            transformer.from_hf(golden.GOLDEN / case)
        finally:
            TensorFiles.read = original
        names = TensorFiles(golden.GOLDEN / case, block_of(golden.config(case))).names
        # One that fills several leaves of ours is read for each.
        good, total = good + len(names & set(seen)), total + len(names)
    return share(good, total, "tensors")


def round_trip(cases: list[str]) -> str:
    """Tensors that are identical after import and export."""
    good = total = 0
    for case in cases:
        model, params = golden.imported(case)
        with tempfile.TemporaryDirectory() as directory:
            transformer.to_hf(model, params, Path(directory) / "out")
            got = golden.stored(Path(directory) / "out" / golden.WEIGHTS)
        want = golden.weights(case)
        good += sum(name in got and got[name].tobytes() == x.tobytes() for name, x in want.items())
        total += len(got.keys() | want.keys())
    return share(good, total, "tensors")


@functools.cache
def counted(name: str) -> tuple[int, bool]:
    """(parameters, is our page's spec) of a published config."""
    model = published.read(name)
    same = published.nameless(model) == published.nameless(published.of_page(name))
    count = accounting.parameters(model).total
    if count != published.abstract_count(model):
        raise ValueError(f"{count} parameters by the spec, {published.abstract_count(model)} in the model")
    return count, same


def released(family: str) -> str:
    """Published configs that give the published model."""
    names = [name for name, (owner, _) in published.SIZES.items() if owner == family]
    return share(sum(counted(name) == (published.count(name), True) for name in names), len(names), "")


def row(family: str) -> list[str]:
    """The cells of a family."""
    cases = [case for case in golden.CASES if family_of(case) == family]
    if not cases:
        return [family, "no released checkpoints", *[NONE] * (len(COLUMNS) - 2)]
    return [
        family,
        ", ".join(cases),
        cell(largest, cases, parity.logits_error),
        cell(largest, cases, lambda case: max(parity.hidden_errors(case))),
        cell(largest, cases, gradient_error),
        cell(tokens, cases, parity.tokens_without_cache),
        cell(tokens, cases, parity.tokens_with_cache),
        cell(read, cases),
        cell(round_trip, cases),
        cell(released, family),
    ]


def count_row(name: str) -> list[str]:
    """The cells of a published config."""
    family, size = published.SIZES[name]
    found = cell(lambda: f"{counted(name)[0]:,}")
    mark = "" if found == f"{published.count(name):,}" else f"{RED} "
    same = cell(lambda: "same" if counted(name)[1] else f"{RED} differs")
    return [name, f"`configs/{family}.py:{size}`", f"{published.count(name):,}", mark + found, same]


def table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main() -> int:
    """Writes the page; the exit status."""
    jax.config.update("jax_disable_most_optimizations", True)  # as in the tests: compiles in a third of the time
    rows = []
    for family in families.names():
        rows.append(row(family))
        print(*rows[-1], sep="  ", file=sys.stderr)
    page = HEAD.format(red=RED, limit=parity.LIMIT) + table(COLUMNS, rows)
    counts = [count_row(name) for name in published.SIZES]
    page += "\n## Parameters of released checkpoints\n\n"
    page += table(("config.json", "our page", "published", "counted", "spec"), counts)
    PAGE.write_text(page, encoding="utf-8")
    red = any(RED in text for cells in (*rows, *counts) for text in cells)
    print(f"wrote {PAGE}{', with red cells' if red else ''}", file=sys.stderr)
    return int(red)


if __name__ == "__main__":
    sys.exit(main())
