"""A checkpoint that sees images gives its text model, and what is left out is told."""

import json
import logging
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

import transformer
from tests.checkpoints import common as golden
from tests.checkpoints import published
from transformer.checkpoints import hugging_face, tensors
from transformer.checkpoints.tensors import CheckpointError
from transformer.settings import SettingsError

CASE = "gemma3"
# Names outside and inside the model, as published and as `transformers` 5 has them in memory.
SPELLINGS = {"published": ("language_model.model.", ""), "in memory": ("model.language_model.", "model.")}


@pytest.fixture(params=SPELLINGS)
def directory(request, tmp_path):
    """The text case, wrapped as the text model of a checkpoint that sees."""
    text, outside = SPELLINGS[request.param]
    held = golden.stored(golden.GOLDEN / CASE / golden.WEIGHTS)
    held = {text + name.removeprefix("model."): x for name, x in held.items()}
    seeing = ("vision_tower.vision_model.post_layernorm.weight", "vision_tower.vision_model.post_layernorm.bias",
              "multi_modal_projector.mm_input_projection_weight")  # fmt: skip
    held |= {outside + name: np.ones(3, np.float32) for name in seeing}
    save_file(held, tmp_path / golden.WEIGHTS)
    config = published.config("gemma-3-4b") | {"text_config": golden.config(CASE)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_text_model_is_read_and_the_rest_is_told_once(directory, caplog, monkeypatch, tmp_path):
    read, names = tensors.TensorFiles.read, []
    monkeypatch.setattr(tensors.TensorFiles, "read", lambda self, name: names.append(name) or read(self, name))
    with caplog.at_level(logging.WARNING):
        model, params = transformer.from_hf(directory)
    assert [record.getMessage() for record in caplog.records] == [
        "the model is read without vision_tower (2 tensors) and multi_modal_projector (1 tensors), which are left out"
    ]
    assert not [name for name in names if re.search("vision_tower|multi_modal", name)]
    want_model, want = golden.imported(CASE)
    assert model.spec == want_model.spec
    golden.assert_identical(params, want)
    transformer.to_hf(model, params, tmp_path / "out")
    written = hugging_face.read_config(tmp_path / "out")
    assert (written["model_type"], written["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    golden.assert_identical(golden.stored(tmp_path / "out" / golden.WEIGHTS), golden.weights(CASE))


def test_text_checkpoint_is_read_in_silence(caplog):
    with caplog.at_level(logging.WARNING):
        transformer.from_hf(golden.GOLDEN / CASE)
    assert not caplog.records


def test_what_is_neither_text_nor_seeing_is_refused(directory):
    held = golden.stored(directory / golden.WEIGHTS) | {"audio_tower.weight": np.ones(3, np.float32)}
    save_file(held, directory / golden.WEIGHTS)
    with pytest.raises(CheckpointError, match=r"1 are not known \[audio_tower\.weight\]"):
        transformer.from_hf(directory)


@pytest.mark.parametrize("field", ["hidden_size", "rope_scaling"])
def test_a_field_of_the_text_config_is_not_ignored(field):
    """Outside it or within, what is not known is refused."""
    plain = published.config("gemma-3-27b")
    for config in (plain | {field: 1}, plain | {"text_config": plain["text_config"] | {f"other_{field}": 1}}):
        with pytest.raises(SettingsError, match=field):
            hugging_face.read_spec(config)
    for text in (3, None, golden.ABSENT):
        config = {k: v for k, v in (plain | {"text_config": text}).items() if v is not golden.ABSENT}
        with pytest.raises(SettingsError, match="text_config"):
            hugging_face.read_spec(config)
