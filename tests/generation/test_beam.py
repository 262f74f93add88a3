"""Beam search: its laws, and what Hugging Face finds."""

import functools
import itertools
import json

import numpy as np
import pytest

from tests import common
from tests.checkpoints import common as golden
from tests.generation import two_stacks
from tests.generation.common import GREEDY, prompts
from transformer import generation
from transformer.generation import beam_steps
from transformer.generation.beam import Beams, beam_search
from transformer.nn.model import Transformer
from transformer.settings import Compute, SettingsError

FAMILY = "llama3"
NEW = 10
RECORDED = json.loads((golden.GOLDEN / "beams.json").read_text())
# Of a score: the noise between two correct float32 programs.
LIMIT = 1e-4


def model(name: str):
    """(model, parameters, prompts) of a decoder alone, or behind an encoder."""
    if name == "two stacks":
        return two_stacks.MODEL, two_stacks.params(), two_stacks.sources()
    return common.model(name), common.params(name), prompts(name)


models = pytest.mark.parametrize("name", [FAMILY, "gemma3", "two stacks"])


@functools.cache
def found(name: str, how: Beams, ends: tuple[int, ...] = ()):
    """All texts of every prompt."""
    net, values, rows = model(name)
    options = dict(max_new_tokens=NEW, eos_ids=ends, num_return_sequences=how.num_beams)
    return beam_search(net, values, rows, beams=how, **options)


def ends_of(name: str) -> tuple[int, ...]:
    """A token that searches come to."""
    return (found(name, Beams(num_beams=3))[0][0].tokens[3],)


def logprobs(name: str, prompt: list[int], written: list[int]) -> np.ndarray:
    """Of each of the written tokens, by one whole forward."""
    if name == "two stacks":
        return two_stacks.logprobs(prompt, written)[np.arange(len(written)), written]
    net, values, _ = model(name)
    logits = _padded_forward(net)(values, [*prompt, *written])
    after = np.arange(len(written)) + len(prompt) - 1
    return logits[after, written] - np.log(np.exp(logits[after]).sum(-1))


@functools.cache
def _padded_forward(net):
    import jax

    forward = jax.jit(lambda values, tokens: net.apply({"params": values}, tokens))

    def run(values, tokens):
        return np.asarray(forward(values, np.array([tokens + [0] * (48 - len(tokens))], np.int32)))[0]

    return run


@models
def test_a_score_is_the_sum_of_the_log_probabilities_over_the_length(name):
    ends, rows = ends_of(name), model(name)[2]
    how = Beams(num_beams=3, length_penalty=0.7)
    lengths = set()
    for prompt, texts in zip(rows, found(name, how, ends), strict=True):
        assert [text.score for text in texts] == sorted((text.score for text in texts), reverse=True)
        assert len({text.tokens for text in texts}) == len(texts) == 3
        for text in texts:
            written = [*text.tokens, *(ends if text.reason == "eos" else ())]
            want = logprobs(name, prompt, written)
            assert text.score == pytest.approx(want.sum() / len(written) ** 0.7, abs=LIMIT)
            assert text.logprobs == pytest.approx(want[: len(text.tokens)].tolist(), abs=LIMIT)
            assert not set(ends) & set(text.tokens) and (text.reason == "eos" or len(text.tokens) == NEW)
            lengths.add(len(written))
    assert len(lengths) > 1


@models
@pytest.mark.parametrize("stopping", [True, False])
def test_one_beam_is_greedy(name, stopping):
    net, values, rows = model(name)
    ends = ends_of(name)
    want = generation.generate(net, values, rows, max_new_tokens=NEW, sampling=GREEDY, eos_ids=ends)
    for [text], greedy in zip(found(name, Beams(num_beams=1, early_stopping=stopping), ends), want, strict=True):
        assert (text.tokens, text.reason) == (greedy.tokens, greedy.reason)
        assert text.logprobs == pytest.approx(greedy.logprobs, abs=LIMIT)


@models
def test_batch_mates_and_places_change_nothing(name):
    net, values, rows = model(name)
    ends, how = ends_of(name), Beams(num_beams=3, length_penalty=0.7)
    want = found(name, how, ends)
    ask = functools.partial(beam_search, net, values, beams=how, max_new_tokens=NEW, eos_ids=ends)
    mixed = ask([rows[2], rows[1][::-1], rows[0]])
    assert [mixed[0][0].tokens, mixed[2][0].tokens] == [want[2][0].tokens, want[0][0].tokens]
    told = []
    got = ask(rows, batch_size=3, on_batch=lambda *counts: told.append(counts[0]))
    assert [texts[0].tokens for texts in got] == [texts[0].tokens for texts in want] and told == [3, 4]


@functools.cache
def tiny():
    """(model, parameters) of four tokens."""
    net = Transformer(two_stacks.resized(4, start=0), Compute(attention="reference"))
    return net, two_stacks.random_params(net)


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 3.0])
def test_enough_beams_find_the_best_of_all_texts(penalty):
    (net, values), length, end, source = tiny(), 3, 2, [1, 3, 3]
    how = Beams(num_beams=4**length, length_penalty=penalty, early_stopping="never")
    texts = beam_search(
        net, values, [source], beams=how, max_new_tokens=length, eos_ids=[end], num_return_sequences=how.num_beams
    )[0]
    scores = {}
    for written in itertools.product(range(4), repeat=length):
        cut = written[: written.index(end) + 1] if end in written else written
        steps = two_stacks.logprobs(source, list(cut), net, values)[np.arange(len(cut)), list(cut)]
        scores[cut] = steps.sum() / len(cut) ** penalty
    got = {text.tokens + ((end,) if text.reason == "eos" else ()): text.score for text in texts}
    assert got == pytest.approx(scores, abs=LIMIT) and len(got) == 1 + 3 + 9 * 4
    assert texts[0].score == max(got.values())


def recorded_rows(case: str) -> list[list[int]]:
    """The prompts of a case, of different lengths."""
    padding, arrays = RECORDED[case]["padding"], golden.expected(case)
    tokens, mask = (arrays[f"{padding}_{name}"] for name in ("input_ids", "attention_mask"))
    return [row[real == 1].tolist() for row, real in zip(tokens, mask, strict=True)]


@pytest.mark.parametrize("case", RECORDED)
def test_finds_what_hugging_face_finds(case):
    net, values = golden.imported(case)
    for search in RECORDED[case]["searches"]:
        names = "num_beams", "length_penalty", "early_stopping"
        ends = search["eos_token_id"] or ()
        options = dict(
            beams=Beams(**{name: search[name] for name in names}),
            max_new_tokens=RECORDED[case]["max_new_tokens"],
            num_return_sequences=search["num_beams"],
            eos_ids=ends,
        )
        got = beam_search(net, values, recorded_rows(case), **options)
        for texts, theirs, scores in zip(got, search["texts"], search["scores"], strict=True):
            # Theirs with the end token, of which there may be several.
            assert [text.tokens for text in texts] == [tuple(t[:-1] if t[-1] in ends else t) for t in theirs], search
            assert [text.reason == "eos" for text in texts] == [t[-1] in ends for t in theirs]
            assert [text.score for text in texts] == pytest.approx(scores, abs=LIMIT)


def test_other_numbers_and_lengths_compile_nothing():
    net, values, rows = model(FAMILY)
    ask = functools.partial(beam_search, net, values, max_new_tokens=NEW)
    ask(rows, beams=Beams(num_beams=3))
    before = beam_steps.search._cache_size()
    ask([row[:-1] for row in rows], beams=Beams(num_beams=3, length_penalty=0.3, early_stopping="never"), eos_ids=[5])
    ask(rows, beams=Beams(num_beams=3), max_new_tokens=NEW - 1)
    assert beam_steps.search._cache_size() == before


REFUSALS = {
    "num_beams=0: use at least 1": dict(how=dict(num_beams=0)),
    "length_penalty=nan: use a finite": dict(how=dict(length_penalty=float("nan"))),
    """early_stopping='always': use True, False or "never\"""": dict(how=dict(early_stopping="always")),
    "num_return_sequences=5: use 1 to num_beams=4": dict(num_return_sequences=5),
    "eos_ids=300: outside": dict(eos_ids=[300]),
    "max_new_tokens=0": dict(max_new_tokens=0),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_cannot_be_searched_is_refused(message):
    options = dict(REFUSALS[message])
    net, values, rows = model(FAMILY)
    with pytest.raises(SettingsError, match=message):
        beam_search(net, values, rows, beams=Beams(**options.pop("how", {})), **{"max_new_tokens": 3, **options})
    assert beam_search(net, values, [], max_new_tokens=3) == []
