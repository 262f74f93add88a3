"""Laws of the objectives: what is hidden, what is scored, and that what was hidden can be told from what is scored."""

from itertools import islice

import grain
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from transformer.settings import Data, SettingsError
from transformer.tokenizer import ByteTokenizer, load_tokenizer
from transformer.training import packing
from transformer.training.denoising import composition, word_numbers
from transformer.training.examples import Shape
from transformer.training.objectives import make_objective

BYTES = ByteTokenizer()
ENCODER, DECODER = Shape(True, False, 400), Shape(False, True, 400)
BOTH = Shape(True, True, 400, decoder_start=0)
WORDS = [
    "the", "a", "of", "cat", "dog", "naïve", "日本", "🙂", "runs", "sleeps", "under", "over", "table", "tree", "don't",
    "42",
]  # fmt: skip
RNG = np.random.default_rng


def text(seed: int, words: int) -> str:
    return " ".join(RNG(seed).choice(WORDS, words))


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory):
    """A tokenizer as of BERT: words, pieces of words, and its five special tokens."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = sorted({c for word in WORDS for c in word})
    vocabulary = [*specials, *letters, *(f"##{c}" for c in letters), "the", "cat", "##eeps", "ta", "##ble"]
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece({token: i for i, token in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False, lowercase=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    tokenizer.add_special_tokens(specials)
    path = tmp_path_factory.mktemp("wordpiece") / "tokenizer.json"
    tokenizer.save(str(path))
    return load_tokenizer(path)


def examples(objective, texts, seed=0):
    rng = RNG(seed)
    return [(piece, objective.example(piece, rng)) for item in texts for piece in objective.pieces(item)]


def masked(tokenizer=BYTES, **fields):
    return make_objective(Data(objective="masked", seq_len=128, **fields), tokenizer, ENCODER)


@pytest.mark.parametrize("whole_word", [False, True])
def test_masked_hides_the_share_it_should_in_three_ways(wordpiece, whole_word):
    objective, texts = masked(wordpiece, whole_word=whole_word), [text(i, 300) for i in range(60)]
    columns = np.concatenate([example["columns"] for _, example in examples(objective, texts)])
    read, target, _, weight = columns.T
    special = np.isin(target, [wordpiece.cls_id, wordpiece.sep_id])
    assert not weight[special].any() and set(weight.tolist()) == {0, 1}
    np.testing.assert_array_equal(read[weight == 0], target[weight == 0])
    assert abs(weight.sum() / (~special).sum() - 0.15) < 0.005
    picked = weight == 1
    hidden, kept = (read == wordpiece.mask_id)[picked], (read == target)[picked]
    assert abs(hidden.mean() - 0.8) < 0.015
    # A random token is the right one by chance, too.
    assert abs(kept.mean() - 0.1 - 0.1 / len(wordpiece.text_ids)) < 0.015
    swapped = read[picked][~hidden & ~kept]
    assert np.isin(swapped, wordpiece.text_ids).all() and len(np.unique(swapped)) > len(wordpiece.text_ids) / 2


def test_masked_pieces_make_the_document_between_cls_and_sep():
    objective, document = masked(), text(1, 200)
    made = [example["columns"] for _, example in examples(objective, [document])]
    assert b"".join(bytes((c[1:-1, 1] - 3).tolist()) for c in made).decode() == document
    for columns in made:
        assert columns[0, :2].tolist() == [BYTES.cls_id] * 2 and columns[-1, :2].tolist() == [BYTES.sep_id] * 2
        np.testing.assert_array_equal(columns[1:-1, 2], columns[1:-1, 3])  # a byte each, where it is scored
        assert not columns[[0, -1], 2:].any()
    assert all(len(columns) == 128 for columns in made[:-1])


def test_special_tokens_in_a_text_are_never_picked(wordpiece):
    objective = masked(wordpiece, noise_density=0.99)
    for _, example in examples(objective, ["the cat [SEP] the [MASK] cat"] * 20):
        _, target, _, weight = example["columns"].T
        assert not weight[~np.isin(target, wordpiece.text_ids)].any() and weight.any()


@pytest.mark.parametrize("kind", ["bytes", "wordpiece"])
def test_whole_words_are_hidden_whole(wordpiece, kind):
    tokenizer = BYTES if kind == "bytes" else wordpiece
    objective = masked(tokenizer, whole_word=True)
    texts, split = [text(i, 50) for i in range(30)], 0
    numbers = [word_numbers(item, tokenizer.encode_with_bytes(item)[1]) for item in texts]
    made = examples(objective, texts)
    np.testing.assert_array_equal(np.concatenate([piece[:, 2] for piece, _ in made]), np.concatenate(numbers))
    for piece, example in made:
        weight, words = example["columns"][1:-1, 3], piece[:, 2]
        for word in np.unique(words):
            assert len(set(weight[words == word].tolist())) == 1
            split += (words == word).sum() > 1
    assert split > 100


def test_words_begin_at_spaces_signs_and_ideographs():
    sentence = " Don't, naïve 日本a_1 "
    numbers = word_numbers(sentence, BYTES.encode_with_bytes(sentence)[1])
    groups = [bytes(np.frombuffer(sentence.encode(), np.uint8)[numbers == n]).decode() for n in range(max(numbers) + 1)]
    assert groups == [" Don", "'", "t", ",", " naïve", " 日", "本", "a_1", " "]
    # Three tokens of one character, of which the first has all the bytes.
    assert word_numbers("a 🙂", np.array([1, 5, 0, 0])).tolist() == [0, 1, 1, 1]


def joined(source: list[int], target: list[int], sentinels: list[int]) -> list[int]:
    """The text of a source and a target, with sentinels replaced by what the target says of them."""
    said, current = {}, None
    for token in target:
        if token in sentinels:
            current = said.setdefault(token, [])
        else:
            current.append(token)
    return [t for token in source for t in (said.pop(token) if token in sentinels else [token])]


@pytest.mark.parametrize("vocab_size", [261, 264, 400])
def test_spans_source_and_target_make_the_text(vocab_size):
    shape = Shape(True, True, vocab_size, decoder_start=0)
    objective = make_objective(Data(objective="spans", seq_len=128), BYTES, shape)
    documents = [text(i, 150) for i in range(40)] + ["xy"]
    sentinels = [i for i in BYTES.sentinel_ids if i < vocab_size]
    hidden_share, spans, whole = [], [], []
    for piece, example in examples(objective, documents):
        read, target, sizes, weight = example["columns"].T.tolist()
        source = example["source"].tolist()
        assert source[-1] == target[-1] == BYTES.eos_id and weight == [1] * len(target)
        assert read == [shape.decoder_start, *target[:-1]]
        used = [t for t in source if t in sentinels]
        assert used == [t for t in target if t in sentinels] == sentinels[: len(used)] and used
        assert joined(source[:-1], target[:-1], sentinels) == piece[:, 0].tolist()
        assert sum(sizes) == len(target) - len(used) - 1
        if len(piece) == objective.piece:
            hidden_share.append(sum(sizes) / len(piece))
            spans.append(len(used))
            whole.append((len(source), len(target)))
    assert set(whole) == {(objective.lengths["source"], objective.lengths["columns"])}
    assert abs(np.mean(hidden_share) - 0.15) < 0.01
    assert set(spans) == {min(len(sentinels), round(0.15 * objective.piece / 3))}


def test_spans_rows_are_as_long_as_in_the_paper():
    """T5 pre-trains on 512 tokens of source and 114 of target, which 568 tokens of text become."""
    objective = make_objective(Data(objective="spans", seq_len=512), BYTES, BOTH)
    assert objective.piece == 568 and objective.lengths == {"source": 512, "columns": 114}
    short = make_objective(Data(objective="spans", seq_len=512, target_len=60), BYTES, BOTH)
    assert (
        short.lengths["columns"] == 60
        and short.row_lengths(short.piece)[1] <= 60 < short.row_lengths(short.piece + 4)[1]
    )


def test_span_lengths_are_every_composition_equally_often():
    rng, seen = RNG(0), {}
    for _ in range(4000):
        parts = tuple(composition(5, 3, rng).tolist())
        assert sum(parts) == 5 and min(parts) >= 1
        seen[parts] = seen.get(parts, 0) + 1
    assert len(seen) == 6 and max(abs(n / 4000 - 1 / 6) for n in seen.values()) < 0.03


def test_prefix_row_tells_who_sees_whom():
    objective = make_objective(Data(objective="prefix", seq_len=32), BYTES, DECODER)
    prefixes = []
    for piece, example in examples(objective, [text(i, 60) for i in range(60)]):
        columns = example["columns"]
        assert columns.shape == (len(piece), 5)
        _, _, sizes, weight, orders = columns.T
        np.testing.assert_array_equal(columns[:, :2], piece[:, :2])
        length = orders[0] + 1
        positions = np.arange(len(piece))
        visible = orders[None, :] <= orders[:, None]
        in_prefix = positions < length
        np.testing.assert_array_equal(
            visible, (positions[None] <= positions[:, None]) | (in_prefix[None] & in_prefix[:, None])
        )
        # A position is scored unless it sees its own target.
        sees_target = np.append(np.diagonal(visible, 1), False)
        np.testing.assert_array_equal(weight, ~sees_target)
        np.testing.assert_array_equal(sizes, piece[:, 2] * weight)
        if len(piece) == 32:
            prefixes.append(length)
    assert set(prefixes) == set(range(1, 33)) and abs(np.mean(prefixes) - 16.5) < 1.5


def test_prefix_in_two_parts_is_the_text():
    objective = make_objective(Data(objective="prefix", seq_len=32, target_len=20), BYTES, BOTH)
    for piece, example in examples(objective, [text(i, 60) for i in range(20)]):
        source, columns = example["source"].tolist(), example["columns"]
        assert source[-1] == BYTES.eos_id and len(source) <= 32 and 1 <= len(columns) <= 20
        assert source[:-1] + columns[:, 1].tolist() == piece[:, 0].tolist()
        assert columns[:, 0].tolist() == [BOTH.decoder_start, *columns[:-1, 1].tolist()] and columns[:, 3].all()


def test_pairs_are_one_row_or_two():
    given = Data(objective="pairs", source="dates", seq_len=32)
    ask, answer = BYTES.encode("ab"), BYTES.encode("é")
    two = make_objective(given, BYTES, BOTH).pieces(("ab", "é"))[0]
    assert two["source"].tolist() == [*ask, 2]
    assert two["columns"].tolist() == [[0, answer[0], 1, 1], [answer[0], answer[1], 1, 1], [answer[1], 2, 0, 1]]
    row = make_objective(given, BYTES, DECODER).pieces(("ab", "é"))[0]["columns"]
    assert row[:, 0].tolist() == [1, *ask, 2, *answer] and row[:, 1].tolist() == [*ask, 2, *answer, 2]
    assert row[:, 2].tolist() == [0, 0, 0, 1, 1, 0] and row[:, 3].tolist() == [0, 0, 0, 1, 1, 1]
    assert row[:, 4].tolist() == [3, 3, 3, 3, 4, 5]
    assert make_objective(given, BYTES, BOTH).pieces(("x" * 32, "y")) == []
    assert make_objective(given, BYTES, BOTH).pieces(("x" * 31, "y" * 31))
    assert make_objective(given, BYTES, DECODER).pieces(("x" * 15, "y" * 16)) == []
    assert make_objective(given, BYTES, DECODER).pieces(("x" * 15, "y" * 15))


REFUSED = [
    (ENCODER, dict(), r"data.objective='causal': a model of encoder trains on 'masked'"),
    (DECODER, dict(objective="masked"), r"data.objective='masked': a model of decoder trains on 'causal' or 'prefix'"),
    (BOTH, dict(), r"'causal': a model of encoder and decoder trains on 'spans' or 'prefix' or 'pairs'"),
    (DECODER, dict(objective="spans"), "data.objective='spans'"),
    (DECODER, dict(objective="prefix", target_len=8), "data.target_len=8: a model of decoder has one row"),
    (Shape(True, False, 259), dict(objective="masked"), r"model.vocab_size=259: the mask token .* is 259; use 260"),
    (Shape(True, True, 260, 0), dict(objective="spans"), r"model.vocab_size=260: the sentinel .* is 260; use 261"),
    (Shape(True, True, 400, 0, 64), dict(objective="spans", target_len=65), r"data.target_len=65.*max_length=64"),
    (BOTH, dict(objective="spans", target_len=2), "data.target_len=2: no text with a hidden span fits"),
    (ENCODER, dict(objective="masked", seq_len=2), "data.seq_len=2: a row needs room"),
]


@pytest.mark.parametrize(("shape", "fields", "message"), REFUSED)
def test_what_does_not_fit_is_refused(shape, fields, message):
    with pytest.raises(SettingsError, match=message):
        make_objective(Data(**fields), BYTES, shape)


def test_missing_tokens_are_named(tmp_path, wordpiece):
    tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    bare = load_tokenizer(tmp_path)
    for shape, objective, what in [
        (ENCODER, "masked", "mask token"), (BOTH, "spans", "end-of-sequence token"),
        (BOTH, "prefix", "end-of-sequence token"),
    ]:  # fmt: skip
        with pytest.raises(SettingsError, match=f"data.objective='{objective}': data.tokenizer='x' has no {what}"):
            make_objective(Data(objective=objective, tokenizer="x"), bare, shape)
    with pytest.raises(SettingsError, match="has no sentinel"):
        make_objective(Data(objective="spans"), wordpiece, BOTH)


def test_noise_is_new_in_every_epoch_and_the_same_in_every_run():
    objective = masked()
    document = text(0, 20)[:100]

    def draw(seed, number=4):
        texts = grain.MapDataset.source([document]).repeat()
        return [row["columns"] for row in islice(packing.pack(texts, objective, seed), number)]

    rows = draw(1)
    np.testing.assert_equal(draw(1), rows)
    assert len({row.tobytes() for row in rows + draw(2)}) == 8
    assert len({row[:, 1].tobytes() for row in rows}) == 1
