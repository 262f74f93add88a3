"""Law: random small models of `transformers` are read as they compute, and written as they were read."""

import json
import tempfile
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import transformer
from tests.checkpoints import common as golden
from tests.parity import common as parity
from tests.parity import configs, encoder_configs
from transformer import families
from transformer.checkpoints import hugging_face, weights
from transformer.settings import SettingsError

SEEDS = range(6)
EVERY = {**configs.MAKERS, **encoder_configs.MAKERS}
RANDOM = [f"{family}-{seed}" for family in configs.MAKERS for seed in SEEDS]
quick_compiles = pytest.fixture(autouse=True, scope="module")(parity.quick_compiles)


def random_config(name: str) -> dict:
    """The config of a name in `RANDOM`."""
    return configs.MAKERS[name.rsplit("-", 1)[0]](Random(name))


def test_every_model_type_that_is_read_has_random_configs():
    made = {make(Random(0))["model_type"] for make in EVERY.values()}
    assert made == {kind for name in families.names() for kind in getattr(families.get(name), "MODEL_TYPES", ())}


@pytest.mark.parametrize("family", EVERY)
@settings(max_examples=5, derandomize=True, deadline=None, database=None)
@given(rng=st.randoms(use_true_random=False))
def test_what_is_read_is_written(family, rng):
    """Files of their names and shapes, imported and exported: the same bits, and a config that means the same."""
    config = EVERY[family](rng)
    spec = hugging_face.read_spec(config)
    abstract = weights.flatten(transformer.init(transformer.build(spec), abstract=True))
    shapes = {path: leaf.shape for path, leaf in abstract.items()}
    values = np.random.default_rng(0)
    links = weights.links(families.get(spec.origin.family).table(spec), spec)
    tensors = {
        link.name: values.standard_normal(weights.their_shape(link, shapes)).astype(np.float32) for link in links
    }
    with tempfile.TemporaryDirectory() as directory:
        theirs, out = Path(directory) / "in", Path(directory) / "out"
        theirs.mkdir()
        (theirs / "config.json").write_text(json.dumps(config))
        save_file(tensors, theirs / golden.WEIGHTS)
        model, params = transformer.from_hf(theirs)
        transformer.to_hf(model, params, out)
        golden.assert_identical(golden.stored(out / golden.WEIGHTS), tensors)
        assert model.spec == hugging_face.read_spec(hugging_face.read_config(out)) == spec


def test_a_window_of_qwen3_moe_slides_in_every_layer():
    """`transformers` reads no max_window_layers there, and its configs have no layer_types."""
    config = configs.qwen3_moe(Random(0)) | {"num_hidden_layers": 3, "max_window_layers": 3, "sliding_window": 8}
    for used, window in ((True, 8), (False, None)):
        spec = hugging_face.read_spec(config | {"use_sliding_window": used})
        assert [block.mixer.mask.window for block in spec.decoder.layers] == [window] * 3
    with pytest.raises(SettingsError, match="layer_types"):
        hugging_face.read_spec(config | {"use_sliding_window": True} | configs.layer_types([False, True, True]))


@pytest.mark.parametrize(
    ("family", "change", "missing"),
    [
        ("gpt_oss", {"rope_theta": 1e4, "rope_scaling": None}, "rope_scaling"),
        ("gpt_oss", {"rope_theta": 1e4}, "rope_scaling"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": golden.ABSENT}, "max_window_layers"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": golden.ABSENT}, "sliding_window"),
    ],
)
def test_what_transformers_would_fill_in_by_its_own_numbers_must_be_said(family, change, missing):
    config = configs.MAKERS[family](Random(0))
    config.pop("rope_parameters" if missing == "rope_scaling" else "layer_types", None)
    config = {name: value for name, value in (config | change).items() if value is not golden.ABSENT}
    with pytest.raises(SettingsError, match=missing):
        hugging_face.read_spec(config)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A model of theirs for every random config."""

    def job(name: str) -> parity.Job:
        config = random_config(name)
        tokens = np.random.default_rng(0).integers(0, config["vocab_size"], (2, configs.LENGTH))
        return parity.Job({"kind": "create", "config": config, "seed": 0}, {"tokens": tokens})

    return parity.ask(tmp_path_factory.mktemp("random"), {name: job(name) for name in RANDOM})


@pytest.mark.torch
@pytest.mark.parametrize("name", RANDOM)
def test_random_models_compute_the_same(name, theirs):
    """Imported from what they saved; the config that they were made of, in whatever spelling, says the same."""
    answer, config = theirs[name], random_config(name)
    assert "error" not in answer.found, f"{config}\n{answer.found['error']}"
    model, params = transformer.from_hf(answer.directory)
    assert hugging_face.read_spec(config) == model.spec
    with np.load(answer.directory / "inputs.npz") as inputs:
        got = parity.logits(model, params, inputs["tokens"].astype(np.int32))
    want = answer.arrays["logits"]
    error = parity.worst(got, want)
    print(f"  {name}: logits of size {abs(want).max():.1f} differ by {error:.1e}")
    assert abs(want).max() > 1
    assert error <= parity.LIMIT, config
