"""Laws of files: every format gives the texts that were written, what is bad is named or counted, nothing is lost."""

import gzip
import importlib.util
import json
import logging
import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer.settings import Data, SettingsError
from transformer.training import compressed, corpus, documents, files, indexes, pairs
from transformer.training.documents import Documents

TEXTS = [
    "one document",
    "two\nlines, naïve",
    "日本 🙂",
    'quotes " and \\ slashes',
    "\ttabs\r\n and returns",
    "six " * 50,
]
FORMATS = ["a.jsonl", "a.ndjson", "a.json.gz", "a.jsonl.zst", "a.parquet", "a.arrayrecord", "a.txt.gz", "a.txt"]
WITH_FIELDS = [name for name in FORMATS if not name.startswith("a.txt")]


def need(name):
    module = {".zst": "zstandard", ".parquet": "pyarrow"}.get(name[name.rindex(".") :])
    if module and importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed; the extra [data] has it")


def packed(name, content):
    if name.endswith(".gz"):
        return gzip.compress(content)
    if name.endswith(".zst"):
        import zstandard

        half = len(content) // 2  # two frames, as tools that work in parallel write them
        return b"".join(zstandard.ZstdCompressor().compress(part) for part in (content[:half], content[half:]))
    return content


def write(path, records):
    """A file whose records are objects."""
    need(path.name)
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=2)
    elif path.suffix == ".arrayrecord":
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(str(path), "group_size:1")
        for record in records:
            writer.write(json.dumps(record).encode())
        writer.close()
    else:
        lines = "\n".join(json.dumps(record, ensure_ascii=i % 2 == 0) for i, record in enumerate(records))
        path.write_bytes(packed(path.name, lines.encode()))
    return path


def load(*paths, **fields):
    return corpus.load(Data(source="text", paths=tuple(map(str, paths)), **fields))


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", WITH_FIELDS)
def test_every_format_gives_the_texts_in_order(tmp_path, name, cached, mapped, monkeypatch):
    monkeypatch.setattr(documents, "MAPPED", 0 if mapped else 2**20)
    path = write(tmp_path / name, [{"id": str(i), "body": text} for i, text in enumerate(TEXTS)])
    fields = dict(text_field="body", cache=str(tmp_path / "cache") if cached else None)
    found = load(path, **fields)
    assert list(found) == TEXTS
    assert [found[i] for i in (4, 0, 2)] == [TEXTS[i] for i in (4, 0, 2)]
    assert found.sizes.tolist() == [len(text.encode()) for text in TEXTS]
    assert found.hashes.tolist() == [indexes.content_hash(text) for text in TEXTS]
    assert list(pickle.loads(pickle.dumps(found))) == TEXTS  # as worker processes get it
    if cached:
        corpus._of_files.cache_clear()
        made = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").iterdir()}
        assert made and not [file for file in made if file.suffix == ".partial"]
        assert list(load(path, **fields)) == TEXTS
        assert {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").iterdir()} == made


@pytest.mark.parametrize("name", ["a.txt", "a.md.gz", "a.txt.zst"])
def test_plain_text_comes_whole(tmp_path, name):
    need(name)
    rng = random.Random(0)
    text = "".join(rng.choices(["word ", "naïve", "\n\n", "🙂", "\n"], k=9000))
    (tmp_path / name).write_bytes(packed(name, files.BOM + text.encode()))
    found = list(load(tmp_path / name))
    assert len(found) > 5 and "".join(found) == text


@pytest.mark.parametrize("name", WITH_FIELDS)
def test_huge_rows_are_cut_and_nothing_of_them_is_lost(tmp_path, name, monkeypatch, caplog):
    monkeypatch.setattr(indexes, "HUGE", 64)
    numbers = [" ".join(map(str, range(first, first + 90))) for first in (100, 300)]
    texts = ["short", "x" * 64, "é".join(numbers[0].split()) + "\n\n" + numbers[1], "last"]
    path = write(tmp_path / name, [{"text": text} for text in texts])
    with caplog.at_level(logging.INFO, "transformer"):
        found = list(load(path))
    assert "".join(found) == "".join(texts) and found[:2] == texts[:2] and found[-1] == texts[-1]
    assert max(len(text.encode()) for text in found) <= 64
    assert "bytes cut: 1" in caplog.text


@settings(deadline=None, max_examples=25)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=8), st.booleans())
def test_any_text_survives_json(tmp_path_factory, texts, escaped):
    texts = ["some text", *texts]
    path = tmp_path_factory.mktemp("any") / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": t}, ensure_ascii=escaped) for t in texts), "utf-8", newline="")
    assert list(load(path)) == [text for text in dict.fromkeys(texts) if text.encode().strip()]


def test_empty_and_repeated_documents_are_left_out_and_counted(tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", [{"text": text} for text in ["one", "", " \n", "two", "one"]])
    with caplog.at_level(logging.INFO, "transformer"):
        found = load(path)
        assert load(path) is found  # read once
    assert list(found) == ["one", "two"]
    [line] = [record.getMessage() for record in caplog.records]
    assert line.endswith("documents: 2 of 6 bytes; empty documents left out: 2; repeated documents left out: 1")


BAD_LINES = {
    b"not json": "not JSON",
    b'{"text": "cut': "not JSON",
    b'["text"]': "a JSON list, expected an object with 'text'",
    b'{"body": "x"}': r"no field 'text' \(it has 'body'\); data.text_field names it",
    b'{"text": 3}': "field 'text' is int, expected a text",
    b'{"text": null}': "field 'text' is NoneType, expected a text",
    b'{"text": "caf\xe9"}': "not UTF-8 at byte 13",
    b"\x00\x01\x02": "binary, not text",
    b'{"text": "\\ud83d"}': "half a surrogate pair",
    b"[" * 100_000: "not JSON",
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items(), ids=[str(i) for i in range(len(BAD_LINES))])
def test_a_bad_line_is_named_or_left_out(tmp_path, line, reason, caplog):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": "two"}\r\n')
    with pytest.raises(SettingsError, match=rf'a.jsonl, line 3: .*{reason}.*data.on_bad="skip"'):
        load(path)
    with caplog.at_level(logging.WARNING, "transformer"):
        assert list(load(path, on_bad="skip")) == ["one", "two"]
    assert "bad rows left out: 1 (the first: " in caplog.text and "line 3: " in caplog.text


def cut(path, keep=0.5):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


@pytest.mark.parametrize("name", [name for name in FORMATS if name.endswith((".gz", ".zst", ".parquet", "record"))])
@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_a_damaged_file_is_named(tmp_path, name, damage):
    rng = random.Random(0)
    records = [{"text": "".join(rng.choices("abcdefghij\n", k=1000))} for _ in range(200)]
    path = write(tmp_path / name, records)
    path.write_bytes(rng.randbytes(3000)) if damage == "garbage" else cut(path)
    with pytest.raises(SettingsError, match=rf"data.paths: .*{name}: .*cut off .*copy the file again, or leave out"):
        load(path)
    good = tmp_path / "b.txt"
    good.write_text("good text")
    left = list(load(path, good, on_bad="skip"))
    assert left[-1] == "good text" and set(left[:-1]) <= {record["text"] for record in records}


def test_a_parquet_file_without_the_column_is_named(tmp_path):
    path = write(tmp_path / "a.parquet", [{"body": "x", "n": 1}, {"body": None, "n": 2}])
    with pytest.raises(
        SettingsError, match=r"a.parquet: no column 'text' \(it has body, n\); name it in data.text_field"
    ):
        load(path)
    with pytest.raises(SettingsError, match=r"a.parquet, row 1: column 'body' is NoneType, expected a text"):
        load(path, text_field="body")
    with pytest.raises(SettingsError, match=r"a.parquet, row 0: column 'n' is int, expected a text"):
        load(path, text_field="n")


def test_a_record_can_be_the_text_itself(tmp_path):
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1")
    for text in TEXTS:
        writer.write(text.encode())
    writer.close()
    assert list(load(tmp_path / "a.array_record", text_field="")) == TEXTS
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, TEXTS)))
    assert list(load(tmp_path / "a.jsonl", text_field="")) == TEXTS
    with pytest.raises(SettingsError, match=r"a.array_record, record 0: not JSON"):
        load(tmp_path / "a.array_record")


@pytest.mark.parametrize(
    ("name", "content", "fields", "message"),
    [
        ("a.txt", b"caf\xe9 ole", {}, "a.txt: not UTF-8 at byte 3 .*convert the file to UTF-8"),
        ("a.txt", b"\x7fELF\0\0\0", {}, "a.txt: binary, not text .NUL at byte 4"),
        ("a.txt", b"", {}, "the files hold no text; give files with text in them"),
        ("a.jsonl", b"\n \n", {}, "the files hold no text"),
        ("a.jsonl", b"junk", {"on_bad": "skip"}, "the files hold no text .*line 1: not JSON"),
        ("a.txt", b"text", {"text_field": "body"}, "data.text_field='body': data.paths=.* are plain text; leave it"),
        ("a.txt", b"text", {"cache": "/dev/null/x"}, "data.cache='/dev/null/x': can't be written"),
    ],
)
def test_bad_input_is_named(tmp_path, name, content, fields, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingsError, match=message):
        load(tmp_path / name, **fields)


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(compressed.importlib, "import_module", missing)
    for name, library in (("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(SettingsError, match=rf"{name}: needs {library}.*pip install {library} .the extra \[data\]"):
            load(tmp_path / name)


def test_a_path_that_matches_nothing_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"data.paths='.*none.txt': matches no file"):
        load(tmp_path / "none.txt")


def test_a_damaged_or_stale_cache_is_made_anew(tmp_path):
    path, fields = write(tmp_path / "a.jsonl", [{"text": "old"}]), dict(cache=str(tmp_path / "cache"))
    load(path, **fields)
    [index] = (tmp_path / "cache").iterdir()
    cut(index)
    corpus._of_files.cache_clear()
    assert list(load(path, **fields)) == ["old"]
    write(path, [{"text": "newer"}])
    assert list(load(path, **fields)) == ["newer"]


def test_what_one_run_leaves_out_another_refuses_all_the_same(tmp_path):
    path, fields = write(tmp_path / "a.jsonl.gz", [{"text": "one"}, {"text": 2}]), dict(cache=str(tmp_path / "cache"))
    assert list(load(path, on_bad="skip", **fields)) == ["one"]
    with pytest.raises(SettingsError, match="line 2"):
        load(path, **fields)
    assert list(load(path, on_bad="skip", **fields)) == ["one"]


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    found = load(path)
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(SettingsError, match=r"a.jsonl was changed while it is read"):
        list(found)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet", "a.arrayrecord", "a.tsv.gz"])
def test_pairs_come_from_every_format_with_fields(tmp_path, name):
    listed = [(f"frage {i}", f"question {i}") for i in range(30)]
    if name.startswith("a.tsv"):
        (tmp_path / name).write_bytes(gzip.compress("\n".join("\t".join(pair) for pair in listed).encode()))
    else:
        write(tmp_path / name, [{"source": a, "target": b, "id": "x"} for a, b in listed])
    data = Data(source="pairs", objective="pairs", paths=(str(tmp_path / name),), validation_fraction=0.3)
    assert sorted(pairs.pairs(data, "train") + pairs.pairs(data, "validation")) == sorted(listed)


def test_documents_keep_the_first_of_equal_ones():
    found = Documents.of(["a", "b", "a", "c", "b"])
    assert list(found) == ["a", "b", "c"] and list(found.select(found.hashes.argsort()).select([0])) != []
