"""Modules of multi-token prediction in Hugging Face directories: written, read, left out, and never half of them."""

import dataclasses
import functools
import json

import flax.linen as nn
import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import transformer
from tests import common
from tests.checkpoints import common as golden
from transformer import families
from transformer.checkpoints.tensors import CheckpointError
from transformer.nn import initial
from transformer.nn.model import Transformer

FAMILY = next(family for family in common.FAMILIES if common.tiny_spec(family).mtp)
DEPTH, LAYERS, FIELD = 2, common.tiny_spec(FAMILY).decoder.num_layers, "num_nextn_predict_layers"
MODULES = tuple(f"model.layers.{LAYERS + k}." for k in range(DEPTH))


@functools.cache
def model() -> Transformer:
    dims = dataclasses.replace(common.tiny_spec(FAMILY).origin.dims, mtp=DEPTH)
    return Transformer(families.make(FAMILY, dims), common.model(FAMILY).compute)


@functools.cache
def params() -> dict:
    rng = np.random.default_rng(0)
    shapes = nn.meta.unbox(initial.abstract_params(model()))
    return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), shapes)


@pytest.fixture
def directory(tmp_path):
    transformer.to_hf(model(), params(), tmp_path / "hf")
    return tmp_path / "hf"


def rewrite(directory, change) -> None:
    """Changes the tensors of a directory as they lie there."""
    tensors = golden.stored(directory / golden.WEIGHTS)
    change(tensors)
    save_file(tensors, directory / golden.WEIGHTS, metadata={"format": "pt"})


def test_import_of_an_export_is_the_model_and_its_export_the_file(directory, tmp_path):
    back, values = transformer.from_hf(directory)
    assert back.spec == model().spec and back.spec.mtp.depth == DEPTH
    golden.assert_identical(values, params())
    transformer.to_hf(back, values, tmp_path / "again")
    golden.assert_identical(*(golden.stored(d / golden.WEIGHTS) for d in (tmp_path / "again", directory)))
    assert json.loads((directory / "config.json").read_text())[FIELD] == DEPTH


def test_names_and_layouts_are_the_published_ones(directory):
    """Further layers, with copies of what they share; of the projection's columns the embedding's come first."""
    held, width = golden.stored(directory / golden.WEIGHTS), model().spec.d_model
    own = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    shared = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    last = f"model.layers.{LAYERS - 1}."
    of_layer = {name.removeprefix(last) for name in held if name.startswith(last)}
    for depth, prefix in enumerate(MODULES):
        module = params()["mtp"][f"depth_{depth}"]
        assert {n.removeprefix(prefix) for n in held if n.startswith(prefix)} == of_layer | own | shared.keys()
        for name, original in shared.items():
            np.testing.assert_array_equal(held[prefix + name], held[original])
        kernel = held[prefix + "eh_proj.weight"]
        np.testing.assert_array_equal(kernel[:, :width], module["projection"]["kernel"][:width].T)
        for theirs, ours in (("enorm", "embedding_norm"), ("hnorm", "hidden_norm")):
            np.testing.assert_array_equal(held[f"{prefix}{theirs}.weight"], module[ours]["scale"])
        np.testing.assert_array_equal(
            held[prefix + "shared_head.norm.weight"], module["decoder"]["final_norm"]["scale"]
        )


def test_copies_may_be_missing_but_not_differ(directory):
    copy = f"{MODULES[1]}shared_head.head.weight"
    rewrite(directory, lambda tensors: tensors.pop(copy))
    golden.assert_identical(transformer.from_hf(directory)[1], params())
    other = f"{MODULES[0]}embed_tokens.weight"
    rewrite(directory, lambda tensors: tensors.update({other: tensors[other] + 1}))
    with pytest.raises(CheckpointError, match=rf"{other}: differs from model\.embed_tokens\.weight"):
        transformer.from_hf(directory)


def test_modules_that_no_file_holds_are_left_out_and_half_of_them_refused(directory, tmp_path):
    """`transformers` saves the config's field and not the tensors."""
    rewrite(directory, lambda tensors: tensors.pop(f"{MODULES[0]}hnorm.weight"))
    with pytest.raises(CheckpointError, match=r"1 tensors are missing.*hnorm"):
        transformer.from_hf(directory)
    drop = [name for name in golden.stored(directory / golden.WEIGHTS) if name.startswith(MODULES)]
    rewrite(directory, lambda tensors: [tensors.pop(name) for name in drop])
    back, values = transformer.from_hf(directory)
    rest = {name: x for name, x in params().items() if name != "mtp"}
    assert back.spec == dataclasses.replace(model().spec, mtp=None)
    golden.assert_identical(values, rest)
    transformer.to_hf(back, values, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())[FIELD] == 0


def test_one_module_can_be_left_out_on_request(tmp_path):
    one = Transformer(common.tiny_spec(FAMILY), model().compute)
    assert one.spec.mtp.depth == 1
    values = {**params(), "mtp": {"depth_0": params()["mtp"]["depth_0"]}}
    transformer.to_hf(one, values, tmp_path / "hf")
    back, rest = transformer.from_hf(tmp_path / "hf", mtp=False)
    assert back.spec.mtp is None and back.spec.origin.dims.mtp == 0
    golden.assert_identical(rest, {name: x for name, x in params().items() if name != "mtp"})


@pytest.mark.parametrize("value", [-1, 1.5, "1", True, 10**9])
def test_a_depth_that_is_no_number_of_modules_is_refused(directory, value):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {FIELD: value}))
    with pytest.raises(ValueError, match=rf"{FIELD}="):
        transformer.from_hf(directory)
