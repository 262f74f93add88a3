"""Laws of the data pipeline: nothing lost, nothing leaked, every state restorable."""

import dataclasses
import json
import random
from collections import Counter
from itertools import islice

import grain
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from transformer.settings import Data, SettingsError
from transformer.tokenizer import ByteTokenizer, load_tokenizer
from transformer.training import corpus, data, mixture, packing
from transformer.training.examples import Shape, record
from transformer.training.objectives import make_objective

KEYS = {"tokens", "targets", "target_bytes", "segment_ids", "positions", "weights"}
SHAPE = Shape(encoder=False, decoder=True, vocab_size=400)
WORDS = ["the", "a", "of", "cat", "dog", "naïve", "日本", "🙂", "runs", "sleeps", "under", "over", "table\n", "tree."]


@pytest.fixture(autouse=True)
def small_window(monkeypatch):
    monkeypatch.setattr(data, "WINDOW_TOKENS", 128 * 16)


@pytest.fixture(scope="module")
def texts():
    """Documents of 1 to 500 words; some end exactly at a row's border (15 + 1 tokens of the first, 32 …)."""
    rng = random.Random(0)
    long = [" ".join(rng.choices(WORDS, k=rng.choice([1, 3, 20, 100, 500]))) for _ in range(60)]
    return list(dict.fromkeys([*long, *("x" * (16 * k - 1) for k in range(1, 6))]))


@pytest.fixture(scope="module")
def settings(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i, text in enumerate(texts):
        (folder / f"{i:03}.txt").write_text(text, encoding="utf-8")
    return Data(source="text", paths=(f"{folder}/*.txt",), seq_len=16, batch_size=4, validation_fraction=0.3)


@pytest.fixture(scope="module")
def bpe(texts, tmp_path_factory):
    """A tokenizer with neither bos nor eos."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return load_tokenizer(path)


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request):
    return ByteTokenizer() if request.param == "bytes" else request.getfixturevalue("bpe")


def train(settings, tokenizer, steps, **kwargs):
    iterator = data.train_iterator(settings, tokenizer, SHAPE, **kwargs)
    batches = list(islice(iterator, steps))
    iterator.close()
    return batches


def causal(settings, tokenizer):
    return make_objective(settings, tokenizer, SHAPE)


def sides(settings):
    return corpus.split(corpus.load(settings), settings.validation_fraction)


def shuffled(documents, seed=1):
    return mixture.in_order([mixture.Part(documents)], [seed])


def triples(batches):
    """Counts of (token, target, target's bytes) where there is weight."""
    counts = Counter()
    for batch in batches:
        real = batch["weights"] > 0
        counts.update(zip(*(batch[key][real].tolist() for key in ("tokens", "targets", "target_bytes")), strict=True))
    return counts


def expected(documents, tokenizer):
    """The same counts from the documents, without any packing."""
    counts = Counter()
    for text in documents:
        ids, sizes = tokenizer.encode_with_bytes(text)
        ids, sizes = ids.tolist(), sizes.tolist()
        if tokenizer.bos_id is not None:
            ids, sizes = [tokenizer.bos_id, *ids], [0, *sizes]
        if tokenizer.eos_id is not None:
            ids, sizes = [*ids, tokenizer.eos_id], [*sizes, 0]
        counts.update(zip(ids[:-1], ids[1:], sizes[1:], strict=True))
    return counts


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys() == KEYS
        for key in KEYS:
            assert a[key].dtype == b[key].dtype
            np.testing.assert_array_equal(a[key], b[key], err_msg=key)


def segments(batch):
    for row in range(len(batch["tokens"])):
        for segment in range(1, batch["segment_ids"][row].max() + 1):
            chosen = batch["segment_ids"][row] == segment
            yield {key: batch[key][row][chosen] for key in KEYS}


def test_validation_holds_every_pair_once(settings, tokenizer):
    _, documents = sides(settings)
    batches = data.validation_batches(settings, tokenizer, SHAPE, 10_000)
    assert triples(batches) == expected(documents, tokenizer)
    assert sum(batch["weights"].sum() == 4 * 16 for batch in batches) >= len(batches) - 1


def test_every_epoch_holds_every_pair_once_in_an_order_of_its_own(settings, tokenizer):
    documents, _ = sides(settings)
    records = np.concatenate([record(text, tokenizer) for text in documents])
    rows = islice(iter(packing.pack(shuffled(documents, 5), causal(settings, tokenizer))), len(records) * 3 // 16 + 1)
    stream = np.concatenate([row["columns"] for row in rows])
    epochs = [stream[len(records) * i : len(records) * (i + 1)] for i in range(3)]
    for epoch in epochs:
        assert Counter(map(tuple, epoch[:, :3].tolist())) == expected(documents, tokenizer)
    assert len({order.tobytes() for order in [records, *epochs]}) == 4


def test_the_window_only_reorders_rows(settings, tokenizer, monkeypatch):
    results = []
    for rows in (64, 128):
        monkeypatch.setattr(data, "WINDOW_TOKENS", rows * 16)
        results.append([row for batch in train(settings, tokenizer, 32) for row in np.stack(list(batch.values()), 1)])
    small, large = ([row.tobytes() for row in rows] for rows in results)
    assert small != large and sorted(small) == sorted(large)


def test_packed_rows_are_full_but_the_last(settings, tokenizer):
    documents, _ = sides(settings)
    *full, last = packing.pack(grain.MapDataset.source(documents), causal(settings, tokenizer))
    assert all(row["columns_segment_ids"].all() for row in full)
    total = expected(documents, tokenizer).total()
    assert len(full) == (total - 1) // 16 and np.count_nonzero(last["columns_segment_ids"]) == (total - 1) % 16 + 1


def test_segments_are_pieces_of_one_document(settings, tokenizer):
    documents, _ = sides(settings)
    records = [record(text, tokenizer) for text in documents]
    pieces = {r[i : i + n].tobytes() for r in records for n in range(1, 17) for i in range(len(r) - n + 1)}
    for batch in train(settings, tokenizer, 30):
        for segment in segments(batch):
            columns = np.stack(
                [segment["tokens"], segment["targets"], segment["target_bytes"], segment["weights"].astype(np.int32)],
                axis=1,
            )
            assert columns.tobytes() in pieces
            assert segment["positions"].tolist() == list(range(len(columns)))
            np.testing.assert_array_equal(segment["tokens"][1:], segment["targets"][:-1])


@pytest.mark.parametrize("make", [lambda s, t: train(s, t, 20), lambda s, t: data.validation_batches(s, t, SHAPE, 100)])
def test_shapes_dtypes_and_padding(settings, tokenizer, make):
    for batch in make(settings, tokenizer):
        assert batch.keys() == KEYS
        for key, value in batch.items():
            assert value.shape == (4, 16) and value.flags.c_contiguous
            assert value.dtype == (np.float32 if key == "weights" else np.int32)
        padding = batch["segment_ids"] == 0
        np.testing.assert_array_equal(batch["weights"], ~padding)
        np.testing.assert_array_equal(batch["positions"] == -1, padding)
        assert not batch["target_bytes"][padding].any() and not batch["tokens"][padding].any()
        steps = np.diff(batch["segment_ids"], axis=1)
        assert (batch["segment_ids"][:, 0] == 1)[~padding[:, 0]].all()
        assert ((steps == 0) | (steps == 1) | (batch["segment_ids"][:, 1:] == 0)).all()
        real = batch["segment_ids"][batch["segment_ids"].any(axis=1)]
        assert ((np.diff(real) >= 0) | (real[:, 1:] == 0)).all()


def test_target_bytes_count_the_text(settings, bpe):
    _, documents = sides(settings)
    total = sum(len(text.encode()) for text in documents)
    count = sum(
        int(batch["target_bytes"].sum()) for batch in data.validation_batches(settings, ByteTokenizer(), SHAPE, 9999)
    )
    assert count == total
    # Without bos the first token of a document is nobody's target.
    firsts = sum(int(bpe.encode_with_bytes(text)[1][0]) for text in documents)
    count = sum(int(batch["target_bytes"].sum()) for batch in data.validation_batches(settings, bpe, SHAPE, 9999))
    assert count == total - firsts


def test_state_restores_bit_exactly_everywhere(settings, tokenizer):
    iterator = data.train_iterator(settings, tokenizer, SHAPE)
    states, batches = [], []
    for _ in range(60):
        assert json.loads(json.dumps(iterator.get_state())) == iterator.get_state()
        states.append(json.dumps(iterator.get_state()))
        batches.append(next(iterator))
    other = data.train_iterator(settings, tokenizer, SHAPE)
    for at in (0, 1, 2, 3, 17, 42, 5, *range(20, 50, 4)):
        other.set_state(json.loads(states[at]))
        assert json.dumps(other.get_state()) == states[at]
        assert_same(list(islice(other, 8)), batches[at : at + 8])
    iterator.set_state(json.loads(states[30]))  # back in time, with batches already prefetched
    assert_same(list(islice(iterator, 5)), batches[30:35])
    iterator.close()
    other.close()


def test_packer_restores_at_every_row(settings, tokenizer):
    documents, _ = sides(settings)
    iterator = iter(packing.pack(shuffled(documents), causal(settings, tokenizer)))
    states, rows = [], []
    for _ in range(100):
        states.append(json.dumps(iterator.get_state()))
        rows.append(next(iterator))
    other = iter(packing.pack(shuffled(documents), causal(settings, tokenizer)))
    for state, row in zip(states, rows, strict=True):
        other.set_state(json.loads(state))
        np.testing.assert_equal(next(other), row)


@pytest.mark.parametrize("process_count", [2, 4])
def test_processes_share_out_the_global_batch(settings, tokenizer, process_count):
    def joined(make):
        parts = [make(rows=np.arange(4).reshape(process_count, -1)[p]) for p in range(process_count)]
        assert all(batch["tokens"].shape == (4 // process_count, 16) for part in parts for batch in part)
        return [{key: np.concatenate([b[key] for b in group]) for key in KEYS} for group in zip(*parts, strict=True)]

    assert_same(joined(lambda **k: train(settings, tokenizer, 10, **k)), train(settings, tokenizer, 10))
    whole = data.validation_batches(settings, tokenizer, SHAPE, 9999)
    assert_same(joined(lambda **k: data.validation_batches(settings, tokenizer, SHAPE, 9999, **k)), whole)


def test_processes_read_different_rows(settings, tokenizer):
    one, two = (train(settings, tokenizer, 10, rows=rows) for rows in ([0, 3], [1, 2]))
    rows = [{row.tobytes() for batch in side for row in batch["targets"] if len(set(row)) > 3} for side in (one, two)]
    assert rows[0] and not rows[0] & rows[1]


def test_seeds_differ_and_runs_agree(settings, tokenizer):
    first = train(settings, tokenizer, 10)
    assert_same(first, train(settings, tokenizer, 10))
    other = train(dataclasses.replace(settings, seed=1), tokenizer, 10)
    assert sum(np.array_equal(a["tokens"], b["tokens"]) for a, b in zip(first, other, strict=True)) == 0


def test_validation_is_fixed_bounded_and_spread(settings, tokenizer):
    few = data.validation_batches(settings, tokenizer, SHAPE, 3)
    assert len(few) == 3
    assert_same(few, data.validation_batches(dataclasses.replace(settings, seed=9), tokenizer, SHAPE, 3))
    everything = triples(data.validation_batches(settings, tokenizer, SHAPE, 9999))
    assert triples(few) <= everything
    one = dataclasses.replace(settings, batch_size=4096)
    assert len(data.validation_batches(one, tokenizer, SHAPE, 8)) == 1


def test_validation_text_is_never_trained_on(settings):
    tokenizer = ByteTokenizer()
    documents, held_out = sides(settings)
    assert not set(documents) & set(held_out) and len(documents) + len(held_out) == len(corpus.load(settings))
    allowed = expected(documents, tokenizer)
    assert not triples(train(settings, tokenizer, 50)).keys() - allowed.keys()


def test_bad_input_is_named(settings, bpe):
    with pytest.raises(SettingsError, match="one token"):
        packing.check_usable(["a", "b"], causal(settings, bpe))
    data.check_vocabulary(ByteTokenizer(), 259)
    with pytest.raises(SettingsError, match=r"model.vocab_size=258.*data.tokenizer.*model.vocab_size=259"):
        data.check_vocabulary(ByteTokenizer(), 258)
