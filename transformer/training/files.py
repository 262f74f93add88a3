"""Rows of data files, by the files' names; each row that can't be read is named with its place and the reason.

  .jsonl .ndjson .json   JSON Lines: an object a line
  .parquet               a row a row (pyarrow)
  .arrayrecord           a JSON object a record, or a text (also .array_record)
  .tsv                   of pairs: source<tab>target
  else                   plain UTF-8 text

All but Parquet and ArrayRecord, which compress by themselves, may be compressed: .gz, .zst (zstandard).
"""

import glob
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, Literal, NamedTuple

import grain

from transformer.settings import SettingsError
from transformer.training import compressed
from transformer.training.compressed import needs

KINDS = {
    ".jsonl": "json", ".ndjson": "json", ".json": "json", ".tsv": "tsv", ".parquet": "parquet",
    ".arrayrecord": "array_record", ".array_record": "array_record",
}  # fmt: skip
BOM = b"\xef\xbb\xbf"


class Row(NamedTuple):
    """One row: the fields asked for, its place, and where it lies: bytes of a file of lines, else record numbers."""

    values: tuple[str, ...]
    place: str
    start: int
    stop: int


class BadRow(ValueError):
    """Why a row can't be used."""


class Bad:
    """Rows that can't be used: the first one ends all, or they are left out and counted.

    Attributes:
      count, first: how many there were, and the first one's place and reason.
    """

    def __init__(self, policy: Literal["error", "skip"]):
        self._skip = policy == "skip"
        self.count, self.first = 0, ""

    def __call__(self, name: str, place: str, reason: str, remedy: str = "mend it") -> None:
        """Counts one of the file `name`.

        Raises:
          SettingsError: it is not to be left out.
        """
        told = f"{name}, {place}: {reason}" if place else f"{name}: {reason}"
        if not self._skip:
            raise SettingsError(f'data.paths: {told}; {remedy}, or leave out what is bad with data.on_bad="skip"')
        self.count += 1
        self.first = self.first or told


def matched(paths: Iterable[str], field: str = "data.paths") -> list[str]:
    """The files that `paths` (names or globs), the value of `field`, match: each once, sorted.

    Raises:
      SettingsError: a path matches no file.
    """
    found: dict[str, None] = {}
    for pattern in paths:
        matches = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        matches = [name for name in matches if os.path.isfile(name)]
        if not matches:
            raise SettingsError(f"{field}={pattern!r}: matches no file; give a file or a glob such as 'docs/*.txt'")
        found.update(dict.fromkeys(os.path.realpath(name) for name in matches))
    return sorted(found)


def stamped(paths: Iterable[str]) -> tuple[tuple[str, int, int], ...]:
    """What `matched` finds, each with its size and the nanosecond of its last change."""
    found = [(name, os.stat(name)) for name in matched(paths)]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def kind_of(name: str) -> tuple[str, str]:
    """The format of a file and its compression ("" for none), by its name."""
    stem, last = os.path.splitext(name.lower())
    compression = last if last in compressed.KINDS else ""
    extension = os.path.splitext(stem)[1] if compression else last
    return KINDS.get(extension, "text"), compression


def chunks(name: str, bad: Bad, size: int = 2**20) -> Iterator[bytes]:
    """The decompressed bytes of a file, piece by piece, up to where it is damaged."""
    yield from _guarded(name, bad, lambda file: iter(lambda: file.read(size), b""))


def rows(name: str, fields: Sequence[str], bad: Bad) -> Iterator[Row]:
    """The rows of a file that has such, in order, without blank lines and bad ones.

    Args:
      fields: of JSON objects, Parquet columns or ArrayRecord objects; ("",) takes the record itself.

    Raises:
      SettingsError: a bad row that is not to be left out; a missing library.
    """
    kind = kind_of(name)[0]
    if kind == "parquet":
        yield from _parquet(name, fields, bad)
    elif kind == "array_record":
        yield from _array_record(name, fields, bad)
    else:
        yield from _lines(name, tsv if kind == "tsv" else lambda line: from_json(line, fields), bad)


def decoded(content: bytes) -> str:
    """UTF-8 text.

    Raises:
      BadRow: it is not, or holds NUL, which no text does.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 at byte {error.start} ({error.reason})") from None
    if "\0" in text:
        raise BadRow(f"binary, not text (NUL at byte {content.index(0)})")
    return text


def from_json(line: bytes, fields: Sequence[str]) -> tuple[str, ...]:
    """The `fields` of a JSON object, or the text itself that a JSON string is.

    Raises:
      BadRow: they are not there, or are no texts.
    """
    try:
        found = json.loads(decoded(line))
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, BadRow) else BadRow(f"not JSON ({error})") from None
    if tuple(fields) == ("",):
        return (_text(found, "the record"),)
    if not isinstance(found, dict):
        raise BadRow(f"a JSON {type(found).__name__}, expected an object with {' and '.join(map(repr, fields))}")
    for field in fields:
        if field not in found:
            remedy = "; data.text_field names it" if len(fields) == 1 else ""
            raise BadRow(f"no field {field!r} (it has {', '.join(map(repr, found)) or 'none'}){remedy}")
    return tuple(_text(found[field], f"field {field!r}") for field in fields)


def tsv(line: bytes) -> tuple[str, ...]:
    """The two texts that a tab parts.

    Raises:
      BadRow: there are more or fewer.
    """
    fields = tuple(decoded(line).split("\t"))
    if len(fields) != 2:
        raise BadRow("expected source<tab>target")
    return fields


def record_texts(record: bytes, fields: Sequence[str]) -> tuple[str, ...]:
    """The `fields` of an ArrayRecord's record, which is a text itself for ("",).

    Raises:
      BadRow: they are not there, or are no texts.
    """
    return (decoded(record),) if tuple(fields) == ("",) else from_json(record, fields)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{what} is {type(value).__name__}, expected a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRow(f"{what} holds half a surrogate pair, which is no text") from None
    return value


def _guarded[T](name: str, bad: Bad, read: Callable[[BinaryIO], Iterator[T]]) -> Iterator[T]:
    """What `read` gives of an open file, up to where its compression is damaged."""
    with compressed.opened(name) as file:
        try:
            yield from read(file)
        except compressed.DamagedFile as error:
            bad(name, "", f"damaged or cut off ({error})", "copy the file again")


def _lines(name: str, parse: Callable[[bytes], tuple[str, ...]], bad: Bad) -> Iterator[Row]:
    at = 0
    for number, line in enumerate(_guarded(name, bad, iter), start=1):
        start, at, place = at, at + len(line), f"line {number}"
        if number == 1 and line.startswith(BOM):
            start, line = start + len(BOM), line[len(BOM) :]
        if line.strip():
            try:
                yield Row(parse(line.rstrip(b"\r\n")), place, start, at)
            except BadRow as error:
                bad(name, place, str(error))


def _array_record(name: str, fields: Sequence[str], bad: Bad) -> Iterator[Row]:
    try:
        records = grain.sources.ArrayRecordDataSource([name])
        total = len(records)
    except Exception as error:  # the library's own kinds
        bad(name, "", f"not an ArrayRecord file, or cut off ({_first_line(error)})", "copy the file again")
        return
    for number in range(total):
        place = f"record {number}"
        try:
            yield Row(record_texts(records[number], fields), place, number, number + 1)
        except BadRow as error:
            bad(name, place, str(error))
        except Exception as error:
            bad(name, place, f"damaged ({_first_line(error)})", "copy the file again")


def _parquet(name: str, fields: Sequence[str], bad: Bad) -> Iterator[Row]:
    parquet = needs("pyarrow.parquet", name)
    damage, number = (OSError, needs("pyarrow", name).ArrowException), 0
    try:
        with parquet.ParquetFile(name) as file:
            columns = file.schema_arrow.names
            missing = [field for field in fields if field not in columns]
            if missing:
                bad(name, "", f"no column {missing[0]!r} (it has {', '.join(columns)})", "name it in data.text_field")
                return
            for batch in file.iter_batches(batch_size=1024, columns=list(fields)):
                for values in zip(*(batch.column(field).to_pylist() for field in fields), strict=True):
                    place = f"row {number}"
                    try:
                        named = zip(values, fields, strict=True)
                        yield Row(tuple(_text(x, f"column {f!r}") for x, f in named), place, number, number + 1)
                    except BadRow as error:
                        bad(name, place, str(error))
                    number += 1
    except damage as error:
        bad(name, "", f"not a Parquet file, or cut off ({_first_line(error)})", "copy the file again")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
