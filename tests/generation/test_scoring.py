"""Scores of texts: every token once, as the forward pass has them, whatever the rows and their mates."""

import functools
import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import common
from tests.generation.common import stand_in
from transformer import evaluate
from transformer.generation import score
from transformer.generation.scoring import windows
from transformer.settings import SettingsError
from transformer.tokenizer import ByteTokenizer

FAMILY = "llama3"
LENGTHS = (30, 1, 0, 7, 19)


def texts() -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(common.random_tokens(FAMILY, 5, 30), LENGTHS, strict=True)]


@functools.cache
def program():
    return jax.jit(lambda params, tokens: jax.nn.log_softmax(common.model(FAMILY).apply({"params": params}, tokens)))


def forward(tokens: list[int]) -> np.ndarray:
    """Log-probabilities [T, V]; causality makes the padding harmless."""
    padded = np.zeros((1, max(LENGTHS)), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(program()(common.params(FAMILY), padded))[0, : len(tokens)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(1, 12), st.data())
def test_rows_ask_for_every_token_once_with_enough_context(counts, length, data):
    stride = data.draw(st.integers(1, length))
    asked = []
    for text, start, targets, known in windows(counts, length, stride):
        assert 0 <= known < targets <= length
        asked += [(text, start + target) for target in range(known, targets)]
        if start:  # what is new has all the context that a row ahead of it leaves
            assert known >= length - stride
    assert asked == [(text, token) for text, count in enumerate(counts) for token in range(count - 1)]


def test_one_row_is_the_forward_pass():
    got = score(common.model(FAMILY), common.params(FAMILY), texts(), length=32)
    for tokens, scores in zip(texts(), got, strict=True):
        assert len(scores.nats) == max(len(tokens) - 1, 0)
        if len(tokens) > 1:
            want = -forward(tokens)[np.arange(len(tokens) - 1), tokens[1:]]
            np.testing.assert_allclose(scores.nats, want, atol=2e-5)
            assert scores.context.tolist() == list(range(1, len(tokens)))


@pytest.mark.parametrize(("length", "stride", "batch_size"), [(8, 8, 2), (8, 3, 5), (12, 1, 3)])
def test_a_token_is_scored_from_the_context_it_is_said_to_have(length, stride, batch_size):
    tokens = texts()[0]
    (_, scores) = score(
        common.model(FAMILY), common.params(FAMILY), [[], tokens], length=length, stride=stride, batch_size=batch_size
    )
    assert scores.context.max() == length
    assert stride > 1 or (scores.context[length:] == length).all()
    for at in range(len(tokens) - 1):
        before = tokens[at + 1 - scores.context[at] : at + 1]
        np.testing.assert_allclose(scores.nats[at], -forward(before)[-1, tokens[at + 1]], atol=2e-5)


def test_what_cannot_be_scored_is_refused():
    model, params = common.model(FAMILY), common.params(FAMILY)
    for options, field in (
        (dict(length=0), "length=0"),
        (dict(length=8, stride=9), "stride=9"),
        (dict(length=8, stride=0), "stride=0"),
        (dict(length=8, batch_size=0), "batch_size=0"),
    ):
        with pytest.raises(SettingsError, match=field):
            score(model, params, [[1, 2]], **options)
    with pytest.raises(SettingsError, match="ids must lie"):
        score(model, params, [[1, model.spec.vocab_size]], length=8)
    for family, reason in (("bert", "writes nothing"), ("t5", "by itself"), ("gpt2", "learned positions end")):
        with pytest.raises(SettingsError, match=reason):
            score(common.model(family), {}, [[1, 2]], length=10**6)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """A workdir's stand-in whose vocabulary holds bytes, and two files."""
    loaded = common.model(FAMILY), common.params(FAMILY), ByteTokenizer()
    stand_in(monkeypatch, loaded)
    monkeypatch.setattr(evaluate, "_default_length", lambda workdir, longest: 16)
    (tmp_path / "a.txt").write_text("The café and the sea.")
    (tmp_path / "b.txt").write_text("xy")
    return tmp_path


def test_the_command_adds_up_files(run, capsys):
    out = run / "scores.json"
    files = [f"--file={run}/*.txt", "--stride=4", f"--json={out}"]
    assert evaluate.main([f"--workdir={run}", *files]) == 0
    figures = json.loads(out.read_text())
    a, b = figures["texts"].values()
    assert (a["tokens"], a["bytes"], b["tokens"], figures["bytes"]) == (22, 22, 2, 24)  # a byte a token, BOS before
    assert figures["loss"] == pytest.approx((22 * a["loss"] + 2 * b["loss"]) / 24)
    assert figures["perplexity"] == pytest.approx(np.exp(figures["loss"]))
    assert figures["bits_per_byte"] == pytest.approx(figures["loss"] / np.log(2))
    assert sum(bucket["tokens"] for bucket in figures["by_context"]) == 24
    assert [bucket["from"] for bucket in figures["by_context"]] == [1, 2, 4, 8, 16]
    said = capsys.readouterr()
    assert f"{figures['loss']:.4f}" in said.out and "rows of 16 tokens, 4 apart" in said.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--file={}/none.txt"], "matches no file"),
        (["--file={}/empty.txt"], "holds no text"),
        (["--file={}/latin.txt"], "not UTF-8"),
        (["--file={}/a.txt", "--length=0"], "length=0"),
        (["--file={}/a.txt", "--length=8", "--stride=9"], "stride=9"),
        (["--file={}/a.txt", "--json={}/no/where.json"], "no such directory"),
        (["--file={}/a.txt", "--tokenizer={}/b.txt"], "not a Hugging Face tokenizer.json"),
    ],
)
def test_a_mistake_is_one_line(run, capsys, options, said):
    (run / "empty.txt").write_text("")
    (run / "latin.txt").write_bytes("é".encode("latin-1"))
    assert evaluate.main([f"--workdir={run}", *(option.format(run) for option in options)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.startswith("error: ")
