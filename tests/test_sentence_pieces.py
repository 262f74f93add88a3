"""Laws of SentencePiece models behind the protocol: exact byte counts, round trips, the roles that the files state."""

import io
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer.settings import SettingsError
from transformer.tokenizer import StreamDecoder, load_tokenizer

sentencepiece = pytest.importorskip("sentencepiece", reason="the extra [data] has it")

SAMPLE = ["the cat sat on the mat, naïve", "日本語 テキスト 🙂", "the dog runs under tables", "x = y + 1"] * 3
LLAMA = dict(model_type="bpe", byte_fallback=True, vocab_size=300, normalization_rule_name="identity",
             remove_extra_whitespaces=False)  # fmt: skip
T5 = dict(model_type="unigram", vocab_size=60, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
TEXT = st.text(st.sampled_from("ab  the\n.éß日本🙂ｆﬁ\u0301"), max_size=30)


def made(path, config=None, **fields):
    """A model file, trained on the sample; `config` lies beside it."""
    content = io.BytesIO()
    fields |= dict(hard_vocab_limit=False, minloglevel=2)
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(SAMPLE), model_writer=content, **fields)
    path.write_bytes(content.getvalue())
    if config is not None:
        path.with_name("tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return load_tokenizer(made(tmp_path_factory.mktemp("llama") / "tokenizer.model", **LLAMA))


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    return load_tokenizer(made(tmp_path_factory.mktemp("t5") / "spiece.model", {"extra_ids": 100}, **T5))


@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_bytes_of_tokens_sum_to_those_of_the_text(llama, t5, text):
    for tokenizer in (llama, t5):
        ids, sizes = tokenizer.encode_with_bytes(text)
        assert ids.tolist() == tokenizer.encode(text) and ids.dtype == sizes.dtype == np.int32
        assert (sizes >= 0).all() and (sizes.sum() == len(text.encode()) or not ids.size)
        assert set(ids.tolist()) <= {*tokenizer.text_ids.tolist(), tokenizer._pieces.unk_id()}


def test_bytes_lie_on_the_tokens_they_belong_to(llama):
    ids, sizes = llama.encode_with_bytes("the cat 🙃")
    pieces = [llama._pieces.id_to_piece(int(i)) for i in ids]
    assert pieces[0] == "▁the" and sizes[0] == 3 and "<0xF0>" in pieces
    assert sizes.sum() == 12 and sizes[pieces.index("<0xF0>") :].sum() == 4


@settings(max_examples=60, deadline=None)
@given(text=TEXT, more=TEXT)
def test_decoding_inverts_and_streams(llama, text, more):
    assert llama.decode(llama.encode(text)) == text
    ids = [*llama.encode(text), llama.eos_id, *llama.encode(more)]
    stream = StreamDecoder(llama)
    assert "".join(stream.push([i]) for i in ids) + stream.flush() == llama.decode(ids)


def test_roles_are_those_of_the_files(llama, t5, tmp_path):
    assert (llama.bos_id, llama.eos_id, llama.pad_id, llama.end_ids) == (1, 2, None, (2,))
    assert llama.sentinel_ids == () and llama.mask_id is None and llama.vocab_size == 300
    assert (t5.bos_id, t5.eos_id, t5.pad_id) == (None, 1, 0)
    # The last of the ids behind the pieces is <extra_id_0>, as in T5's checkpoints.
    assert t5.sentinel_ids[0] == t5.vocab_size - 1 and t5.sentinel_ids[-1] == t5.vocab_size - 100
    assert t5.decode([t5.sentinel_ids[0], *t5.encode("the cat"), 1]) == "the cat"
    listed = dict(user_defined_symbols=["<extra_id_0>", "<extra_id_1>"], control_symbols=["[MASK]", "[CLS]"])
    marked = load_tokenizer(
        made(tmp_path / "m.model", {"add_bos_token": False}, **LLAMA | dict(vocab_size=310), **listed)
    )
    pieces = [marked._pieces.id_to_piece(i) for i in (*marked.sentinel_ids, marked.mask_id, marked.cls_id)]
    assert pieces == ["<extra_id_0>", "<extra_id_1>", "[MASK]", "[CLS]"] and marked.sep_id is None
    assert not {*marked.sentinel_ids, marked.mask_id, 0, 1, 2} & set(marked.text_ids.tolist())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    published = load_tokenizer(tmp_path / "m.model", published=True)
    assert (marked.bos_id, marked.end_ids) == (1, (2,)) and (published.bos_id, published.end_ids) == (None, (2, 7))


def test_a_directory_and_another_process_give_the_same(llama, tmp_path):
    again = load_tokenizer(made(tmp_path / "tokenizer.model", **LLAMA).parent)
    assert again.identity == llama.identity and again.identity["kind"] == "sentencepiece"
    assert pickle.loads(pickle.dumps(again)).encode("the cat") == llama.encode("the cat")
    other = load_tokenizer(made(tmp_path / "other.model", **LLAMA | dict(vocab_size=305)))
    assert other.identity != llama.identity


def test_bad_files_are_named(tmp_path):
    (tmp_path / "bad.model").write_bytes(b"no model at all")
    with pytest.raises(SettingsError, match=r"data.tokenizer='.*bad.model': not a SentencePiece model"):
        load_tokenizer(tmp_path / "bad.model")
    with pytest.raises(SettingsError, match=r"data.tokenizer='.*none.model': can't be read"):
        load_tokenizer(tmp_path / "none.model")
    made(tmp_path / "good.model", {"extra_ids": "many"}, **LLAMA)
    with pytest.raises(SettingsError, match="extra_ids='many': expected int"):
        load_tokenizer(tmp_path / "good.model")
