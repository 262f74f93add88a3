"""Laws of mixtures: shares at every place, every epoch whole, and the same batches for any number of workers."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer.mapping import from_mapping
from transformer.settings import Component, Data, SettingsError
from transformer.tokenizer import ByteTokenizer
from transformer.training import corpus, data, mixture
from transformer.training.examples import Shape
from transformer.training.mixture import Part, Turns

BYTES = ByteTokenizer()
SHAPE, BOTH = Shape(False, True, 264), Shape(True, True, 264, decoder_start=0)
SHARES = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60)
@given(SHARES, st.integers(0, 10**9))
def test_any_first_turns_hold_each_parts_share_and_all_its_own_in_order(shares, start):
    turns = Turns(shares, [None] * len(shares))
    near = [turns[place] for place in range(200)]
    for part, share in enumerate(shares):
        assert [number for chosen, number in near if chosen == part] == list(range(sum(p == part for p, _ in near)))
        assert abs(sum(p == part for p, _ in near) - 200 * share / sum(shares)) < len(shares)
    far = [turns[start + i] for i in range(50)]
    assert far == [turns[start + i] for i in range(50)]
    for part, share in enumerate(shares):
        numbers = [number for chosen, number in far if chosen == part]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        if numbers:
            assert abs(numbers[0] - start * share / sum(shares)) < 2 * len(shares) + start * 1e-7


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(0.05, 20), st.none() | st.integers(1, 40)), min_size=1, max_size=4))
def test_finite_parts_give_all_that_they_have_and_the_others_go_on(parts):
    shares, lengths = zip(*parts, strict=True)
    turns = Turns(shares, lengths)
    total = None if None in lengths else sum(lengths)
    assert total is None or len(turns) == total
    seen = [turns[place] for place in range(min(len(turns), 3000))]
    for part, length in enumerate(lengths):
        numbers = [number for chosen, number in seen if chosen == part]
        assert numbers == list(range(len(numbers))) and (length is None or len(numbers) <= length)
    for place, part in turns.ends:
        if place <= len(seen):
            given_before = sum(chosen == part for chosen, _ in seen[:place])
            assert given_before == lengths[part] and all(chosen != part for chosen, _ in seen[place:])
    assert {part for _, part in turns.ends} == {part for part, length in enumerate(lengths) if length}


@pytest.fixture(scope="module", autouse=True)
def small_window():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "WINDOW_TOKENS", 8 * 32)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Letters in long lines, digits in short ones, and capitals."""
    path, rng = tmp_path_factory.mktemp("mixture"), random.Random(0)
    for name, letters, lines, length in (("a", "abcde ", 60, 90), ("b", "0123456789", 90, 30), ("c", "XYZ", 40, 20)):
        texts = ["".join(rng.choices(letters, k=length)) + f"{letters[0]}{i:03}" for i in range(lines)]
        (path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def mixed(folder, *parts, **fields):
    given = tuple(Component(paths=(f"{folder}/{name}.jsonl",), **rest) for name, rest in parts)
    rows = dict(seq_len=32, batch_size=2, validation_fraction=0.2)
    return Data(source="mixture", mixture=given, **rows | fields)


def batches(given, steps=None, shape=SHAPE):
    iterator = data.train_iterator(given, BYTES, shape)
    try:
        return list(islice(iterator, steps))
    finally:
        iterator.close()


def documents_of(found):
    """The texts in batches, those whole that no row's border cuts."""
    return Counter(
        BYTES.decode(batch["targets"][row][batch["segment_ids"][row] == number])
        for batch in found
        for row in range(len(batch["targets"]))
        for number in range(1, batch["segment_ids"][row].max() + 1)
    )


def test_weights_are_shares_of_the_bytes(folder):
    given = mixed(folder, ("a", dict(weight=3)), ("b", dict(weight=1)), seq_len=64)
    text = "".join("".join(documents_of([batch]).elements()) for batch in batches(given, 120))
    digits = sum(ch.isdecimal() for ch in text) - 3 * text.count("a0")  # the numbers at the ends of letters
    assert 0.2 < digits / len(text) < 0.3


def test_every_epoch_of_a_finite_mixture_is_whole(folder):
    parts = ("a", dict(weight=1, epochs=2)), ("c", dict(weight=5, epochs=3))
    given = mixed(folder, *parts, seq_len=128, batch_size=1, objective="prefix")
    found = documents_of(batches(given))
    want = Counter()
    for part, component in zip(data.parts_of(given), given.components, strict=True):
        assert set(part.items) <= set(corpus.load(component))
        want.update(dict.fromkeys(part.items, part.epochs))
    assert found == want


def test_what_is_held_out_of_any_part_is_never_trained_on(folder):
    given = mixed(folder, ("a", dict(weight=1)), ("c", dict(weight=1)), seq_len=128, objective="prefix")
    held_out = data.held_out(given)
    texts = [held_out[i] for i in range(len(held_out))]
    alone = [text for component in given.components for text in data.held_out(component)]
    assert sorted(texts) == sorted(alone) and not set(documents_of(batches(given, 60))) & set(texts)
    first = texts[: len(texts) // 2]
    assert any("X" in text for text in first) and any("a" in text for text in first)


@pytest.mark.parametrize(
    "workers", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
)
def test_workers_change_neither_batches_nor_states(folder, workers):
    """With shuffling, a mixture whose part ends, and packing, from where another number of workers has left off."""
    parts = ("a", dict(weight=1)), ("b", dict(weight=2, epochs=1))
    alone, together = mixed(folder, *parts), mixed(folder, *parts, workers=workers)
    iterator, states, expected = data.train_iterator(alone, BYTES, SHAPE), [], []
    for _ in range(40):
        states.append(json.dumps(iterator.get_state()))
        expected.append(next(iterator))
    iterator.close()
    other = data.train_iterator(together, BYTES, SHAPE)
    try:
        for start, count in ((0, 40), (23, 5)):
            other.set_state(json.loads(states[start]))
            for step in range(start, start + count):
                assert json.dumps(other.get_state()) == states[step]
                np.testing.assert_equal(next(other), expected[step])
    finally:
        other.close()


@pytest.mark.slow
def test_workers_heed_no_signal_but_end_with_the_process_that_trains(folder):
    """However it ends: a killed one can't tell them to."""
    code = (
        "import multiprocessing, sys\n"
        "from transformer.settings import Data\n"
        "from transformer.tokenizer import ByteTokenizer\n"
        "from transformer.training import data\n"
        "from transformer.training.examples import Shape\n"
        f"given = Data(source='text', paths=({str(folder / 'a.jsonl')!r},), validation_fraction=0.2, workers=2)\n"
        "batches = data.train_iterator(given, ByteTokenizer(), Shape(False, True, 264))\n"
        "next(batches)\n"
        "print(*(child.pid for child in multiprocessing.active_children()), flush=True)\n"
        "for line in sys.stdin:\n"
        "    print(sum(next(batches)['tokens'].size for _ in range(300)), flush=True)\n"
    )
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        print("go on", file=process.stdin, flush=True)
        assert int(process.stdout.readline()) == 300 * 16 * 256
        assert len(pids) == 2 and all(os.path.exists(f"/proc/{pid}") for pid in pids)
        os.kill(process.pid, signal.SIGKILL)
    limit = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < limit, "workers outlive the process that started them"
        time.sleep(0.2)


@settings(deadline=None, max_examples=8)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=2, max_size=3),
    epochs=st.lists(st.sampled_from([None, 1, 2]), min_size=3, max_size=3),
    objective=st.sampled_from(["causal", "prefix"]),
    at=st.integers(0, 30),
)
def test_a_fresh_iterator_goes_on_from_any_state(folder, weights, epochs, objective, at):
    names = "abc"[: len(weights)]
    parts = [(n, dict(weight=w, epochs=e)) for n, w, e in zip(names, weights, epochs, strict=False)]
    given = mixed(folder, *parts, objective=objective, seed=at)
    iterator, states, expected = data.train_iterator(given, BYTES, SHAPE), [], []
    for _ in range(at + 6):
        states.append(json.dumps(iterator.get_state()))
        batch = next(iterator, None)
        if batch is None:
            break
        expected.append(batch)
    iterator.close()
    at = min(at, len(expected))
    fresh = data.train_iterator(given, BYTES, SHAPE)
    fresh.set_state(json.loads(states[at]))
    for batch in expected[at:]:
        np.testing.assert_equal(next(fresh), batch)
    fresh.close()


def test_made_pairs_mix_with_those_of_files(tmp_path):
    (tmp_path / "a.tsv").write_text("\n".join(f"question {i}\tanswer {i}" for i in range(60)))
    parts = dict(source="pairs", paths=[str(tmp_path / "a.tsv")], weight=1), dict(source="reversal", weight=1)
    values = dict(source="mixture", mixture=parts, objective="pairs", seq_len=48, batch_size=2, validation_fraction=0.2)
    given = from_mapping(Data, values, "data.")
    answers = documents_of(batches(given, 40, BOTH))
    assert any(text.startswith("answer") for text in answers) and any(text.isalpha() for text in answers)
    held_out = data.held_out(given)
    assert len(held_out) == sum(len(data.held_out(component)) for component in given.components)


def test_what_is_read_of_each_part_is_told(folder, caplog):
    given = mixed(folder, ("a", dict(weight=3)), ("b", dict(weight=1, epochs=2)))
    parts = data.parts_of(given)
    first, second = mixture.told(parts, ["one", "two"])
    assert first == f"one: 75.0% of the bytes, {len(parts[0].items)} items to train on"
    [(place, _)] = mixture.turns_of(parts).ends
    assert second.endswith(f"items to train on, 2 times: ends after {place:,} items of the mixture")
    assert Part(["x"], epochs=3).length == 3
    with caplog.at_level("INFO", "transformer"):
        batches(given, 1)
    assert f"data.mixture[1] ({folder}/b.jsonl): 25.0% of the bytes" in caplog.text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(source="mixture"), r"data.mixture=\(\): data.source=\"mixture\" needs components"),
        (dict(mixture=[dict(weight=1, paths=["x"])]), 'needs data.source="mixture"'),
        (dict(source="mixture", mixture=[dict(paths=["x"])]), r"data.mixture\[0\].weight: required"),
        (dict(source="mixture", mixture=[dict(weight=0, paths=["x"])]), "data.mixture.weight=0.0: use a positive"),
        (dict(source="mixture", mixture=[dict(weight=1, paths=["x"], epochs=0)]), "data.mixture.epochs=0: use 1"),
        (dict(source="mixture", mixture=[dict(weight=1)]), r"data.mixture\[0\]: data.paths=\(\): .*at least one path"),
        (
            dict(source="mixture", mixture=[dict(weight=1, source="sort")]),
            r"data.mixture\[0\]: data.objective='causal'",
        ),
        (
            dict(source="mixture", mixture=[dict(weight=1, source="mixture")]),
            r"data.mixture\[0\].source='mixture': use",
        ),
        (dict(source="mixture", mixture=[dict(weigth=1)]), r"data.mixture\[0\].weigth=1: .*did you mean .*weight"),
        (dict(source="mixture", text_field="x"), "data.text_field='x'|data.mixture"),
        (dict(text_field="body"), 'data.source="python_docs" has no use for it'),
        (dict(on_bad="skip"), "data.on_bad='skip': data.source=\"python_docs\" has no use"),
        (dict(source="numbers", objective="pairs", cache="x"), "data.cache='x'"),
        (dict(workers=-1), "data.workers=-1: use 0"),
        (dict(seed=-1), "data.seed=-1: use 0 or more"),
    ],
)
def test_bad_settings_are_named(values, message):
    with pytest.raises(SettingsError, match=message):
        from_mapping(Data, values, "data.")
