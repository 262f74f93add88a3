"""Laws of sources and of the split: nothing lost, nothing twice, a text's side depends on the text alone."""

import random
from collections import Counter

import pytest

from transformer.settings import Data, SettingsError
from transformer.training import corpus

WORDS = ["the", "a", "cat", "naïve", "日本", "🙂", "runs", "under", "table\n", "tree."]


def test_split_depends_on_the_text_alone():
    texts = [f"document {i}" for i in range(60)]
    train_side, held_out = corpus.split(texts, 0.3)
    for seed in range(3):
        shuffled = random.Random(seed).sample(texts, len(texts))
        a, b = corpus.split(shuffled, 0.3)
        assert set(a) == set(train_side) and set(b) == set(held_out)
        assert b == [text for text in shuffled if text in set(held_out)]
    assert set(corpus.split(texts[::2] + texts[:1], 0.3)[1]) <= set(held_out)
    assert set(held_out) <= set(corpus.split(texts, 0.5)[1])
    many = [str(i) for i in range(10_000)]
    assert abs(len(corpus.split(many, 0.05)[1]) - 500) < 100


def test_big_files_are_cut_at_paragraphs(tmp_path):
    rng = random.Random(1)
    text = "\n\n".join(" ".join(rng.choices(WORDS, k=rng.randrange(5, 300))) for _ in range(600)) + "\n"
    (tmp_path / "big.txt").write_text(text, encoding="utf-8", newline="")
    pieces = corpus.text_files([str(tmp_path / "*.txt")])
    assert "".join(pieces) == text and len(pieces) > 20
    assert all(piece.endswith("\n\n") for piece in pieces[:-1])
    assert max(map(len, pieces)) <= corpus.PIECE
    (tmp_path / "line.txt").write_text("x" * 10 + "y" * 3 * corpus.PIECE, encoding="utf-8")
    pieces = corpus.text_files([str(tmp_path / "line.txt"), str(tmp_path / "*.txt")])
    assert len(pieces) == len(set(pieces))


def test_bad_input_is_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 ole")
    with pytest.raises(SettingsError, match=r"data.paths: .*latin.txt is not UTF-8 at byte 3"):
        corpus.text_files([str(tmp_path / "*.txt")])
    with pytest.raises(SettingsError, match=r"data.paths='.*none.txt': matches no file"):
        corpus.text_files([str(tmp_path / "none.txt")])
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(SettingsError, match="hold no text"):
        corpus.text_files([str(tmp_path / "empty.txt")])
    for fraction, side in ((0.001, "validation"), (0.999, "training")):
        with pytest.raises(SettingsError, match=f"data.validation_fraction={fraction}: no {side} document among 1"):
            corpus.split(["one"], fraction)


def test_python_docs_are_clean_english_of_some_size():
    documents = corpus.python_docs()
    assert sum(map(len, documents)) > 1_000_000
    assert min(map(len, documents)) >= corpus.MIN_CHARACTERS
    assert len(set(documents)) == len(documents)
    assert any(text.startswith("JSON (JavaScript Object Notation)") for text in documents)
    paragraphs = Counter(part for text in documents for part in text.split("\n\n") if len(part) > 300)
    assert paragraphs.most_common(1)[0][1] == 1  # nothing to leak from training into validation
    train_side, held_out = corpus.split(documents, Data().validation_fraction)
    assert 0.01 < sum(map(len, held_out)) / sum(map(len, documents)) < 0.15 and train_side
