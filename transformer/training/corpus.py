"""Sources of documents, and their split into training and validation."""

import ast
import functools
import gc
import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from transformer.settings import Data, SettingsError

MIN_CHARACTERS = 100  # a shorter documentation page says too little to be a document
PIECE = 2**16  # characters of one piece of a big file
MIN_PIECE = 2**12
MIN_PIECES = 128  # wanted of a middling file, so that a few percent of them are a validation set

# No documentation, or not of Python: tests, tables, vendored tools, and what is not the standard library.
_SKIPPED = {
    "__pycache__", "dist-packages", "encodings", "ensurepip", "idlelib", "lib-dynload", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def load(data: Data) -> list[str]:
    """The documents of `data.source`, non-empty and without duplicates, in a fixed order.

    Raises:
      SettingsError: a path matches no file, a file is not UTF-8, or there is no text at all.
    """
    return list(python_docs()) if data.source == "python_docs" else text_files(data.paths)


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


def text_files(paths: Iterable[str]) -> list[str]:
    """The UTF-8 files that `paths` (names or globs) match, big ones in pieces that join to the file.

    Raises:
      SettingsError: a path matches no file, a file is not UTF-8, or there is no text at all.
    """
    documents = [piece for name in files(paths) for piece in _pieces(read(name)) if piece.strip()]
    if not documents:
        raise SettingsError(f"data.paths={tuple(paths)!r}: the files hold no text; give files with text in them")
    return list(dict.fromkeys(documents))


def files(paths: Iterable[str]) -> list[str]:
    """The files that `paths` (names or globs) match, each once, sorted.

    Raises:
      SettingsError: a path matches no file.
    """
    found: dict[str, None] = {}
    for pattern in paths:
        matches = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        matches = [name for name in matches if os.path.isfile(name)]
        if not matches:
            raise SettingsError(f"data.paths={pattern!r}: matches no file; give a file or a glob such as 'docs/*.txt'")
        found.update(dict.fromkeys(os.path.realpath(name) for name in matches))
    return sorted(found)


def read(name: str) -> str:
    """The text of a UTF-8 file.

    Raises:
      SettingsError: it is not UTF-8.
    """
    content = Path(name).read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"data.paths: {name} is not UTF-8 at byte {error.start} ({error.reason}); convert the file or leave it out"
        ) from error


def split(documents: Iterable[str], fraction: float) -> tuple[list[str], list[str]]:
    """Training and validation documents, a `fraction` the latter, each in the order given.

    A document's side depends on its text and `fraction` only: equal texts never lie on both sides, and neither order
    nor the other documents matter.

    Raises:
      SettingsError: one side is empty.
    """
    sides: tuple[list[str], list[str]] = ([], [])
    for text in documents:
        sides[content_hash(text) < fraction * 2**64].append(text)
    if not all(sides):
        side = "validation" if sides[0] else "training"
        raise SettingsError(
            f"data.validation_fraction={fraction!r}: no {side} document among {len(sides[0]) + len(sides[1])}; "
            f"{'raise' if side == 'validation' else 'lower'} the fraction or add text to data.paths"
        )
    return sides


def content_hash(text: str) -> int:
    """64 bits that depend on the text alone, the same in every process and release."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


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


def _pieces(text: str) -> Iterator[str]:
    """Cuts `text` after a paragraph (else a line, else anywhere) into pieces of at most PIECE characters."""
    size = min(PIECE, max(MIN_PIECE, len(text) // MIN_PIECES))
    start = 0
    while len(text) - start > size:
        end = start + size
        for separator in ("\n\n", "\n"):
            # A cut in the first half would leave crumbs; a worse separator further on is the better one.
            cut = text.rfind(separator, start + size // 2, end)
            if cut >= 0:
                end = cut + len(separator)
                break
        yield text[start:end]
        start = end
    yield text[start:]
