"""Laws of generation behind an encoder: prompts are what it reads, the decoder starts by itself."""

import functools

import numpy as np
import pytest

from tests import common
from tests.checkpoints import common as golden
from tests.generation import two_stacks
from tests.generation.common import GREEDY, assert_close
from tests.generation.test_tokens import programs_made
from tests.generation.two_stacks import MODEL, START, VOCAB, params, sources
from transformer import generation
from transformer.generation import Session, speculate
from transformer.nn.model import Transformer
from transformer.ops.sampling import Sampling
from transformer.settings import Compute, SettingsError
from transformer.spec import Model
from transformer.tokenizer import ByteTokenizer

NEW = 20


def generate(rows, **options):
    options = {"max_new_tokens": NEW, "sampling": GREEDY, **options}
    return generation.generate(MODEL, params(), rows, **options)


@functools.cache
def greedy():
    return generate(sources())


def tokens(completions) -> list[tuple[int, ...]]:
    return [done.tokens for done in completions]


@pytest.mark.parametrize("prefix", [(), (3, 11, 5)])
def test_greedy_equals_full_forwards_without_a_cache(prefix):
    """The decoder begins with its start token and, where it is given, a prefix."""
    done = generate(sources(), prefixes=[prefix] * 4)
    for i, (source, completion) in enumerate(zip(sources(), done, strict=True)):
        want = two_stacks.logprobs(source, [*prefix, *completion.tokens])[len(prefix) : -1]
        chosen = want[np.arange(NEW), completion.tokens]
        assert_close(chosen, want.max(axis=-1), f"row {i}")
        assert_close(np.array(completion.logprobs), chosen, f"log probabilities of row {i}")
    assert len(set(tokens(done))) == 4 and len(set(done[0].tokens)) > 2


def test_prefixes_belong_to_their_prompts():
    prefixes = [[3], [], [5, 8, 9], [4]]
    for i, done in enumerate(generate(sources(), prefixes=prefixes)):
        assert done.tokens == generate([sources()[i]], prefixes=[prefixes[i]])[0].tokens


def test_batch_mates_batches_and_padding_change_nothing():
    mine, others = sources(), sources(1)
    got = generate([others[1], mine[2], mine[0]])
    assert tokens(got[1:]) == [greedy()[2].tokens, greedy()[0].tokens]
    assert tokens(generate(mine, batch_size=2)) == tokens(greedy())


def test_samples_do_not_depend_on_the_batch():
    warm = Sampling(temperature=1.0)
    want = generate(sources(), sampling=warm, seed=7)
    assert generate([sources()[2]], sampling=warm, seed=7)[0].tokens == want[2].tokens != greedy()[2].tokens
    first, second = generate([sources()[2]] * 2, sampling=warm, seed=7)
    assert first.tokens == want[2].tokens != second.tokens


def test_layers_apart_and_narrow_caches_draw_the_same():
    assert tokens(generation.generate(*generation.unroll(MODEL, params()), sources(), max_new_tokens=NEW,
                                      sampling=GREEDY)) == tokens(greedy())  # fmt: skip
    for dtype in ("bfloat16", "int8"):
        for done, want in zip(generate(sources(), cache_dtype=dtype, max_new_tokens=1), greedy(), strict=True):
            assert done.logprobs[0] == pytest.approx(want.logprobs[0], abs=0.05)


def test_ends_and_watchers_end_their_rows():
    end = greedy()[1].tokens[4]
    for done, want in zip(generate(sources(), eos_ids=[end]), greedy(), strict=True):
        assert done.tokens == want.tokens[: want.tokens.index(end) if end in want.tokens else None]
    stopped = generate(sources(), on_token=lambda row, token: row == 2)
    assert [len(done.tokens) for done in stopped] == [NEW, NEW, 1, NEW]


def test_a_repetition_penalty_counts_what_was_written_alone():
    done = generate([sources()[1]], sampling=Sampling(temperature=0.0, repetition_penalty=1e6), max_new_tokens=8)[0]
    assert len({START, *done.tokens}) == 9
    assert set(done.tokens) & set(sources()[1])


def test_other_lengths_within_a_bucket_compile_nothing():
    generate([[1] * 20, [2] * 17])
    before = programs_made()
    generate([[1] * 24, [3] * 2], max_new_tokens=NEW - 1)
    assert programs_made() == before


def test_text_is_what_the_tokens_say():
    spec = common.tiny_spec("llama3")  # for its vocabulary, which holds bytes
    model = Transformer(two_stacks.resized(spec.vocab_size), Compute(attention="reference"))
    values = two_stacks.random_params(model)
    tokenizer, prompts = ByteTokenizer(), ["abc", "a longer one"]
    seen = []
    ids = [[*tokenizer.encode(prompt), tokenizer.eos_id] for prompt in prompts]
    want = generation.generate(model, values, ids, max_new_tokens=NEW, sampling=GREEDY, eos_ids=tokenizer.end_ids)
    ask = functools.partial(generation.complete, model, values, tokenizer, max_new_tokens=NEW, sampling=GREEDY)
    done = ask(prompts, stream=lambda *piece: seen.append(piece))
    assert tokens(done) == tokens(want)
    for i, text in enumerate(done):
        assert text.text == tokenizer.decode(want[i].tokens) == "".join(piece for row, piece in seen if row == i)
    letter = done[1].text[3]
    assert ask(prompts, stop=[letter])[1].text == done[1].text[: done[1].text.index(letter)]


@pytest.mark.parametrize("case", ["t5", "t5_v1_1", "marian"])
def test_draws_what_hugging_face_draws(case):
    """Recorded greedy texts of a batch, and of one whose first text is shorter."""
    (net, values), arrays = golden.imported(case), golden.expected(case)
    for padded in ("", "padR_"):
        ids = arrays[f"{padded}input_ids"]
        mask = arrays[f"{padded}attention_mask"] if padded else np.ones_like(ids)
        rows = [row[real == 1].tolist() for row, real in zip(ids, mask, strict=True)]
        want = arrays[f"{padded}gen_tokens"]
        done = generation.generate(net, values, rows, max_new_tokens=want.shape[1], sampling=GREEDY)
        assert [list(text.tokens) for text in done] == want.tolist()


ALONE = Transformer(
    Model(
        vocab_size=VOCAB, d_model=two_stacks.WIDTH, max_length=64, embedding=two_stacks.SPEC.embedding,
        encoder=two_stacks.ENCODER, decoder=None, head=two_stacks.SPEC.head,
    )
)  # fmt: skip
PLAIN = common.model("llama3")
REFUSALS = {
    "an encoder alone.*fill_mask": lambda: generation.generate(ALONE, {}, [[1]], max_new_tokens=1),
    "an encoder alone.*fill_mask'?": lambda: Session(ALONE, {}),
    "an encoder alone.* writes nothing": lambda: speculate(ALONE, {}, [[1]], max_new_tokens=1),
    "an encoder and a decoder.*conversation": lambda: Session(MODEL, {}),
    "an encoder and a decoder.*draft": lambda: speculate(MODEL, {}, [[1]], draft=(PLAIN, {}), max_new_tokens=1),
    "draft='a model with an encoder'": lambda: speculate(PLAIN, {}, [[1]], draft=(MODEL, {}), max_new_tokens=1),
    "an encoder and a decoder.*both_ways": lambda: generate([[1]], both_ways=True),
    r"prefixes=\[\[1\]\]: a decoder alone": lambda: generation.generate(
        PLAIN, {}, [[1]], prefixes=[[1]], max_new_tokens=1
    ),
    r"prefixes=\[\[1\]\]: use one for each of 2": lambda: generate([[1], [2]], prefixes=[[1]]),
    r"prefixes\[1\]=40: token id outside": lambda: generate([[1], [2]], prefixes=[[1], [40]]),
    "prefill_chunk=2: both_ways.*at least 3": lambda: generation.generate(
        PLAIN, {}, [[1] * 3], both_ways=True, prefill_chunk=2, max_new_tokens=1
    ),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_makes_no_sense_is_refused(message):
    with pytest.raises(SettingsError, match=message):
        REFUSALS[message]()


@pytest.mark.parametrize("chunk", [30, 2048])
def test_prompts_that_see_both_ways_draw_what_full_forwards_do(chunk):
    values, rows = common.params("llama3"), [[5, 9, 77, 3, 200], [8] * 13 + [50] * 17]
    done = generation.generate(PLAIN, values, rows, max_new_tokens=8, sampling=GREEDY, both_ways=True,
                               prefill_chunk=chunk)  # fmt: skip
    for row, completion in zip(rows, done, strict=True):
        text = np.array([[*row, *completion.tokens]], np.int32)
        orders = np.maximum(np.arange(text.shape[1]), len(row) - 1)[None]
        logits = np.asarray(PLAIN.apply({"params": values}, text, orders=orders))[0, len(row) - 1 : -1]
        assert_close(logits[np.arange(8), completion.tokens], logits.max(axis=-1), "seen both ways")
    plain = generation.generate(PLAIN, values, rows, max_new_tokens=8, sampling=GREEDY)
    assert tokens(plain) != tokens(done)
