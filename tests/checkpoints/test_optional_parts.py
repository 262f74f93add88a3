"""Parts that some files have, tensors that some hold twice, and older names: read as they lie there, or refused."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import transformer
from tests.checkpoints import common as golden
from transformer.checkpoints import hugging_face
from transformer.checkpoints.tensors import CheckpointError
from transformer.settings import SettingsError


def changed(case, directory, change, **config):
    """A copy of a case with other tensors and fields."""
    path = golden.copy(case, directory / "hf")
    tensors = change(golden.stored(path / golden.WEIGHTS))
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, path / golden.WEIGHTS)
    (path / "config.json").write_text(json.dumps(golden.config(case) | config))
    return path


OLD = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


def old(name: str) -> str:
    for new, ending in OLD.items():
        name = name.removesuffix(new) + ending if name.endswith(new) else name
    return name


def test_gamma_and_beta_are_scale_and_bias(tmp_path):
    path = changed("bert", tmp_path, lambda tensors: {old(name): x for name, x in tensors.items()})
    golden.assert_identical(transformer.from_hf(path)[1], golden.imported("bert")[1])


@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("rename", [str, old])
def test_an_encoder_alone_with_and_without_prefix(prefix, rename, tmp_path):
    """And with the buffer that early files have."""

    def bare(tensors):
        kept = {n.removeprefix("bert."): x for n, x in tensors.items() if n.startswith("bert.")}
        kept["embeddings.position_ids"] = np.arange(64)[None]
        return {prefix + rename(name): x for name, x in kept.items()}

    model, params = transformer.from_hf(changed("bert", tmp_path, bare, architectures=["BertModel"]))
    assert model.spec.head is None and model.spec.pooler.classes is None
    want = {name: x for name, x in golden.imported("bert")[1].items() if name != "head"}
    want["pooler"] = {"dense": want["pooler"]["dense"]}
    golden.assert_identical(params, want)
    transformer.to_hf(model, params, tmp_path / "out")
    assert hugging_face.read_config(tmp_path / "out")["architectures"] == ["BertModel"]
    assert not any(name.startswith("bert.") for name in golden.stored(tmp_path / "out" / golden.WEIGHTS))
    golden.assert_identical(transformer.from_hf(tmp_path / "out")[1], params)


def test_the_weights_say_which_parts_there_are_and_else_the_architecture(tmp_path):
    path = changed("bert", tmp_path, dict, architectures=["BertForMaskedLM"])
    assert hugging_face.open_spec(path) == golden.imported("bert")[0].spec
    (path / golden.WEIGHTS).unlink()
    alone = hugging_face.open_spec(path)
    assert alone.pooler is None and alone.head is not None
    for stated in (None, [], ["BertForSequenceClassification"], "BertModel"):
        with pytest.raises(SettingsError, match="architectures"):
            hugging_face.read_spec(golden.config("bert") | {"architectures": stated})


ECHOES = {
    "bert": ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    "t5": ("lm_head.weight", "shared.weight"),
    "t5_v1_1": ("encoder.embed_tokens.weight", "shared.weight"),
    "marian": ("model.decoder.embed_tokens.weight", "model.shared.weight"),
}


@pytest.mark.parametrize("case", ECHOES)
def test_a_tensor_that_a_file_holds_twice_may_not_differ(case, tmp_path):
    name, original = ECHOES[case]
    same = changed(case, tmp_path / "same", lambda tensors: tensors | {name: tensors[original]})
    model, params = transformer.from_hf(same)
    golden.assert_identical(params, golden.imported(case)[1])
    transformer.to_hf(model, params, tmp_path / "out")
    assert name not in golden.stored(tmp_path / "out" / golden.WEIGHTS)
    other = changed(case, tmp_path / "other", lambda tensors: tensors | {name: tensors[original] + 1})
    with pytest.raises(CheckpointError, match=f"{name}: differs from {original}"):
        transformer.from_hf(other)


def test_an_untied_head_has_to_be_there_and_configs_may_not_contradict_themselves(tmp_path):
    path = changed("t5_v1_1", tmp_path, lambda t: {n: x for n, x in t.items() if n != "lm_head.weight"})
    with pytest.raises(CheckpointError, match=r"1 tensors are missing \[lm_head\.weight\]"):
        transformer.from_hf(path)
    both = golden.config("t5") | {"tie_word_embeddings": False, "scale_decoder_outputs": True}
    with pytest.raises(SettingsError, match="scale_decoder_outputs=True: contradicts"):
        hugging_face.read_spec(both)
    for tied in (True, False):
        plain = {n: x for n, x in golden.config("t5").items() if n != "scale_decoder_outputs"}
        assert hugging_face.read_spec(plain | {"tie_word_embeddings": tied}).head.tied is tied
