"""Documents of files, read where they lie: an index says where each is, how long, and the hash of its content.

One pass over a file makes its index, checks every row on the way, and counts what it leaves out. JSON Lines and plain
text then stay on the disk and are mapped; what can't be read at any place (compressed files, Parquet) is unpacked in
that pass. With `data.cache` indexes and unpacked text are kept there for later runs; else they are held in memory.
"""

import functools
import io
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np

from transformer.settings import SettingsError
from transformer.training import files, indexes
from transformer.training.indexes import Index

MAPPED = 2**20  # bytes of a file above which it is mapped: a process may have some 65,000 mappings


class Store:
    """The documents of one file, each read when it is asked for."""

    def __init__(self, name: str, kind: str, field: str, content: bytes | None, index: Index):
        """`content` is the unpacked text; None: the file `name` is read where it lies."""
        self._name, self._kind, self._field, self._content, self.index = name, kind, field, content, index

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_opened"}  # each process opens its own

    @functools.cached_property
    def _opened(self) -> Any:
        """What is read from: records, or the bytes of a big file; None: a small file, which is read when needed."""
        if self._kind == "array_record":
            return grain.sources.ArrayRecordDataSource([self._name])
        if self._content is not None:
            return self._content
        return indexes.mapped(self._name) if os.path.getsize(self._name) >= MAPPED else None

    def __getitem__(self, place: int) -> str:
        start, stop = map(int, self.index.spans[place])
        try:
            content = Path(self._name).read_bytes() if self._opened is None else self._opened
            if self._kind == "text":
                return content[start:stop].decode()
            raw = content[start] if self._kind == "array_record" else content[start:stop]
            text = _text(self._kind, raw, self._field)
        except (ValueError, IndexError, OSError) as error:
            raise SettingsError(
                f"data.paths: {self._name} was changed while it is read ({error}); start again"
            ) from None
        if len(content := text.encode()) <= indexes.HUGE:
            return text
        first = int(np.searchsorted(self.index.spans[:, 0], start))
        start, stop = list(indexes.cuts(content, 0, len(content), indexes.HUGE))[place - first]
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
        hashes = np.array([indexes.hash_of(content) for content in contents], np.uint64)
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
        values = [getattr(store.index, name) for store in self._stores]
        firsts = np.cumsum([0, *map(len, values)])
        return np.concatenate([*values, np.empty(0, dtype)])[firsts[self._owners] + self._places]


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
        made = indexes.scan(name, kind, field, on_bad, memory)
        return Store(name, "text" if unpacks else kind, field, memory.getvalue() if memory else None, made)
    key = json.dumps([indexes.VERSION, name, *stamp, field if kind != "text" else ""])
    place = Path(cache, f"{Path(name).name}-{indexes.hash_of(key.encode()):016x}")
    text_file, index_file = place.with_name(place.name + ".text"), place.with_name(place.name + ".npz")
    made = indexes.read_index(index_file)
    refused = made is not None and made.counts["bad"] and on_bad == "error"  # of a run that left something out
    if made is None or refused or (unpacks and not text_file.is_file()):
        try:
            made = indexes.make_cached(
                index_file, text_file, functools.partial(indexes.scan, name, kind, field, on_bad), unpacks
            )
        except OSError as error:
            raise SettingsError(f"data.cache={cache!r}: can't be written ({error.strerror}); use another one") from None
    return Store(str(text_file), "text", field, None, made) if unpacks else Store(name, kind, field, None, made)


def _text(kind: str, raw: bytes, field: str) -> str:
    read = files.record_texts if kind == "array_record" else files.from_json
    return read(raw, (field,))[0]
