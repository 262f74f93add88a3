"""Laws of a conversation's memory: it draws what a fresh start draws, reads only what is new, compiles once."""

import jax
import numpy as np
import pytest

from tests import common
from tests.generation.common import GREEDY
from transformer import generation, sharding
from transformer import spec as specs
from transformer.generation import Session, session
from transformer.generation.meter import Meter
from transformer.ops.sampling import Sampling
from transformer.settings import Mesh, SettingsError
from transformer.tokenizer import ByteTokenizer

# Full layers; windows beside them (rings); latent attention; a learned position table.
FAMILIES = ("llama3", "gemma3", "deepseek_v3", "gpt2")
WARM = Sampling(temperature=1.0, repetition_penalty=1.3)
# What the user says: fewer tokens than a chunk, and more.
SAID = (3, 2, 11, 1)


NEW = 5


@pytest.fixture(autouse=True)
def short_slack(monkeypatch):
    """Tiny rings are 8 long."""
    monkeypatch.setattr(session, "SLACK", 24)


def turns(family: str) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, common.tiny_spec(family).vocab_size, count).tolist() for count in SAID]


def talk(family: str, ask, edit=lambda tokens: tokens, **options):
    """(prompt, completion) of every turn: each prompt is all that was said and answered before, and a new turn."""
    said, record = [], []
    for turn in turns(family):
        said = [*said, *turn]
        done = ask(said, max_new_tokens=NEW, **options)
        record.append((said, done))
        said = [*said, *edit(list(done.tokens))]
    return record


def assert_fresh(record, model, params, **options):
    """Every answer is what its prompt alone is answered with."""
    fresh = generation.generate(model, params, [prompt for prompt, _ in record], max_new_tokens=NEW, **options)
    for (_, done), want in zip(record, fresh, strict=True):
        assert done.tokens == want.tokens[: len(done.tokens)]
        np.testing.assert_allclose(done.logprobs, want.logprobs[: len(done.tokens)], atol=1e-4)


@pytest.fixture
def absorbed(monkeypatch):
    """Where every chunk that is read begins."""
    starts, run = [], session.absorb

    def spy(model, params, tokens, start, *rest):
        starts.append(int(start))
        return run(model, params, tokens, start, *rest)

    monkeypatch.setattr(session, "absorb", spy)
    return starts


@pytest.mark.parametrize(("family", "sampling"), [*((family, GREEDY) for family in FAMILIES), ("llama3", WARM)])
def test_a_conversation_is_what_fresh_starts_say(family, sampling, absorbed):
    model, params = common.model(family), common.params(family)
    talker = Session(model, params, capacity=48, chunk=4)
    record = talk(family, talker.generate, sampling=sampling, on_token=lambda row, token: False)
    assert_fresh(record, model, params, sampling=sampling)
    # The last token drawn was never read; everything before it was.
    starts = [0] + [len(prompt) + NEW - 1 for prompt, _ in record[:-1]]
    chunks = [range(start, len(prompt), 4) for start, (prompt, _) in zip(starts, record, strict=True)]
    assert absorbed == [start for chunk in chunks for start in chunk]


@pytest.mark.parametrize(("family", "chunk"), [("llama3", 4), ("gemma3", 4), ("gemma3", 40)])
def test_what_the_device_drew_beyond_a_stop_is_forgotten(family, chunk):
    """A chunk longer than a ring is read beside what the ring holds, where a token drawn in vain would be seen."""
    model, params = common.model(family), common.params(family)
    talker = Session(model, params, capacity=64, chunk=chunk)
    heard = []

    def watch(_, token):
        heard.append(token)
        return len(heard) % 3 == 0

    def ask(prompt, max_new_tokens, **rest):
        return talker.generate(prompt, max_new_tokens=24, **rest)

    record = talk(family, ask, sampling=GREEDY, on_token=watch)
    assert all(len(done.tokens) == 3 and done.reason == "stop" for _, done in record)
    assert_fresh(record, model, params, sampling=GREEDY)


@pytest.mark.parametrize("family", ["llama3", "gemma3"])
def test_an_answer_written_otherwise_is_read_anew(family, absorbed):
    """Its end alone, or, where a ring has forgotten what lies before, everything."""
    model, params = common.model(family), common.params(family)
    talker = Session(model, params, capacity=64, chunk=4)
    vocab = common.tiny_spec(family).vocab_size
    record = talk(family, talker.generate, lambda tokens: [(tokens[0] + 1) % vocab, *tokens[1:]], sampling=GREEDY)
    assert_fresh(record, model, params, sampling=GREEDY)
    assert len(record[0][0]) in absorbed
    absorbed.clear()
    other = list(record[-1][0])
    other[6] = (other[6] + 1) % vocab
    assert_fresh([(other, talker.generate(other, max_new_tokens=NEW, sampling=GREEDY))], model, params, sampling=GREEDY)
    assert absorbed[0] == {"llama3": 6, "gemma3": 0}[family]


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_later_turns_compile_nothing(cache_dtype):
    family = "llama3"
    params = jax.device_put(common.params(family), sharding.make_mesh(Mesh(), jax.devices()[:1]).devices.flat[0])
    talker, made = Session(common.model(family), params, capacity=48, chunk=4, cache_dtype=cache_dtype), []

    def ask(*args, **options):
        with Meter() as meter:
            done = talker.generate(*args, **options)
        made.append(meter.programs)
        return done

    talk(family, ask, sampling=GREEDY, on_token=lambda row, token: False)
    assert made[0] > 0 and made[1:] == [0] * (len(SAID) - 1)


def test_on_a_mesh_a_conversation_is_the_same():
    model, mesh = common.model("llama3"), sharding.make_mesh(Mesh(data=2, tensor=2), jax.devices()[:4])
    params, made = jax.device_put(common.params("llama3"), common.shardings(model, mesh)), []

    def ask(*args, **options):
        with Meter() as meter:
            done = talker.generate(*args, **options)
        made.append(meter.programs)
        return done

    with jax.set_mesh(mesh):
        talker = Session(model, params, capacity=48, chunk=4)
        record = talk("llama3", ask, sampling=GREEDY)
    assert_fresh(record, model, common.params("llama3"), sampling=GREEDY)
    assert made[1:] == [0] * (len(SAID) - 1)


def test_a_conversation_outgrows_its_capacity():
    model, params = common.model("llama3"), common.params("llama3")
    record = talk("llama3", Session(model, params, capacity=16, chunk=4).generate, sampling=GREEDY)
    assert len(record[-1][0]) + NEW > 24
    assert_fresh(record, model, params, sampling=GREEDY)


def test_sinks_and_a_window_are_kept_between_turns():
    model = common.model("llama3")
    model, params = model.clone(spec=specs.streaming(model.spec, sinks=2, window=6)), common.params("llama3")
    record = talk("llama3", Session(model, params, capacity=64, chunk=4).generate, sampling=GREEDY)
    assert_fresh(record, model, params, sampling=GREEDY)


def test_a_turn_that_failed_leaves_nothing_behind():
    model, params = common.model("llama3"), common.params("llama3")
    talker = Session(model, params, capacity=48, chunk=4)

    def interrupt(_, token):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talker.generate([1, 2, 3], max_new_tokens=NEW, on_token=interrupt)
    record = talk("llama3", talker.generate, sampling=GREEDY)
    assert_fresh(record, model, params, sampling=GREEDY)


def test_text_is_streamed_as_it_is_returned():
    model, params = common.model("llama3"), common.params("llama3")
    pieces, options = [], dict(max_new_tokens=9, sampling=GREEDY)
    talker = Session(model, params, capacity=48, chunk=4)
    text = talker.complete(ByteTokenizer(), "The ", stream=lambda _, piece: pieces.append(piece), **options)
    assert [text] == generation.complete(model, params, ByteTokenizer(), ["The "], bos=False, **options)
    assert "".join(pieces) == text.text


def test_what_cannot_be_meant_is_refused():
    model, params = common.model("gpt2"), common.params("gpt2")
    for options, field in (({"chunk": 0}, "prefill_chunk=0"), ({"cache_dtype": "int4"}, "cache_dtype='int4'")):
        with pytest.raises(SettingsError, match=field):
            Session(model, params, **options)
    with pytest.raises(SettingsError, match="max_new_tokens=10000: the learned position table"):
        Session(model, params).generate([1], max_new_tokens=10000)
    with pytest.raises(SettingsError, match="eos_ids=10000"):
        Session(model, params).generate([1], max_new_tokens=1, eos_ids=[10000])
