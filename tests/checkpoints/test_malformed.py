"""What is damaged, unknown or hostile is refused with one clear error, before any tensor is read."""

import json
import logging
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import transformer
from tests.checkpoints import common as golden
from transformer import families
from transformer.checkpoints import tensors
from transformer.checkpoints.tensors import CheckpointError
from transformer.families import _rows
from transformer.settings import SettingsError
from transformer.spec import SpecError


@pytest.fixture
def directory(tmp_path) -> Path:
    """A whole checkpoint, to be damaged."""
    return golden.copy(golden.PLAIN, tmp_path / "model")


@pytest.fixture
def nothing_read(monkeypatch):
    """Fails the test when a tensor's values are read."""

    def read(self, name):
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(tensors.TensorFiles, "read", read)


def refused(directory: Path, match: str) -> None:
    """Import raises a `CheckpointError` that says `match`."""
    with pytest.raises(CheckpointError, match=match):
        transformer.from_hf(directory)


def rewrite(directory: Path, change) -> None:
    """The weights after `change` of the dict of tensors."""
    held = golden.stored(directory / golden.WEIGHTS)
    change(held)
    save_file(held, directory / golden.WEIGHTS)


def edit_config(directory: Path, **fields) -> None:
    values = json.loads((directory / "config.json").read_text()) | fields
    values = {name: value for name, value in values.items() if value is not golden.ABSENT}
    (directory / "config.json").write_text(json.dumps(values))


def test_nothing_is_wrong_with_the_directory(directory):
    """So that the tests below fail for their own reason."""
    _, plain = transformer.from_hf(directory)
    golden.shard(directory)
    golden.assert_identical(transformer.from_hf(directory)[1], plain)


@pytest.mark.parametrize("keep", [0, 4, 7, 8, 100, -1])
def test_truncated(directory, nothing_read, keep):
    content = (directory / golden.WEIGHTS).read_bytes()
    (directory / golden.WEIGHTS).write_bytes(content[:keep])
    refused(directory, "damaged or not a safetensors file")


def test_garbage(directory, nothing_read):
    (directory / golden.WEIGHTS).write_bytes(random.Random(0).randbytes(5000))
    refused(directory, "damaged or not a safetensors file")


@pytest.mark.parametrize("length", [2**63, 2**40, 10**6, 2**64 - 1])
def test_huge_header(directory, nothing_read, length):
    content = (directory / golden.WEIGHTS).read_bytes()
    (directory / golden.WEIGHTS).write_bytes(length.to_bytes(golden.HEADER, "little") + content[golden.HEADER :])
    refused(directory, "damaged or not a safetensors file")


def test_header_that_claims_a_huge_tensor(directory, nothing_read):
    entry = {"dtype": "F32", "shape": [10**9, 10**6], "data_offsets": [0, 4 * 10**15]}
    header = json.dumps({"model.norm.weight": entry}).encode()
    (directory / golden.WEIGHTS).write_bytes(len(header).to_bytes(golden.HEADER, "little") + header + bytes(64))
    refused(directory, "damaged or not a safetensors file")


def test_wrong_shape(directory, nothing_read):
    rewrite(directory, lambda held: held.update({"model.norm.weight": np.ones(7, np.float32)}))
    refused(directory, r"model\.norm\.weight: shape \(7,\), but config\.json implies")


def test_integers_are_no_weights(directory, nothing_read):
    def change(held):
        held["model.norm.weight"] = held["model.norm.weight"].astype(np.int32)

    rewrite(directory, change)
    refused(directory, r"model\.norm\.weight: .*I32")


def test_missing_and_unknown_names_are_listed_together(directory, nothing_read):
    def change(held):
        held["model.nrom.weight"] = held.pop("model.norm.weight")

    rewrite(directory, change)
    refused(directory, r"1 tensors are missing \[model\.norm\.weight\], 1 are not known \[model\.nrom\.weight\]")


def test_a_table_that_misses_the_spec_names_both_sides(directory, nothing_read, monkeypatch):
    """The mistake of who adds a family: a norm that the block hasn't, and none for the one that it has."""
    family = families.get(families.of_model_type(golden.config(golden.PLAIN)["model_type"]))
    names = {"attention_norm": "input_layernorm", "ffn_post_norm": "post_attention_layernorm"}
    monkeypatch.setattr(family, "table", lambda model: _rows.dense_decoder(model, names))
    leaf = r"decoder/body/block_0/{}/scale".format
    refused(directory, rf"1 parameters have no row \[{leaf('ffn_norm')}\], 1 rows .* \[{leaf('ffn_post_norm')}\]")


def test_buffers_are_left_alone(directory, monkeypatch):
    """Old files keep the rotary frequencies: neither an error nor read."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(directory, lambda held: held.update({name: np.ones(4, np.float32)}))
    read, names = tensors.TensorFiles.read, []
    monkeypatch.setattr(tensors.TensorFiles, "read", lambda self, name: names.append(name) or read(self, name))
    transformer.from_hf(directory)
    assert names and name not in names


def test_nan_is_told_with_its_tensor(directory, caplog):
    def change(held):
        held["model.norm.weight"][3] = np.nan

    rewrite(directory, change)
    with caplog.at_level(logging.WARNING):
        _, params = transformer.from_hf(directory)
    assert [record.getMessage() for record in caplog.records] == ["model.norm.weight has NaN weights"]
    assert np.isnan(params["decoder"]["final_norm"]["scale"]).sum() == 1


def test_missing_shard(directory, nothing_read):
    file = next(iter(golden.shard(directory).values()))
    (directory / file).unlink()
    refused(directory, f"{file}: missing")


def test_name_in_the_wrong_shard(directory, nothing_read):
    files = golden.shard(directory)
    one, other = sorted(set(files.values()))
    name = next(name for name, file in files.items() if file == one)
    golden.write_index(directory, files | {name: other})
    refused(directory, f"{name} is in the index but not in the file")


def test_shards_without_an_index(directory, nothing_read):
    golden.shard(directory)
    (directory / golden.INDEX).unlink()
    refused(directory, "2 safetensors files but no")


@pytest.mark.parametrize(
    "file",
    ["../other/model.safetensors", "{}/other/model.safetensors", "link/model.safetensors", "..", ".", "", "x" * 9999],
)
def test_index_that_leaves_the_directory(directory, nothing_read, file):
    other = golden.copy(golden.PLAIN, directory.parent / "other")
    (directory / "link").symlink_to(other, target_is_directory=True)
    files = golden.shard(directory)
    golden.write_index(directory, files | {"model.norm.weight": file.format(directory.parent)})
    refused(directory, "outside the directory|missing|can't be opened")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": [1]}', "[" * 100_000, "\xff"])
def test_index_that_is_none(directory, nothing_read, content):
    golden.shard(directory)
    (directory / golden.INDEX).write_bytes(content.encode("latin-1"))
    refused(directory, "not a safetensors index")


def test_pickle_is_refused_unopened(directory):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("the pickle was run",))

    (directory / golden.WEIGHTS).unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    refused(directory, r"pytorch_model\.bin is a pickle file, which can run code and is refused")


def test_empty_and_absent_directories(tmp_path):
    refused(tmp_path, r"config\.json: can't be read")
    refused(tmp_path / "none", r"config\.json: can't be read")
    (tmp_path / "config.json").mkdir()
    refused(tmp_path, r"config\.json: can't be read")


@pytest.mark.parametrize("case", golden.FEW_BITS)
@pytest.mark.parametrize("change", ["scale missing", "scale shape", "scale rank"])
def test_few_bit_weights_without_their_scales(case, change, tmp_path, monkeypatch):
    """Refused by their names or shapes; values are written byte by byte, since numpy has no 8-bit floats."""
    directory = golden.copy(case, tmp_path / "model")
    content = (directory / golden.WEIGHTS).read_bytes()
    length = int.from_bytes(content[: golden.HEADER], "little")
    header = json.loads(content[golden.HEADER :][:length])
    name = next(name for name in header if name.endswith(("_scale_inv", "_scales")))
    if change == "scale missing":
        header["other"] = header.pop(name)
    elif change == "scale rank":
        header[name]["shape"] = [int(np.prod(header[name]["shape"]))]
    else:
        header[name]["shape"] = [*header[name]["shape"][::-1], 1]
    damaged = json.dumps(header).encode()
    content = len(damaged).to_bytes(golden.HEADER, "little") + damaged + content[golden.HEADER + length :]
    (directory / golden.WEIGHTS).write_bytes(content)
    refused(directory, "scale|not known")


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "3", "null", "[" * 100_000, "1" * 5000, '{"a": 1}', '{"model_type": 3}', "\xff\xfe"]
)
def test_config_that_is_none(directory, nothing_read, content):
    (directory / "config.json").write_bytes(content.encode("latin-1"))
    refused(directory, r"config\.json: (not JSON|has no model_type)")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"model_type": "perceiver"}, "model_type='perceiver' is not known; use one of"),
        ({"flux_capacitor": True}, "flux_capacitor"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not implemented"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type='longrope' is not implemented"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "beta": 1}}, "beta"),
        ({"rope_parameters": ["linear"]}, "rope"),
        ({"hidden_size": golden.ABSENT}, "hidden_size is missing"),
        ({"vocab_size": golden.ABSENT}, "vocab_size is missing"),
        ({"hidden_size": "64"}, "'64'"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"head_dim": 7}, "7"),
    ],
)
def test_config_that_we_dont_implement(directory, nothing_read, fields, match):
    """The message names the field; it comes before the weights are looked for."""
    (directory / golden.WEIGHTS).unlink()
    edit_config(directory, **fields)
    with pytest.raises((SettingsError, SpecError), match=match):
        transformer.from_hf(directory)


def test_config_that_contradicts_the_weights(directory, nothing_read):
    edit_config(directory, num_hidden_layers=2)
    refused(directory, r"doesn't fit its config\.json: 0 tensors are missing, \d+ are not known \[")


def test_quantization_that_we_dont_implement(directory, nothing_read):
    for values in ({"quant_method": "gptq"}, {"quant_method": "fp8", "weight_block_size": [16]}, "fp8", [1]):
        edit_config(directory, quantization_config=values)
        refused(directory, "quantization_config")
