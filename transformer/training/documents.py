"""Documents of files, read where they lie: an index says where each is, how long, and the hash of its content.

One pass over a file makes its index, checks every row on the way, and counts what it leaves out. JSON Lines and plain
text then stay on the disk and are mapped; what can't be read at any place (compressed files, Parquet) is unpacked in
that pass. With `data.cache` indexes and unpacked text are kept there for later runs; else they are held in memory.
"""

import functools
import hashlib
import io
import json
import mmap
import os
import zipfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import grain
import numpy as np

from transformer.settings import SettingsError
from transformer.training import files
from transformer.training.files import Bad, BadRow

PIECE = 2**16  # bytes of one piece of a big text file
MIN_PIECE = 2**12
MIN_PIECES = 128  # wanted of a middling file, so that a few percent of them are a validation set
HUGE = 2**20  # bytes of a row above which it is cut into several documents
VERSION = 1  # of the indexes


def content_hash(text: str) -> int:
    """64 bits that depend on the text alone, the same in every process and release."""
    return _hash(text.encode())


def _hash(content: bytes) -> int:
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


class Store:
    """The documents of one file, each read when it is asked for."""

    def __init__(self, name: str, kind: str, field: str, content: bytes | None, index: Index):
        """`content` is the unpacked text; None: the file `name` is read where it lies."""
        self._name, self._kind, self._field, self._content, self.index = name, kind, field, content, index

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_opened"}  # each process opens its own

    @functools.cached_property
    def _opened(self) -> Any:
        if self._kind == "array_record":
            return grain.sources.ArrayRecordDataSource([self._name])
        return mapped(self._name) if self._content is None else self._content

    def __getitem__(self, place: int) -> str:
        start, stop = map(int, self.index.spans[place])
        try:
            if self._kind == "text":
                return self._opened[start:stop].decode()
            raw = self._opened[start] if self._kind == "array_record" else self._opened[start:stop]
            text = _text(self._kind, raw, self._field)
        except (ValueError, IndexError, OSError) as error:
            raise SettingsError(
                f"data.paths: {self._name} was changed while it is read ({error}); start again"
            ) from None
        if len(content := text.encode()) <= HUGE:
            return text
        first = int(np.searchsorted(self.index.spans[:, 0], start))
        start, stop = list(cuts(content, 0, len(content), HUGE))[place - first]
        return content[start:stop].decode()


class Documents(Sequence[str]):
    """Documents of several stores, in an order."""

    def __init__(self, stores: Sequence[Store], owners: np.ndarray, places: np.ndarray):
        """Document i is number `places[i]` of the store `owners[i]`."""
        self._stores, self._owners, self._places = tuple(stores), owners, places

    @classmethod
    def of_stores(cls, stores: Sequence[Store]) -> "Documents":
        """All documents in order, but of equal ones the first alone."""
        owners = np.repeat(np.arange(len(stores), dtype=np.int32), [len(store.index.hashes) for store in stores])
        places = np.concatenate([np.arange(len(store.index.hashes)) for store in stores]) if stores else owners
        every = cls(stores, owners, places)
        return every.select(np.sort(np.unique(every.hashes, return_index=True)[1]))

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Documents":
        """Texts that are held in memory."""
        contents = [text.encode() for text in texts]
        stops = np.cumsum([len(content) for content in contents], dtype=np.int64)
        sizes = np.diff(stops, prepend=0)
        hashes = np.array([_hash(content) for content in contents], np.uint64)
        index = Index(np.stack([stops - sizes, stops], axis=1), hashes, sizes, {})
        return cls.of_stores([Store("", "text", "", b"".join(contents), index)])

    def __len__(self) -> int:
        return len(self._owners)

    def __getitem__(self, place: int) -> str:
        return self._stores[self._owners[place]][self._places[place]]

    def select(self, chosen: np.ndarray) -> "Documents":
        """Those of a mask, or of numbers in their order."""
        return Documents(self._stores, self._owners[chosen], self._places[chosen])

    @property
    def hashes(self) -> np.ndarray:
        """uint64 [N], of the contents."""
        return self._gather("hashes", np.uint64)

    @property
    def sizes(self) -> np.ndarray:
        """int64 [N], UTF-8 bytes."""
        return self._gather("sizes", np.int64)

    def _gather(self, name: str, dtype: Any) -> np.ndarray:
        values = np.empty(len(self), dtype)
        for number, store in enumerate(self._stores):
            mine = self._owners == number
            values[mine] = getattr(store.index, name)[self._places[mine]]
        return values


def store_of(name: str, stamp: tuple[int, int], field: str, on_bad: str, cache: str | None) -> Store:
    """The documents of a file, by its index in the cache, or by one that is made now.

    Args:
      stamp: size and time of the last change, by which an index is known to be of this file.

    Raises:
      SettingsError: a row can't be used and is not to be left out, a library is missing, the cache can't be written.
    """
    kind, compression = files.kind_of(name)
    kind = "text" if kind == "tsv" else kind
    unpacks = bool(compression) or kind == "parquet"
    if cache is None:
        memory = io.BytesIO() if unpacks else None
        made = _scan(name, kind, field, on_bad, memory)
        return Store(name, "text" if unpacks else kind, field, memory.getvalue() if memory else None, made)
    key = json.dumps([VERSION, name, *stamp, field if kind != "text" else "", on_bad])
    place = Path(cache, f"{Path(name).name}-{_hash(key.encode()):016x}")
    text_file, index_file = place.with_name(place.name + ".text"), place.with_name(place.name + ".npz")
    made = _read_index(index_file)
    if made is None or (unpacks and not text_file.is_file()):
        try:
            made = _make_cached(index_file, text_file, functools.partial(_scan, name, kind, field, on_bad), unpacks)
        except OSError as error:
            raise SettingsError(f"data.cache={cache!r}: can't be written ({error.strerror}); use another one") from None
    return Store(str(text_file), "text", field, None, made) if unpacks else Store(name, kind, field, None, made)


def mapped(name: str) -> mmap.mmap | bytes:
    """The bytes of a file, read when they are looked at."""
    with open(name, "rb") as file:
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


def _text(kind: str, raw: bytes, field: str) -> str:
    read = files.record_texts if kind == "array_record" else files.from_json
    return read(raw, (field,))[0]


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
            self._hashes.append(_hash(content[start:stop]))
            self._sizes.append(stop - start)

    def index(self) -> Index:
        spans, hashes, sizes = np.array(self._spans), np.array(self._hashes), np.array(self._sizes)
        return Index(
            spans.reshape(-1, 2), hashes, sizes, self._counts | {"bad": self._bad.count, "first": self._bad.first}
        )


def _scan(name: str, kind: str, field: str, on_bad: str, unpacked: BinaryIO | None) -> Index:
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


def _read_index(file: Path) -> Index | None:
    try:
        with np.load(file, allow_pickle=False) as found:
            return Index(found["spans"], found["hashes"], found["sizes"], json.loads(str(found["counts"])))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None  # not there, or damaged: made anew


def _make_cached(index_file: Path, text_file: Path, scan: Callable[..., Index], unpacks: bool) -> Index:
    """Both files or none; processes that make the same ones at once write the same."""
    index_file.parent.mkdir(parents=True, exist_ok=True)
    partial = [file.with_name(f"{file.name}.{os.getpid()}.partial") for file in (index_file, text_file)]
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
