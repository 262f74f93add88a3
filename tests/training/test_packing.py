"""Laws of rows of whole examples: none split, lost or doubled, two sides in step, every state restorable."""

import json
import logging
from itertools import islice

import numpy as np
import pytest

from transformer.settings import Data, SettingsError
from transformer.tokenizer import ByteTokenizer
from transformer.training import data, packing, pairs
from transformer.training.examples import Shape
from transformer.training.objectives import make_objective

BYTES = ByteTokenizer()
ENCODER, DECODER, BOTH = Shape(True, False, 264), Shape(False, True, 264), Shape(True, True, 264, decoder_start=0)
TARGET = {"tokens", "targets", "target_bytes", "segment_ids", "positions", "weights"}
SOURCE = {"source_tokens", "source_segment_ids", "source_positions"}
CASES = {
    "masked": (ENCODER, dict(objective="masked", whole_word=True), TARGET),
    "spans": (BOTH, dict(objective="spans"), TARGET | SOURCE),
    "prefix": (DECODER, dict(objective="prefix"), TARGET | {"orders"}),
    "prefix of two sides": (BOTH, dict(objective="prefix", target_len=24), TARGET | SOURCE),
    "pairs": (BOTH, dict(objective="pairs"), TARGET | SOURCE),
    "pairs in one row": (DECODER, dict(objective="pairs"), TARGET | {"orders"}),
}


@pytest.fixture(autouse=True)
def small_window(monkeypatch):
    monkeypatch.setattr(data, "WINDOW_TOKENS", 12 * 40)
    monkeypatch.setattr(packing, "BINS", 6)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Documents, and pairs of 2 to 60 letters."""
    folder, rng = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)

    def letters(most):
        return "".join(rng.choice(list("abcdefgh é"), rng.integers(2, most))).strip() or "a"

    for i in range(40):
        (folder / f"{i}.txt").write_text(letters(300) + str(i), encoding="utf-8")
    listed = [(letters(30) + str(i), letters(30)) for i in range(300)]
    (folder / "pairs.tsv").write_text("\n".join("\t".join(pair) for pair in listed), encoding="utf-8")
    return folder


@pytest.fixture(params=CASES)
def case(request, files):
    shape, fields, keys = CASES[request.param]
    source, name = ("pairs", "pairs.tsv") if fields["objective"] == "pairs" else ("text", "*.txt")
    where = dict(source=source, paths=(str(files / name),), seq_len=40, batch_size=4, validation_fraction=0.3)
    return Data(**where, **fields), shape, keys


def train(settings, shape, steps, **kwargs):
    iterator = data.train_iterator(settings, BYTES, shape, **kwargs)
    batches = list(islice(iterator, steps))
    iterator.close()
    return batches


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        np.testing.assert_equal(a, b)


def test_batches_have_the_shapes_and_keys_that_the_step_reads(case):
    settings, shape, keys = case
    lengths = make_objective(settings, BYTES, shape).lengths
    fill = []
    for batch in train(settings, shape, 20) + data.validation_batches(settings, BYTES, shape, 50):
        assert batch.keys() == keys
        for name, value in batch.items():
            assert value.shape == (4, lengths["source" if name.startswith("source") else "columns"])
            assert value.dtype == (np.float32 if name == "weights" else np.int32) and value.flags.c_contiguous
        padding = batch["segment_ids"] == 0
        fill.append(~padding)
        np.testing.assert_array_equal(batch["positions"] == -1, padding)
        assert not batch["weights"][padding].any() and not batch["target_bytes"][batch["weights"] == 0].any()
        if "orders" in batch:
            np.testing.assert_array_equal(batch["orders"] == -1, padding)
            assert (batch["orders"] >= batch["positions"]).all()
        if "source_tokens" in batch:
            np.testing.assert_array_equal(batch["source_positions"] == -1, batch["source_segment_ids"] == 0)
            assert (batch["segment_ids"].max(axis=1) == batch["source_segment_ids"].max(axis=1)).all()
    assert np.mean(fill[:20]) > 0.5


def segments(batches, side=""):
    """Each segment's tokens and targets, by its row and number."""
    for batch in batches:
        for row, ids in enumerate(batch[f"{side}segment_ids"]):
            for number in range(1, ids.max() + 1):
                chosen = ids == number
                assert batch[f"{side}positions"][row][chosen].tolist() == list(range(chosen.sum()))
                yield {
                    name: batch[name][row][chosen]
                    for name in batch
                    if batch[name].shape == batch[f"{side}tokens"].shape
                }


def test_validation_holds_every_example_once_and_whole(case):
    settings, shape, keys = case
    objective = make_objective(settings, BYTES, shape)
    pieces = [piece for item in data.held_out(settings) for piece in objective.pieces(item)]
    batches = data.validation_batches(settings, BYTES, shape, 1000)
    if settings.objective == "pairs":
        want = sorted(piece["columns"][:, 1].tobytes() for piece in pieces)
    elif settings.objective == "masked":
        want = sorted(objective.example(piece, np.random.default_rng(0))["columns"][:, 1].tobytes() for piece in pieces)
    elif keys >= SOURCE:  # what is hidden is drawn anew, so that only the number is known
        assert len(list(segments(batches))) == len(list(segments(batches, "source_"))) == len(pieces)
        return
    else:
        want = sorted(piece[:, 1].astype(np.int32).tobytes() for piece in pieces)
    assert sorted(segment["targets"].tobytes() for segment in segments(batches)) == want


def test_state_restores_bit_exactly_everywhere(case):
    settings, shape, _ = case
    iterator = data.train_iterator(settings, BYTES, shape)
    states, batches = [], []
    for _ in range(30):
        states.append(json.dumps(iterator.get_state()))
        batches.append(next(iterator))
    other = data.train_iterator(settings, BYTES, shape)
    for at in (0, 1, 3, 17, 26, 5):
        other.set_state(json.loads(states[at]))
        assert json.dumps(other.get_state()) == states[at]
        assert_same(list(islice(other, 4)), batches[at : at + 4])
    iterator.close()
    other.close()


def test_processes_share_out_the_global_batch(case):
    settings, shape, _ = case

    def joined(make):
        parts = [make(rows=rows) for rows in ([0, 1], [2, 3])]
        return [{k: np.concatenate([b[k] for b in group]) for k in group[0]} for group in zip(*parts, strict=True)]

    assert_same(joined(lambda **k: train(settings, shape, 8, **k)), train(settings, shape, 8))
    whole = data.validation_batches(settings, BYTES, shape, 9)
    assert_same(joined(lambda **k: data.validation_batches(settings, BYTES, shape, 9, **k)), whole)


def test_runs_agree_and_seeds_differ(case):
    settings, shape, _ = case
    first = train(settings, shape, 6)
    assert_same(first, train(settings, shape, 6))
    other = train(Data(**{**settings.__dict__, "seed": 1}), shape, 6)
    assert not any(np.array_equal(a["targets"], b["targets"]) for a, b in zip(first, other, strict=True))


def test_pairs_too_long_are_left_out_and_counted(files, caplog):
    settings = Data(
        source="pairs", objective="pairs", paths=(str(files / "pairs.tsv"),), seq_len=20, batch_size=2,
        validation_fraction=0.3,
    )  # fmt: skip
    listed = pairs.pairs(settings, "train")
    long = sum(len(a.encode()) > 19 or len(b.encode()) > 19 for a, b in listed)
    assert 0 < long < len(listed)
    with caplog.at_level(logging.WARNING, "transformer"):
        seen = train(settings, BOTH, 100)
    [line] = [r.getMessage() for r in caplog.records]
    assert line == f"data: {long} of {len(listed)} pairs don't fit into rows of 20 and 20 tokens and are left out"
    got = {BYTES.decode(segment["targets"]) for segment in segments(seen)}
    assert got == {b for a, b in listed if len(a.encode()) <= 19 and len(b.encode()) <= 19}
    with pytest.raises(SettingsError, match=r"data.seq_len=2, data.target_len=2: none of \d+ texts gives an example"):
        train(Data(**{**settings.__dict__, "seq_len": 2}), BOTH, 1)
    with pytest.raises(SettingsError, match=r"data.seq_len=20, data.target_len=2: none of"):
        train(Data(**{**settings.__dict__, "target_len": 2}), BOTH, 1)
