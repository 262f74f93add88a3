"""Where the documents of a file lie: one pass over it checks every row, and counts what it leaves out."""

import hashlib
import io
import json
import mmap
import os
import uuid
import zipfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from transformer.training import compressed, files
from transformer.training.files import Bad, BadRow

PIECE = 2**16  # bytes of one piece of a big text file
MIN_PIECE = 2**12
MIN_PIECES = 128  # wanted of a middling file, so that a few percent of them are a validation set
HUGE = 2**20  # bytes of a row above which it is cut into several documents
VERSION = 1  # of the indexes


def content_hash(text: str) -> int:
    """64 bits that depend on the text alone, the same in every process and release."""
    return hash_of(text.encode())


def hash_of(content: bytes) -> int:
    """64 bits that depend on the content alone."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


@dataclass(frozen=True)
class Index:
    """Where the documents of one file lie.

    Attributes:
      spans: [N, 2] first byte and the one behind the last, or record numbers. A huge row has its span several times,
        for the pieces that it is cut into.
      hashes, sizes: [N] of the content, and its UTF-8 bytes.
      counts: of what is not among them, or not whole ("bad", "empty", "huge"), and the "first" bad row's reason.
    """

    spans: np.ndarray
    hashes: np.ndarray
    sizes: np.ndarray
    counts: dict[str, Any]


def mapped(name: str) -> mmap.mmap | bytes:
    """The bytes of a file, read when they are looked at.

    Raises:
      SettingsError: it can't be opened.
    """
    with compressed.opened(name, plain=True) as file:
        # An empty file can't be mapped.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(file.fileno()).st_size else b""


def cuts(content: bytes | mmap.mmap, start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Spans of at most `size` bytes, cut after a paragraph (else a line, else between characters)."""
    while stop - start > size:
        end = start + size
        for separator in (b"\n\n", b"\n"):
            # A cut in the first half would leave crumbs; a worse separator further on is the better one.
            cut = content.rfind(separator, start + size // 2, end)
            if cut >= 0:
                end = cut + len(separator)
                break
        else:
            while end > start + 1 and content[end] & 0xC0 == 0x80:  # inside a character
                end -= 1
        yield start, end
        start = end
    if start < stop:
        yield start, stop


class _Maker:
    """An index in the making."""

    def __init__(self, bad: Bad):
        self._bad, self._spans, self._hashes, self._sizes = bad, array("q"), array("Q"), array("q")
        self._counts = {"empty": 0, "huge": 0}

    def add(self, content: bytes, span: tuple[int, int], lies_there: bool) -> None:
        """A row, whose text lies at the span as it is, or is to be parsed out of it."""
        if not content.strip():
            self._counts["empty"] += 1
            return
        pieces = list(cuts(content, 0, len(content), HUGE))
        self._counts["huge"] += len(pieces) > 1
        for start, stop in pieces:
            self._spans.extend((span[0] + start, span[0] + stop) if lies_there else span)
            self._hashes.append(hash_of(content[start:stop]))
            self._sizes.append(stop - start)

    def index(self) -> Index:
        spans, hashes, sizes = np.array(self._spans), np.array(self._hashes), np.array(self._sizes)
        return Index(
            spans.reshape(-1, 2), hashes, sizes, self._counts | {"bad": self._bad.count, "first": self._bad.first}
        )


def scan(name: str, kind: str, field: str, on_bad: str, unpacked: BinaryIO | None) -> Index:
    """The index of a file, whose text is written to `unpacked` where it can't be read in place."""
    bad = Bad(on_bad)
    maker = _Maker(bad)
    if kind == "text":
        if unpacked:
            unpacked.writelines(files.chunks(name, bad))
        _scan_text(name, _written(unpacked) if unpacked else mapped(name), maker, bad)
        return maker.index()
    for row in files.rows(name, (field,), bad):
        content = row.values[0].encode()
        if unpacked:
            start = unpacked.tell()
            maker.add(content, (start, start + unpacked.write(content)), lies_there=True)
        else:
            maker.add(content, (row.start, row.stop), lies_there=False)
    return maker.index()


def _written(file: BinaryIO) -> bytes | mmap.mmap:
    file.flush()
    return file.getvalue() if isinstance(file, io.BytesIO) else mapped(file.name)


def _scan_text(name: str, content: bytes | mmap.mmap, maker: _Maker, bad: Bad) -> None:
    first = len(files.BOM) if content[: len(files.BOM)] == files.BOM else 0
    size = min(PIECE, max(MIN_PIECE, len(content) // MIN_PIECES))
    for start, stop in cuts(content, first, len(content), size):
        piece = content[start:stop]
        try:
            files.decoded(piece)
        except BadRow as error:
            place = f"bytes {start:,} to {stop:,}" if len(content) > size else ""
            bad(name, place, str(error), "convert the file to UTF-8")
        else:
            maker.add(piece, (start, stop), lies_there=True)


def read_index(file: Path) -> Index | None:
    try:
        with np.load(file, allow_pickle=False) as found:
            return Index(found["spans"], found["hashes"], found["sizes"], json.loads(str(found["counts"])))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None  # not there, or damaged: made anew


def make_cached(index_file: Path, text_file: Path, scan: Callable[..., Index], unpacks: bool) -> Index:
    """Both files or none; processes that make the same ones at once write the same."""
    index_file.parent.mkdir(parents=True, exist_ok=True)
    partial = [file.with_name(f"{file.name}.{uuid.uuid4().hex}.partial") for file in (index_file, text_file)]
    try:
        if unpacks:
            with partial[1].open("wb") as unpacked:
                index = scan(unpacked)
            os.replace(partial[1], text_file)
        else:
            index = scan(None)
        arrays = dict(spans=index.spans, hashes=index.hashes, sizes=index.sizes)
        with partial[0].open("wb") as out:
            np.savez(out, **arrays, counts=np.array(json.dumps(index.counts)))
        os.replace(partial[0], index_file)
    finally:
        for file in partial:
            file.unlink(missing_ok=True)
    return index
