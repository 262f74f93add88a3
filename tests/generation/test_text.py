"""Generation from text: stop strings across tokens, streaming = returning, characters never torn."""

from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import common
from tests.generation.common import GREEDY
from transformer import api
from transformer.generation import Completion, complete, generate, generate_text, text
from transformer.generation.text import StopScanner
from transformer.ops.sampling import Sampling
from transformer.settings import SettingsError
from transformer.tokenizer import ByteTokenizer, HFTokenizer

FAMILY = "llama3"
EOS = ByteTokenizer.eos_id
# What draws is scripted; of the model only its shape is asked.
NO_MODEL = SimpleNamespace(spec=SimpleNamespace(encoder=None))


def cut(whole: str, stop) -> str:
    """`whole` before the stop string that ends first (the longest of those that end there)."""
    for end in range(1, len(whole) + 1):
        starts = [end - len(s) for s in stop if whole[:end].endswith(s)]
        if starts:
            return whole[: min(starts)]
    return whole


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.text("abc", max_size=4), max_size=10), stop=STOPS)
def test_the_scanner_passes_on_exactly_what_lies_before_a_stop_string(pieces, stop):
    scanner, passed, whole, want = StopScanner(stop), "", "".join(pieces), cut("".join(pieces), stop)
    for piece in pieces:
        more, stopped = scanner.push(piece)
        passed += more
        assert want.startswith(passed), "part of a stop string was passed on"
        if stopped:
            break
    else:
        stopped = False
        passed += scanner.flush()
    assert passed == want
    assert stopped == (want != whole or "" in stop)


def test_the_scanner_holds_back_no_more_than_it_must():
    assert StopScanner(["end"]).push("the en") == ("the ", False)
    assert StopScanner(["end"]).push("the enx") == ("the enx", False)
    assert StopScanner([]).push("anything") == ("anything", False)


def scripted(monkeypatch, ids, limit=None):
    """Makes `complete` draw `ids` for every prompt; returns the prompts that it was given."""
    given = []

    def generate(model, params, prompts, *, max_new_tokens, eos_ids, on_token, **rest):
        given.extend(prompts)
        done = []
        for i, _ in enumerate(prompts):
            tokens, reason = [], "length"
            for token in ids:
                if token in eos_ids:
                    reason = "eos"
                    break
                tokens.append(token)
                if on_token is not None and on_token(i, token):
                    reason = "stop"
                    break
            done.append(Completion(tuple(tokens), reason, (0.0,) * len(tokens)))
        return done

    monkeypatch.setattr(text, "generate", generate)
    return given


def run(tokenizer, prompt="x", stop=(), streaming=True):
    pieces = []
    stream = (lambda i, piece: pieces.append(piece)) if streaming else None
    done = complete(NO_MODEL, None, tokenizer, [prompt], stop=stop, stream=stream)[0]
    if streaming:
        assert "".join(pieces) == done.text, "streamed text is not the returned text"
        assert all(pieces), "an empty piece was streamed"
    return done, pieces


TEXTS = st.text("ab é日🙂\u0301", max_size=24)
TEXT_STOPS = st.lists(st.text("ab é日🙂", min_size=1, max_size=3), max_size=2)


@settings(max_examples=150, deadline=None)
@given(answer=TEXTS, stop=TEXT_STOPS, streaming=st.booleans(), end=st.booleans())
def test_bytes_stream_to_the_text_before_the_stop_string(answer, stop, streaming, end):
    with pytest.MonkeyPatch.context() as patch:
        scripted(patch, [*ByteTokenizer().encode(answer), *([EOS, 5, 5] if end else [])])
        done, _ = run(ByteTokenizer(), stop=stop, streaming=streaming)
    assert done.text == cut(answer, stop)
    assert done.reason == ("stop" if done.text != answer else "eos" if end else "length")
    if done.reason != "stop":
        assert list(done.tokens) == ByteTokenizer().encode(answer)


def test_a_character_cut_short_is_shown_at_the_end_only(monkeypatch):
    ids = ByteTokenizer().encode("a🙂")
    scripted(monkeypatch, ids[:-1])
    done, pieces = run(ByteTokenizer())
    assert done.text == "a\ufffd" and pieces == ["a", "\ufffd"]


def test_a_stop_string_ends_the_drawing_at_its_last_token(monkeypatch):
    scripted(monkeypatch, ByteTokenizer().encode("one END two"))
    done, pieces = run(ByteTokenizer(), stop=["END"])
    assert (done.text, done.reason, len(done.tokens)) == ("one ", "stop", 7)
    assert "".join(pieces) == "one "


def test_a_stop_string_in_the_prompt_stops_nothing(monkeypatch):
    scripted(monkeypatch, ByteTokenizer().encode("ND more"))
    assert run(ByteTokenizer(), prompt="an END and E", stop=["END"])[0].text == "ND more"


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory):
    """As in Llama 2: the first space of a text is dropped when it is decoded; no BOS unless `bos`."""
    pieces = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "▁b"]
    model = tokenizers.models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, [("▁", "a"), ("▁", "b")], byte_fallback=True, unk_token="<unk>"
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    d = tokenizers.decoders
    tokenizer.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["</s>"])
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    tokenizer.save(str(path))
    return HFTokenizer(path)


def test_the_space_of_the_first_new_token_is_kept(monkeypatch, metaspace):
    ids = metaspace.encode("a b a")
    scripted(monkeypatch, ids[1:])
    assert run(metaspace, prompt="a")[0].text == " b a"


@settings(max_examples=60, deadline=None)
@given(prompt=st.text("ab é\ufffd", min_size=1, max_size=8), answer=st.text("ab é日\ufffd", max_size=12))
def test_only_new_text_is_returned_whatever_the_prompt_ends_in(metaspace, prompt, answer):
    for tokenizer, ids in (
        (ByteTokenizer(), ByteTokenizer().encode(answer)),
        (metaspace, metaspace.encode("a" + answer)[1:]),
    ):
        with pytest.MonkeyPatch.context() as patch:
            scripted(patch, ids)
            done, _ = run(tokenizer, prompt=prompt)
        ahead = len(tokenizer.decode(tokenizer.encode(prompt)))
        assert done.text == tokenizer.decode([*tokenizer.encode(prompt), *ids])[ahead:]


def test_a_prompt_begins_with_one_bos(monkeypatch, metaspace):
    given = scripted(monkeypatch, [])
    complete(NO_MODEL, None, ByteTokenizer(), ["ab", ""])
    assert given == [[1, 100, 101], [1]]
    given.clear()
    spelled = SimpleNamespace(bos_id=7, end_ids=(), encode=lambda t: [7, 8], decode=lambda ids: "")
    complete(NO_MODEL, None, spelled, ["<s>x"])
    assert given == [[7, 8]], "a BOS in the prompt's own text was doubled"
    given.clear()
    complete(NO_MODEL, None, metaspace, ["a"])
    assert given == [metaspace.encode("a")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(prompts="text"), r"prompts='text': expected a sequence"),
        (dict(prompts=["a"], stop="end"), r"stop='end': expected a sequence"),
        (dict(prompts=["a"], stop=["x", ""]), r"stop=\['x', ''\]: an empty string"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, message):
    with pytest.raises(SettingsError, match=message):
        complete(NO_MODEL, None, ByteTokenizer(), **arguments)


def test_an_empty_prompt_needs_a_bos(metaspace):
    with pytest.raises(SettingsError, match=r"prompts\[1\]='': is empty"):
        complete(NO_MODEL, None, metaspace, ["a", ""])


def test_a_model_streams_what_it_returns():
    model, params = common.model(FAMILY), common.params(FAMILY)
    pieces = {0: "", 1: ""}

    def stream(i, piece):
        pieces[i] += piece

    options = dict(max_new_tokens=24, sampling=GREEDY)
    ask = ["The ", "A longer prompt than a window: "]
    plain = generate_text(model, params, ByteTokenizer(), ask, **options)
    assert generate_text(model, params, ByteTokenizer(), ask, stream=stream, **options) == plain
    assert [pieces[0], pieces[1]] == plain
    stop = plain[0][3:6]
    stopped = generate_text(model, params, ByteTokenizer(), ask, stop=[stop], **options)
    assert stopped == [cut(whole, [stop]) for whole in plain]


def test_options_reach_what_they_are_of(monkeypatch):
    given, run = [], text.generate
    monkeypatch.setattr(text, "generate", lambda *args, **rest: given.append(rest) or run(*args, **rest))
    ask = common.model(FAMILY), common.params(FAMILY), ByteTokenizer(), "The "
    options = dict(cache_dtype="int8", batch_size=3, prefill_chunk=8, seed=4)
    api.generate_text(*ask, max_new_tokens=3, top_k=5, repetition_penalty=1.5, **options)
    assert options.items() <= given[0].items()
    assert given[0]["sampling"] == Sampling(top_k=5, repetition_penalty=1.5)
    with pytest.raises(TypeError, match="no_option"):
        api.generate_text(*ask, no_option=3)


def test_logprobs_are_those_of_the_tokens():
    model, params, options = common.model(FAMILY), common.params(FAMILY), dict(max_new_tokens=6, sampling=GREEDY)
    [done] = complete(model, params, ByteTokenizer(), ["ab"], **options)
    [want] = generate(model, params, [[1, *ByteTokenizer().encode("ab")]], **options)
    assert (done.tokens, done.logprobs) == (want.tokens, want.logprobs) and len(done.logprobs) == 6
