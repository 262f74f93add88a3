"""Laws of pairs: generated answers are right by another way, files are read exactly, validation is never trained on."""

import datetime
import json
import re

import pytest

from transformer.settings import Data, SettingsError
from transformer.training import pairs, tasks

UNITS = {name: n for n, name in enumerate(tasks._ONES)} | {name: 20 + 10 * n for n, name in enumerate(tasks._TENS)}


def made(source: str, **fields) -> Data:
    return Data(source=source, objective="pairs", **fields)


def value(words: str) -> int:
    """The number that English words name."""
    total = part = 0
    for word in re.split("[ -]", words):
        if word == "thousand":
            total, part = 1000 * part, 0
        elif word == "hundred":
            part *= 100
        else:
            part += UNITS[word]
    return total + part


def test_number_words_name_the_number():
    assert tasks.words(0) == "zero" and tasks.words(21_013) == "twenty-one thousand thirteen"
    assert tasks.words(700_340) == "seven hundred thousand three hundred forty"
    numbers = [*range(1100), *range(1100, 1_000_000, 997), 999_999]
    assert [value(tasks.words(n)) for n in numbers] == numbers
    assert len({tasks.words(n) for n in numbers}) == len(numbers)


def test_dates_can_be_read_back():
    patterns = (
        "%B %d, %Y",
        "%d %B %Y",
        "%b %d, %Y",
        "%A, %B %d, %Y",
        "%B %d, %Y",
        "the %d of %B %Y",
        "%m/%d/%Y",
        "%d.%m.%Y",
    )
    task = tasks.TASKS["dates"]
    assert task.members == len(patterns)
    for group in range(0, task.groups, 29):
        for member, pattern in enumerate(patterns):
            source, target = task.pair(group, member)
            plain = re.sub(r"(\d)(st|nd|rd|th)\b", r"\1", source)
            assert datetime.datetime.strptime(plain, pattern).date() == datetime.date.fromisoformat(target)
    assert tasks.written(datetime.date(1998, 3, 5), 0) == "March 5, 1998"
    ordinals = [
        tasks.written(datetime.date(2000, 1, day), 4).split()[1] for day in (1, 2, 3, 4, 11, 12, 13, 21, 22, 23, 31)
    ]
    assert ordinals == ["1st,", "2nd,", "3rd,", "4th,", "11th,", "12th,", "13th,", "21st,", "22nd,", "23rd,", "31st,"]


def test_strings_are_reversed_and_sorted():
    for source, answer in (("reversal", lambda s: s[::-1]), ("sort", lambda s: "".join(sorted(s)))):
        listed = pairs.pairs(made(source), "validation")
        assert all(target == answer(text) for text, target in listed)
        assert {len(text) for text, _ in listed} == set(range(2, 21))


@pytest.mark.parametrize("source", ["numbers", "dates", "reversal", "sort"])
def test_what_validation_asks_is_never_trained_on(source):
    train, held_out = pairs.sides(made(source))
    total = len(train) + len(held_out)
    assert total == tasks.TASKS[source].groups * tasks.TASKS[source].members
    assert abs(len(held_out) / total - 0.05) < 0.005
    asked = {held_out[i][0] for i in range(0, len(held_out), 7)}
    answered = {held_out[i][1] for i in range(0, len(held_out), 7)} if source == "dates" else set()
    for i in range(0, len(train), 11):
        text, target = train[i]
        assert text not in asked and target not in answered
    assert [held_out[i] for i in range(9)] == pairs.pairs(made(source), "validation")[:9]


def test_directions_keep_to_their_side():
    forward = pairs.pairs(made("numbers"), "validation")
    assert pairs.pairs(made("numbers", direction="backward"), "validation") == [(b, a) for a, b in forward]
    both = pairs.pairs(made("numbers", direction="both"), "validation")
    assert both == [pair for a, b in forward for pair in ((a, b), (b, a))]


def test_files_are_read_exactly(tmp_path):
    (tmp_path / "a.tsv").write_bytes(b"one \tun\r\ntwo\tdeux\n\none \tun\n")
    lines = [{"source": "a\tb\u2028c", "target": "ü"}, {"source": "two", "target": "zwei", "id": 3}]
    (tmp_path / "b.jsonl").write_text(
        "\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8"
    )
    given = made("pairs", paths=(str(tmp_path / "*"),), validation_fraction=0.5)
    everything = [("one ", "un"), ("two", "deux"), ("a\tb\u2028c", "ü"), ("two", "zwei")]
    train, held_out = pairs.pairs(given, "train"), pairs.pairs(given, "validation")
    assert sorted(train + held_out) == sorted(everything)
    assert not {a for a, _ in train} & {a for a, _ in held_out}
    swapped = made("pairs", paths=given.paths, validation_fraction=0.5, direction="backward")
    assert sorted(pairs.pairs(swapped, "train") + pairs.pairs(swapped, "validation")) == sorted(
        (b, a) for a, b in everything
    )


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_one_question_with_several_answers_lies_on_one_side(tmp_path, direction):
    (tmp_path / "a.tsv").write_text("\n".join(f"s{i % 20}\tt{i // 5}" for i in range(100)))
    given = made("pairs", paths=(str(tmp_path / "a.tsv"),), validation_fraction=0.5, direction=direction)
    train, held_out = pairs.pairs(given, "train"), pairs.pairs(given, "validation")
    assert len(train) + len(held_out) == 100
    assert not {asked for asked, _ in train} & {asked for asked, _ in held_out}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "one\tun\ntwo\n", "a.tsv, line 2: expected source<tab>target; mend it, or leave out"),
        ("a.tsv", "one\t \n", "a.tsv, line 1: source or target is empty"),
        ("a.tsv", "a\tb\tc\n", "a.tsv, line 1"),
        ("a.jsonl", '{"source": "a"}\n', "a.jsonl, line 1: no field 'target' \\(it has 'source'\\);"),
        ("a.jsonl", '["a", "b"]\n', "a.jsonl, line 1"),
        ("a.jsonl", "a\tb\n", "a.jsonl, line 1"),
        ("a.csv", "a,b\n", "a.csv is of no format that holds pairs; use .tsv"),
        ("a.tsv", "\n", "the files hold no pairs"),
        ("a.tsv", "a\tb\n", "data.validation_fraction=0.05: no validation pair among 1|no training pair among 1"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(SettingsError, match=message):
        pairs.sides(made("pairs", paths=(str(tmp_path / name),)))
