"""The commands that train a tokenizer and show what one makes of texts and rows."""

import dataclasses
import json

import numpy as np
import pytest

from transformer import tokenize
from transformer.settings import Data
from transformer.tokenizer import ByteTokenizer, load_tokenizer
from transformer.training import data


@pytest.fixture(autouse=True)
def small_window(monkeypatch):
    monkeypatch.setattr(data, "WINDOW_TOKENS", 8 * 64)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """The overrides of a config that name a small corpus."""
    path = tmp_path_factory.mktemp("texts") / "a.jsonl"
    texts = [f"the cat number {i} sat on the mat of cats, naïve 日本 {i * i}" for i in range(80)]
    path.write_text("\n".join(json.dumps({"body": text}) for text in texts))
    values = dict(source="text", paths=f"('{path}',)", text_field="body", seq_len=64, validation_fraction=0.2)
    return [f"--config.data.{name}={value}" for name, value in values.items()]


def test_a_trained_tokenizer_has_its_tokens_and_is_shorter_than_bytes(flags, tmp_path, capsys):
    command = ["train", "--output", str(tmp_path), "--vocab-size", "300", "--mask", "--sentinels", "2", *flags]
    assert tokenize.main([*command, "--special", "<tool>"]) == 0
    made = load_tokenizer(tmp_path)
    assert (made.pad_id, made.bos_id, made.eos_id, made.mask_id, made.sentinel_ids) == (0, 1, 2, 3, (4, 5))
    assert made.vocab_size == 300 and sorted(file.name for file in tmp_path.iterdir()) == [
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    text = "the cats sat 日本 🙂\n\n  anew"
    assert made.decode(made.encode(text)) == text and len(made.encode("the cat sat")) < 8
    assert made.text_ids.min() == 7
    told = capsys.readouterr().out
    assert "300 tokens" in told and "--config.model.vocab_size=300" in told
    assert tokenize.main([*command, "--special", "<tool>"]) == 0  # again, the same file
    assert load_tokenizer(tmp_path).identity == made.identity


def test_held_out_text_is_not_trained_on(flags, tmp_path):
    seen = []
    make = tokenize.data.parts_of

    def watched(settings):
        parts = make(settings)
        return [dataclasses.replace(part, items=Watched(part.items)) for part in parts]

    class Watched:
        def __init__(self, items):
            self._items = items

        def __len__(self):
            return len(self._items)

        def __getitem__(self, place):
            seen.append(self._items[place])
            return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize.data, "parts_of", watched)
        assert tokenize.main(["train", "--output", str(tmp_path), "--vocab-size", "280", *flags]) == 0
    settings = Data(
        source="text", paths=(flags[1].split("'")[1],), text_field="body", seq_len=64, validation_fraction=0.2
    )
    held_out = set(data.held_out(settings))
    assert seen and held_out and not held_out & set(seen)


def test_a_texts_tokens_are_shown(capsys):
    assert tokenize.main(["inspect", "aé"]) == 0
    told = capsys.readouterr().out
    assert "100" in told and "'a'" in told and "c3" in told and "a9" in told
    assert "3 tokens, 1.00 bytes a token" in told


def test_rows_are_drawn_with_their_figures(flags, capsys):
    assert tokenize.main(["inspect", "--rows", "3", *flags]) == 0
    told = capsys.readouterr().out
    assert told.count("█") + told.count("▓") > 100
    assert "padding" in told and "0.0%" in told and "bytes a token" in told and "1.00" in told
    assert "100.0% of a row" in told
    assert tokenize.main(["inspect", "--config", "t5:tiny", *flags, "--config.data.seq_len=96"]) == 0
    told = capsys.readouterr().out
    assert "the encoder's rows" in told and "·" in told


def test_a_bar_shows_each_example_and_the_padding():
    assert tokenize.bar(np.array([1, 1, 2, 2, 3, 0, 0, 0]), 8).plain == "██▓▓█···"
    table = tokenize.table_of(ByteTokenizer(), "日")
    assert table.row_count == 3


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["train", "--output", "x", "--vocab-size", "100"], "--vocab-size=100: 3 special tokens and 256 bytes need"),
        (["train", "--output", "/dev/null/x", "--vocab-size", "300"], "--output='/dev/null/x': can't be written"),
        (["train", "--output", "x", "--vocab-size", "999", "--special", "<s>"], "--special=['<s>']: name each"),
        (["inspect", "--rows", "0"], "--rows=0: draw at least 1"),
        (["inspect", "--config.model.vocab_size=100"], "model.vocab_size=100: data.tokenizer has ids up to 258"),
        (["inspect", "--config.data.tokenizer=none.json", "x"], "data.tokenizer='none.json': can't be read"),
        (["inspect", "--config.data.source=text"], 'data.paths=(): data.source="text" needs at least one path'),
    ],
)
def test_mistakes_are_one_line(flags, command, message, capsys):
    assert tokenize.main(command if "source=text" in command[-1] else [*command, *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
