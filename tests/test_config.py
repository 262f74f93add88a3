"""Config pages are found, validated, and compared by field."""

import json

import jax
import numpy as np
import pytest

import transformer
from transformer import config, families, sharding
from transformer.nn import initial
from transformer.nn.model import Transformer
from transformer.settings import Group, Mesh, Settings, SettingsError
from transformer.spec import SpecError


@pytest.mark.parametrize("family", families.names())
def test_every_page_resolves_by_name_and_by_path(family):
    page = config.load_config(family)
    assert config.resolve(config.load_config(f"configs/{family}.py")) == config.resolve(page)
    tiny = config.resolve(config.load_config(f"{family}:tiny"))
    assert tiny.settings == config.resolve(config.load_config(f"{family}:tiny").to_dict()).settings
    assert tiny.spec.vocab_size >= 259  # the byte tokenizer's


def test_a_page_starts_from_the_default_settings():
    page = config.load_config("gpt2:tiny")
    assert config.resolve(page).settings == Settings()


@pytest.mark.parametrize(
    ("reference", "match"),
    [
        ("llama9", "llama9.*unknown; use one of .*gpt2"),
        ("gpt2:huge", "huge.*unknown; use one of tiny, small"),
        ("configs/none.py", "no such page"),
        ("README.md:tiny", "README.md.*unknown; use one of"),
        ("./README.md:tiny", "no such page"),
        ("none/config.json", "can't be read .*give a run's config.json"),
        ("runs/config.json:tiny", "has no sizes"),
        ("configs/common.py", "no get_config"),
        ("gpt2:tiny,train.stepps=3", "train.stepps.*did you mean train.steps"),
        ("gpt2:tiny,3", "'3' behind the size is no field=value"),
        ("gpt2:tiny,trane.steps=3", "no such group"),
    ],
)
def test_wrong_references_are_told(reference, match):
    with pytest.raises(SettingsError, match=match):
        config.load_config(reference)


def test_a_runs_own_config_names_it(tmp_path):
    """What a workdir keeps gives the run again, its groups and tuples too; anything else is refused."""
    options = "optimizer.groups=({'axes': ('vocab',), 'lr': 0.5},),optimizer.clip_norm=1e999,seed=3"
    run, file = config.resolve(config.load_config(f"t5:tiny,{options}")), tmp_path / "config.json"
    file.write_text(json.dumps(run.values, indent=2))
    again = config.resolve(config.load_config(str(file)))
    assert (again.spec, again.settings) == (run.spec, run.settings)
    assert json.dumps(again.values, sort_keys=True) == json.dumps(run.values, sort_keys=True)
    for text, said in (('{"model": ', "damaged"), ("[1]", "not the config of a run")):
        file.write_text(text)
        with pytest.raises(SettingsError, match=said):
            config.load_config(str(file))


def test_fields_behind_a_size_are_overrides():
    """With commas in brackets and quotes left alone; a default size may stay unsaid."""
    texts = {
        "train.steps": "70", "data.paths": "('a,b', 'c')", "data.source": "text", "data.tokenizer": "x{1}.json",
        "optimizer.groups": "({'axes': ('vocab', 'embed'), 'lr': 0.5},)",
    }  # fmt: skip
    found = config.load_config("gpt2:tiny," + ",".join(f"{name}={text}" for name, text in texts.items()))
    values = config.load_config("gpt2:tiny").to_dict()
    for name, text in texts.items():
        config.override(values, name, text)
    assert config.resolve(found) == config.resolve(values)
    settings = config.resolve(found).settings
    assert settings.data.paths == ("a,b", "c") and settings.optimizer.groups == (
        Group(axes=("vocab", "embed"), lr=0.5),
    )
    unsaid, plain = (config.resolve(config.load_config(name)) for name in ("llama3:,train.steps=90", "llama3"))
    assert unsaid.spec == plain.spec and unsaid.settings.train.steps == 90


def test_a_page_elsewhere_is_loaded_by_its_path(tmp_path):
    text = "from configs import gpt2\n\n\ndef get_config():\n    return gpt2.get_config('tiny')\n"
    (tmp_path / "mine.py").write_text(text)
    assert config.resolve(config.load_config(str(tmp_path / "mine.py"))).spec.d_model == 64


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"family": "none"}, SettingsError, "model.family='none'"),
        ({"num_layers": "3"}, SettingsError, "model.num_layers='3': expected int"),
        ({"heads": 3}, SettingsError, "model.heads=3: unknown field"),
        ({"num_heads": 3}, SpecError, "d_model=64: must be a multiple of num_heads=3"),
        ({"max_length": 16}, SettingsError, "data.seq_len=256.*model.max_length=16"),
    ],
)
def test_a_wrong_model_is_told(change, error, match):
    page = config.load_config("gpt2:tiny").to_dict()
    page["model"].update(change)
    with pytest.raises(error, match=match):
        config.resolve(page)


def test_an_encoder_alone_samples_no_text():
    page = config.load_config("bert:tiny").to_dict()
    page["train"]["sample_every"] = 10
    with pytest.raises(SettingsError, match=r"train\.sample_every=10: an encoder alone writes no text"):
        config.resolve(page)


def test_differences_name_the_fields():
    old = {"a": 1, "group": {"same": [1, 2], "new": None}, "gone": "x"}
    new = {"a": 2, "group": {"same": (1, 2), "new": 3}}
    assert config.differences(old, new) == ["a: 1 -> 2", "gone: 'x' -> None", "group.new: None -> 3"]


def test_build_takes_names_paths_configs_and_specs():
    page = config.load_config("qwen3:tiny")
    by_name = transformer.build("qwen3:tiny", dtype="bfloat16")
    page.compute.dtype = "bfloat16"
    assert by_name == transformer.build(page) == transformer.build("configs/qwen3.py:tiny", dtype="bfloat16")
    assert by_name == transformer.build(by_name.spec, dtype="bfloat16")
    with pytest.raises(SettingsError, match=r"compute\.attention='splish'"):
        transformer.build("qwen3:tiny", attention="splish")


def test_initial_parameters_are_the_same_on_a_mesh_and_lie_where_they_should():
    model = transformer.build("llama3:tiny")
    mesh = sharding.make_mesh(Mesh(data=2, fsdp=2, tensor=2))
    alone, spread = transformer.init(model, seed=3), transformer.init(model, seed=3, mesh=mesh)
    shapes, places = transformer.init(model, abstract=True), initial.param_shardings(model, mesh)
    for one, many, shape, place in zip(*map(jax.tree.leaves, (alone, spread, shapes, places)), strict=True):
        np.testing.assert_array_equal(one, many)
        assert (one.shape, one.dtype) == (shape.shape, shape.dtype)
        assert many.sharding.is_equivalent_to(place, many.ndim)
    table = spread["embedding"]["token"]
    assert table.addressable_shards[0].data.shape == (table.shape[0] // 2, table.shape[1] // 2)


def test_abstract_parameters_of_the_largest_size_cost_nothing():
    params = transformer.init(Transformer(transformer.build("llama3:3.1-405b").spec), abstract=True)
    assert sum(x.size for x in jax.tree.leaves(params)) > 4e11
