"""Sources of documents, and their split into training and validation."""

import ast
import functools
import gc
import logging
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from transformer.settings import Data, SettingsError, check
from transformer.training import files
from transformer.training.documents import Documents, store_of
from transformer.training.indexes import HUGE

log = logging.getLogger("transformer")
MIN_CHARACTERS = 100  # a shorter documentation page says too little to be a document

# No documentation, or not of Python: tests, tables, vendored tools, and what is not the standard library.
_SKIPPED = {
    "__pycache__", "dist-packages", "encodings", "ensurepip", "idlelib", "lib-dynload", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def load(data: Data) -> Documents:
    """The documents of `data.source`, non-empty and without duplicates, in a fixed order.

    Raises:
      SettingsError: a path matches no file, a file can't be read, or there is no text at all.
    """
    if data.source == "python_docs":
        return _of_python()
    stamps = files.stamped(data.paths)
    kinds = {files.kind_of(name)[0] for name, *_ in stamps}
    remedy = f"data.paths={data.paths!r} are plain text; leave it at {Data.text_field!r}"
    check(data.text_field == Data.text_field or kinds - {"text", "tsv"}, "data.text_field", data.text_field, remedy)
    return _of_files(stamps, data.paths, data.text_field, data.on_bad, data.cache)


@functools.lru_cache(maxsize=8)  # training and validation ask for the same, and a pass over big files takes long
def _of_files(stamps: tuple, paths: tuple[str, ...], field: str, on_bad: str, cache: str | None) -> Documents:
    stores = [store_of(name, stamp, field, on_bad, cache) for name, *stamp in stamps]
    counts = Counter()
    for store in stores:
        counts.update({name: count for name, count in store.index.counts.items() if name != "first"})
    first = next((store.index.counts["first"] for store in stores if store.index.counts["first"]), "")
    documents = Documents.of_stores(stores)
    if not len(documents):
        why = f" ({first})" if first else ""
        raise SettingsError(f"data.paths={paths!r}: the files hold no text{why}; give files with text in them")
    repeated = sum(len(store.index.hashes) for store in stores) - len(documents)
    told = [
        f"{what}: {count:,}{more}"
        for what, count, more in (
            ("bad rows left out", counts["bad"], f" (the first: {first})"),
            ("empty documents left out", counts["empty"], ""),
            ("repeated documents left out", repeated, ""),
            (f"documents above {HUGE:,} bytes cut", counts["huge"], ""),
        )
        if count
    ]
    level = logging.WARNING if counts["bad"] else logging.INFO
    size = f"files: {len(stores):,}; documents: {len(documents):,} of {documents.sizes.sum():,} bytes"
    log.log(level, "data: %s", "; ".join([size, *told]))
    return documents


@functools.cache
def _of_python() -> Documents:
    return Documents.of(python_docs())


@functools.cache
def python_docs() -> tuple[str, ...]:
    """The English of CPython: its help topics, then one document a module with the docstrings in source order.

    A docstring and a paragraph count once, where they first occur, so that a split by document can't leak them.

    Raises:
      SettingsError: this Python ships without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    modules = _modules(root)
    if not modules:
        raise SettingsError(f'data.source="python_docs": no sources of modules in {root}; use data.source="text"')
    from pydoc_data.topics import topics  # half a megabyte that only this source needs

    seen: set[str] = set()
    documents = [_unseen(topics[name].strip(), seen) for name in sorted(topics)]
    collecting = gc.isenabled()
    gc.disable()  # syntax trees are millions of objects without cycles: collecting doubles the time
    try:
        for path in modules:
            texts = [_unseen(text, seen) for text in _docstrings(ast.parse(path.read_bytes()))]
            documents.append("\n\n".join(filter(None, texts)))
    finally:
        if collecting:
            gc.enable()
    return tuple(text for text in documents if len(text) >= MIN_CHARACTERS)


def split(documents: Documents, fraction: float) -> tuple[Documents, Documents]:
    """Training and validation documents, a `fraction` the latter, each in the order given.

    A document's side depends on its text and `fraction` only: equal texts never lie on both sides, and neither order
    nor the other documents matter.

    Raises:
      SettingsError: one side is empty.
    """
    held_out = is_held_out(documents.hashes, fraction)
    if held_out.all() or not held_out.any():
        side = "training" if held_out.all() else "validation"
        raise SettingsError(
            f"data.validation_fraction={fraction!r}: no {side} document among {len(documents)}; "
            f"{'raise' if side == 'validation' else 'lower'} the fraction or add text to data.paths"
        )
    return documents.select(~held_out), documents.select(held_out)


def is_held_out(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Whether contents of these hashes, uint64 [N], are for validation: bool [N]."""
    return hashes < np.uint64(min(int(fraction * 2**64), 2**64 - 1))


def _modules(root: Path) -> list[Path]:
    files = []
    for folder, children, names in os.walk(root):
        children[:] = [name for name in children if name not in _SKIPPED and not name.startswith("config-")]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def _docstrings(node: ast.AST) -> Iterator[str]:
    """The cleaned docstrings under `node`, a statement, in source order."""
    if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
        yield text
    for block in ("body", "handlers", "orelse", "finalbody"):
        for child in getattr(node, block, ()):
            yield from _docstrings(child)


def _unseen(text: str, seen: set[str]) -> str:
    """`text` without the long paragraphs in `seen`, or nothing if all of it is; adds what it keeps to `seen`."""
    if text in seen:
        return ""
    kept = []
    for paragraph in text.split("\n\n"):
        key = " ".join(paragraph.split())
        # Help topics quote each other at length; short paragraphs such as "Example:" belong where they stand.
        if len(key) < MIN_CHARACTERS or key not in seen:
            kept.append(paragraph)
        seen.add(key)
    seen.add(text)
    return "\n\n".join(kept)
