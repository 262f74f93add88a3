"""Exact matches of pairs, and hidden tokens."""

import functools

import jax
import numpy as np
import pytest

from tests import common
from tests.generation import two_stacks
from tests.generation.common import GREEDY
from transformer import generation, spec
from transformer.generation import Beams, beam_search, exact_match, fill_mask
from transformer.nn.model import Transformer
from transformer.settings import Compute, SettingsError
from transformer.tokenizer import ByteTokenizer

FIRST = 0x100  # the letter of token 0
NEW = 9


class Letters(ByteTokenizer):
    """Every token is a letter, so that whatever is drawn can be a target."""

    def __init__(self, end: int, bos: int | None = None):
        self.eos_id, self.bos_id, self.end_ids = end, bos, (end,)

    def encode(self, text):
        return [ord(letter) - FIRST for letter in text]

    def decode(self, ids):
        return "".join(chr(FIRST + i) for i in ids)


def check_matches(model, values, tokenizer: Letters, rows: list[list[int]], draw, beams: Beams | None) -> None:
    """The fraction is that of the rows that end, where targets are what `draw` gives; and none where they are not."""
    sources, done = [tokenizer.decode(row) for row in rows], draw()
    ended = np.array([text.reason == "eos" for text in done])
    assert 0 < ended.sum() < len(rows)
    # One token short of the limit, so that the limit is the same: a text that goes on is wrong.
    targets = [tokenizer.decode(text.tokens[: NEW - 1]) for text in done]
    match = functools.partial(exact_match, model, values, tokenizer, beams=beams, batch_size=2)
    assert match(list(zip(sources, targets, strict=True))) == ended.mean()
    wrong = [chr(FIRST) + target[1:] for target in targets]
    assert match(list(zip(sources, wrong, strict=True))) == 0


@pytest.mark.parametrize("beams", [None, Beams(num_beams=3)], ids=["greedy", "beams"])
def test_behind_an_encoder_what_is_written_to_the_end_counts(beams):
    model, values, end = two_stacks.MODEL, two_stacks.params(), 9
    read = [[*row, end] for row in two_stacks.sources()]
    options = dict(max_new_tokens=NEW, eos_ids=[end])

    def draw():
        if beams is None:
            return generation.generate(model, values, read, sampling=GREEDY, **options)
        return [texts[0] for texts in beam_search(model, values, read, beams=beams, **options)]

    check_matches(model, values, Letters(end), two_stacks.sources(), draw, beams)


def test_a_decoder_alone_reads_the_source_both_ways_as_in_training():
    model, values, bos = common.model("llama3"), common.params("llama3"), 1
    rows = [[7, 9], [30] * 5, [8, 100, 200]]
    draw = functools.partial(generation.generate, model, values, max_new_tokens=NEW, sampling=GREEDY, both_ways=True)
    # An end that some row comes to, behind a source that ends with it: found by trying.
    some = draw([[bos, *row, 3] for row in rows])
    for end in dict.fromkeys(token for text in some for token in text.tokens[1:]):
        done = draw([[bos, *row, end] for row in rows], eos_ids=[end])
        if 0 < sum(text.reason == "eos" for text in done) < len(rows) and all(text.tokens for text in done):
            break
    check_matches(model, values, Letters(end, bos), rows, lambda: done, None)


def test_no_pairs_and_no_end_are_refused():
    tokenizer = Letters(9)
    with pytest.raises(SettingsError, match=r"pairs=\[\]: give at least one"):
        exact_match(two_stacks.MODEL, {}, tokenizer, [])
    tokenizer.end_ids = ()
    with pytest.raises(SettingsError, match="never ends"):
        exact_match(two_stacks.MODEL, {}, tokenizer, [("a", "b")])


MASK = 260
ENCODER = Transformer(
    spec.Model(
        vocab_size=264, d_model=two_stacks.WIDTH, max_length=64, embedding=two_stacks.SPEC.embedding,
        encoder=two_stacks.ENCODER, decoder=None, head=two_stacks.SPEC.head,
    ),
    Compute(attention="reference"),
)  # fmt: skip


def test_masks_are_filled_with_the_most_probable_tokens():
    values, tokenizer = two_stacks.random_params(ENCODER), ByteTokenizer()
    guesses = fill_mask(ENCODER, values, tokenizer, "a[MASK]bc[MASK]", mask_id=MASK, top=264)
    a, b, c = tokenizer.encode("abc")
    tokens = np.array([[tokenizer.bos_id, a, MASK, b, c, MASK, tokenizer.eos_id]], np.int32)
    want = np.asarray(jax.nn.softmax(jax.jit(ENCODER.apply)({"params": values}, tokens)))[0]
    for found, place in zip(guesses, (2, 5), strict=True):
        assert [guess.token for guess in found] == np.argsort(-want[place], kind="stable").tolist()
        assert [guess.probability for guess in found] == pytest.approx(sorted(want[place], reverse=True), abs=1e-5)
        assert all(guess.text == tokenizer.decode([guess.token]) for guess in found)
    assert fill_mask(ENCODER, values, tokenizer, "a[MASK]bc[MASK]", mask_id=MASK, top=2) == [g[:2] for g in guesses]

    # Without mask_id it is the tokenizer's mask, and the ends are those of training.
    class Ended(ByteTokenizer):
        mask_id, cls_id, sep_id, bos_id, eos_id = MASK, 1, 2, None, None

    assert fill_mask(ENCODER, values, Ended(), "a[MASK]bc[MASK]", top=2) == [g[:2] for g in guesses]
    # A mask that the tokenizer knows.
    known = fill_mask(ENCODER, values, tokenizer, "a_bc", mask="_", top=1)
    assert known == fill_mask(ENCODER, values, tokenizer, "a[MASK]bc", mask_id=tokenizer.encode("_")[0], top=1)


class NoMask(ByteTokenizer):
    mask_id = None


REFUSALS = {
    "model='a decoder'": dict(model=two_stacks.MODEL),
    "text='abc': has no '_'": dict(text="abc"),
    r"mask='\[MASK\]': is no single token": dict(text="[MASK]", mask="[MASK]", tokenizer=NoMask()),
    "mask='': an empty text": dict(mask=""),
    "mask_id=264: use 0 to": dict(mask_id=264),
    "top=0: use 1 to vocab_size=264": dict(top=0),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_cannot_be_filled_is_refused(message):
    options = {"model": ENCODER, "text": "a_", "mask": "_", **REFUSALS[message]}
    tokenizer = options.pop("tokenizer", ByteTokenizer())
    with pytest.raises(SettingsError, match=message):
        fill_mask(options.pop("model"), {}, tokenizer, options.pop("text"), **options)
