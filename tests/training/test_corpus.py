"""Laws of sources and of the split: nothing lost, nothing twice, a text's side depends on the text alone."""

import random
from collections import Counter

import pytest

from transformer.settings import Data, SettingsError
from transformer.training import corpus, indexes
from transformer.training.documents import Documents

WORDS = ["the", "a", "cat", "naïve", "日本", "🙂", "runs", "under", "table\n", "tree."]


def test_split_depends_on_the_text_alone():
    def split(texts, fraction):
        return [list(side) for side in corpus.split(Documents.of(texts), fraction)]

    texts = [f"document {i}" for i in range(60)]
    train_side, held_out = split(texts, 0.3)
    for seed in range(3):
        shuffled = random.Random(seed).sample(texts, len(texts))
        a, b = split(shuffled, 0.3)
        assert set(a) == set(train_side) and set(b) == set(held_out)
        assert b == [text for text in shuffled if text in set(held_out)]
    assert set(split(texts[::2] + texts[:1], 0.3)[1]) <= set(held_out)
    assert set(held_out) <= set(split(texts, 0.5)[1])
    many = [str(i) for i in range(10_000)]
    assert abs(len(split(many, 0.05)[1]) - 500) < 100


def test_big_files_are_cut_at_paragraphs(tmp_path):
    rng = random.Random(1)
    text = "\n\n".join(" ".join(rng.choices(WORDS, k=rng.randrange(5, 300))) for _ in range(600)) + "\n"
    (tmp_path / "big.txt").write_text(text, encoding="utf-8", newline="")
    pieces = load(tmp_path / "*.txt")
    assert "".join(pieces) == text and len(pieces) > 20
    assert all(piece.endswith("\n\n") for piece in pieces[:-1])
    assert max(len(piece.encode()) for piece in pieces) <= indexes.PIECE
    line = "é".join(map(str, range(3 * indexes.PIECE // 8)))
    (tmp_path / "line.txt").write_text(line, encoding="utf-8")
    pieces = load(tmp_path / "line.txt", tmp_path / "*.txt")
    assert len(pieces) == len(set(pieces))
    assert "".join(load(tmp_path / "line.txt")) == line


def load(*paths, **fields):
    return list(corpus.load(Data(source="text", paths=tuple(map(str, paths)), **fields)))


def test_a_split_with_one_empty_side_is_refused():
    for fraction, side in ((0.001, "validation"), (0.999, "training")):
        with pytest.raises(SettingsError, match=f"data.validation_fraction={fraction}: no {side} document among 1"):
            corpus.split(Documents.of(["one"]), fraction)


def test_python_docs_are_clean_english_of_some_size():
    pages = corpus.python_docs()
    assert sum(map(len, pages)) > 1_000_000
    assert min(map(len, pages)) >= corpus.MIN_CHARACTERS
    assert len(set(pages)) == len(pages)
    assert any(text.startswith("JSON (JavaScript Object Notation)") for text in pages)
    paragraphs = Counter(part for text in pages for part in text.split("\n\n") if len(part) > 300)
    assert paragraphs.most_common(1)[0][1] == 1  # nothing to leak from training into validation
    train_side, held_out = corpus.split(Documents.of(pages), Data().validation_fraction)
    assert 0.01 < sum(map(len, held_out)) / sum(map(len, pages)) < 0.15 and train_side
