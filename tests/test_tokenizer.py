"""Laws of tokenizers: exact byte counts, round trips, streaming = decoding at once."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from transformer.settings import SettingsError
from transformer.tokenizer import ByteTokenizer, HFTokenizer, StreamDecoder, load_tokenizer

SAMPLE = ["the cat sat on the mat, naïve", "日本語 テキスト", "emoji 🙂🙃 and text", "x = y + 1\n\n  indented"] * 3
# Characters of one to four bytes, spaces in runs, and one that is the replacement character itself.
COMMON = st.sampled_from("ab  \n.éß日本🙂👩\u200d\u0301\ufffd")
TEXT = st.text(COMMON | st.characters(codec="utf-8", exclude_characters="<"), max_size=40)  # no "<s>" by chance


def byte_level_bpe(vocab_size=320, add_prefix_space=False, trim_offsets=False):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trim_offsets)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|endoftext|>", "<s>", "<pad>"]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(SAMPLE, trainer)
    return tokenizer


def metaspace_bpe():
    """As in Llama 2: spaces are ▁, unknown characters fall back to byte tokens, the first space is stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b", ".", "é"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocabulary, [("▁", "a"), ("▁", "b")], byte_fallback=True, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


BUILDERS = {
    "byte_level": byte_level_bpe,
    "byte_level_trimmed": lambda: byte_level_bpe(add_prefix_space=True, trim_offsets=True),
    "metaspace": metaspace_bpe,
}


@pytest.fixture(scope="module", params=["bytes", *BUILDERS])
def tokenizer(request, tmp_path_factory):
    if request.param == "bytes":
        return load_tokenizer("bytes")
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    BUILDERS[request.param]().save(str(path))
    return load_tokenizer(path)


@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_bytes_of_tokens_sum_to_those_of_the_text(tokenizer, text):
    ids, num_bytes = tokenizer.encode_with_bytes(text)
    assert ids.tolist() == tokenizer.encode(text)
    assert ids.shape == num_bytes.shape and ids.dtype == num_bytes.dtype == np.int32
    assert num_bytes.sum() == len(text.encode())
    assert (num_bytes >= 0).all()


def test_bytes_lie_on_the_tokens_they_belong_to(tmp_path):
    byte_level_bpe(vocab_size=0).save(str(tmp_path / "tokenizer.json"))  # no merges: a token is a byte
    tokenizer = load_tokenizer(tmp_path)
    _, num_bytes = tokenizer.encode_with_bytes("aÿ🦒z")
    assert num_bytes.tolist() == [1, 2, 0, 4, 0, 0, 0, 1]
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "é": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # drops spaces: they go to the next token, or the last
    words.save(str(tmp_path / "words.json"))
    _, num_bytes = load_tokenizer(tmp_path / "words.json").encode_with_bytes(" a  é   ")
    assert num_bytes.tolist() == [2, 7]


@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_decode_inverts_encode(tokenizer, text):
    ids = tokenizer.encode(text)
    assert bool(ids) == bool(text)  # no special tokens added
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids).lstrip(" ") == text.lstrip(" ")  # some tokenizers add or strip a first space


@settings(max_examples=60, deadline=None)
@given(text=TEXT, more=TEXT, data=st.data())
def test_streaming_equals_decoding_at_once(tokenizer, text, more, data):
    specials = [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None]
    ids = tokenizer.encode(text * 3) + specials + tokenizer.encode(more)
    stream, shown, at = StreamDecoder(tokenizer), "", 0
    while at < len(ids):
        step = data.draw(st.integers(1, 3))
        new = stream.push(ids[at : at + step])
        at += step
        shown += new
        assert not new.endswith("\ufffd")
        assert tokenizer.decode(ids).startswith(shown)
    assert shown + stream.flush() == tokenizer.decode(ids)
    assert stream.flush() == ""


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=80))
def test_streaming_invalid_bytes_equals_decoding_at_once(data):
    tokenizer = ByteTokenizer()
    ids = [byte + 3 for byte in data]
    stream = StreamDecoder(tokenizer)
    assert "".join(stream.push([i]) for i in ids) + stream.flush() == data.decode(errors="replace")


def test_streaming_keeps_the_space_after_many_specials(tokenizer):
    specials = [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None] * 40
    ids = tokenizer.encode("a b") + specials + tokenizer.encode(" a é🙂")
    stream = StreamDecoder(tokenizer)
    assert "".join(stream.push([i]) for i in ids) + stream.flush() == tokenizer.decode(ids)


def test_streaming_forgets_what_it_has_shown():
    stream = StreamDecoder(ByteTokenizer())
    for i in ByteTokenizer().encode("long text " * 100):
        stream.push([i])
    assert len(stream._ids) < 100


def test_byte_tokenizer_skips_specials_and_ids_beyond():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([1, *tokenizer.encode("é"), 2, 0, 259, 400, tokenizer.encode("z")[0]]) == "éz"


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    inner = byte_level_bpe()
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    text = "the cat sat on the mat" * 2
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("") == []


def test_special_ids_come_from_the_config_then_from_common_names(tmp_path):
    inner = byte_level_bpe()
    inner.save(str(tmp_path / "tokenizer.json"))
    start, end, pad = map(inner.token_to_id, ("<s>", "<|endoftext|>", "<pad>"))
    found = load_tokenizer(tmp_path)
    assert (found.bos_id, found.eos_id, found.pad_id) == (start, end, pad)
    config = {"bos_token": None, "eos_token": {"content": "<pad>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    told = load_tokenizer(tmp_path)
    assert (told.bos_id, told.eos_id, told.pad_id) == (None, pad, pad)
    assert told.identity != found.identity and told.identity == json.loads(json.dumps(told.identity))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<nowhere>"}))
    with pytest.raises(SettingsError, match="eos_token='<nowhere>'"):
        load_tokenizer(tmp_path)


def test_ids_that_objectives_need(tmp_path):
    tokenizer = ByteTokenizer()
    assert (tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id) == (1, 2, 259)
    assert tokenizer.sentinel_ids == tuple(range(260, 360))
    assert tokenizer.text_ids.tolist() == [byte + 3 for byte in range(256)]
    inner = byte_level_bpe()
    # T5 numbers its sentinels downwards.
    inner.add_special_tokens(["<mask>", *(f"<extra_id_{n}>" for n in reversed(range(3))), "<extra_id_7>"])
    inner.add_tokens(["ordinary"])
    inner.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(tmp_path)
    assert found.mask_id == inner.token_to_id("<mask>") and found.cls_id == inner.token_to_id("<s>")
    assert found.sentinel_ids == tuple(inner.token_to_id(f"<extra_id_{n}>") for n in range(3)) and found.sep_id is None
    specials = {"<|endoftext|>", "<s>", "<pad>", "<mask>", *(f"<extra_id_{n}>" for n in (0, 1, 2, 7))}
    assert set(found.text_ids.tolist()) == {i for token, i in inner.get_vocab().items() if token not in specials}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"mask_token": "<pad>", "sep_token": "<nowhere>"}))
    told = load_tokenizer(tmp_path)
    assert told.mask_id == inner.token_to_id("<pad>") and told.sep_id is None


def test_vocabulary_covers_the_largest_id(tmp_path):
    model = models.WordLevel({"a": 0, "b": 900}, unk_token="a")
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(model).save(str(path))
    tokenizer = HFTokenizer(path)
    assert tokenizer.vocab_size == 901 and tokenizer.eos_id is None


def test_bad_files_are_named(tmp_path):
    with pytest.raises(SettingsError, match=r"data.tokenizer='.*nowhere.json'.*bytes"):
        load_tokenizer(tmp_path / "nowhere.json")
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(SettingsError, match=r"other.json.*not a Hugging Face tokenizer.json"):
        load_tokenizer(tmp_path / "other.json")
