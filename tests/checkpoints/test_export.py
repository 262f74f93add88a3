"""Law: export ∘ import = identity, bit for bit, whatever the family, the shards and the mesh."""

import collections
import dataclasses
import json
import tempfile
import typing
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import transformer
from tests import common
from tests.checkpoints import common as golden
from transformer import families, sharding
from transformer.checkpoints import hugging_face, tensors, weights
from transformer.checkpoints.tensors import CheckpointError
from transformer.nn import initial
from transformer.nn.model import Transformer
from transformer.settings import Mesh
from transformer.spec import LinearScaling, PiecewiseScaling, YarnScaling

EXPORTED = [name for name in families.names() if hasattr(families.get(name), "to_hf")]
ONE_OF_ALL = golden.CASES[:: len(golden.CASES) // 4]


@pytest.mark.parametrize("case", golden.CASES)
def test_export_of_an_import_is_the_file(case, tmp_path):
    """The same names and the same bits; few-bit weights come out as what they stand for. And the same config."""
    model, params = golden.imported(case)
    transformer.to_hf(model, params, tmp_path / "out", companions=golden.GOLDEN / case)
    golden.assert_identical(golden.stored(tmp_path / "out" / "model.safetensors"), golden.weights(case))
    written = hugging_face.read_config(tmp_path / "out")
    assert hugging_face.read_spec(written) == model.spec
    assert (written["architectures"], written["model_type"], written["dtype"]) == (
        golden.config(case)["architectures"],
        golden.config(case)["model_type"],
        "float32",
    )
    assert {p.name for p in tmp_path.iterdir()} == {"out"}
    # What generates nothing has no word on how to.
    generates = {"generation_config.json"} if model.spec.decoder else set()
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"} | generates


@pytest.mark.parametrize("case", golden.CASES)
def test_what_the_original_config_says_is_written_again(case):
    """A field of theirs that we write has their value, so that `transformers` builds the same model."""
    origin, original = golden.imported(case)[0].spec.origin, golden.config(case)
    written = families.get(origin.family).to_hf(origin.dims)
    if not original.get("use_sliding_window"):
        original.pop("max_window_layers", None)  # says nothing then
    if original.get("scale_decoder_outputs") is False:
        original["tie_word_embeddings"] = False  # what a head of its own was called when it was published
    ours, theirs = (flat(config) for config in (written, original))
    differ = {name: (ours[name], theirs[name]) for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    assert not differ
    assert {name for name in theirs if "rope" in name} <= ours.keys()


@pytest.mark.parametrize("case", golden.CASES)
def test_numbers_of_a_config_have_the_type_that_theirs_have(case):
    """`transformers` refuses 16.0 where it declares an int."""
    origin = golden.imported(case)[0].spec.origin
    ours, theirs = flat(families.get(origin.family).to_hf(origin.dims)), flat(golden.config(case))
    # What lies in the groups of rope_parameters has no declared type.
    shared = {name for name in ours.keys() & theirs.keys() if "." not in name}
    wrong = {name: ours[name] for name in shared if type(ours[name]) is not type(theirs[name])}
    assert not wrong


def flat(config: dict, path: str = "") -> dict[str, object]:
    """Fields by path, without those that are null (absent) and the older spelling of rope_type."""
    found = {}
    for name, value in config.items():
        if isinstance(value, dict):
            found |= flat(value, f"{path}{name}.")
        elif value is not None and (name != "type" or "rope_type" not in config):
            found[path + name] = value
    return found


@pytest.mark.parametrize("case", ONE_OF_ALL)
def test_shards(case, tmp_path):
    """Many small files and an index read back alike; a tensor larger than a file has one for itself."""
    (model, params), limit = golden.imported(case), 6000
    transformer.to_hf(model, params, tmp_path / "out", shard_bytes=limit)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / hugging_face.INDEX).read_text())
    assert [f.name for f in files] == [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    sizes = {}
    for file in files:
        held = golden.stored(file)
        assert {index["weight_map"][name] for name in held} == {file.name}
        sizes[file] = [x.nbytes for x in held.values()]
        assert len(held) == 1 or sum(sizes[file]) <= limit
    assert any(len(s) > 1 for s in sizes.values()) and any(s[0] > limit for s in sizes.values())
    assert index["metadata"]["total_size"] == sum(map(sum, sizes.values()))
    assert len(index["weight_map"]) == sum(map(len, sizes.values()))
    back, values = transformer.from_hf(tmp_path / "out")
    assert back.spec == model.spec
    golden.assert_identical(values, params)


@pytest.mark.parametrize("case", ONE_OF_ALL)
def test_bfloat16(case, tmp_path):
    """Rounded once, from float32; parameters in bfloat16 are written as they are."""
    model, params = golden.imported(case)
    rounded = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    transformer.to_hf(model, params, tmp_path / "cast", dtype="bfloat16")
    transformer.to_hf(model, rounded, tmp_path / "as_is")
    for directory in ("cast", "as_is"):
        assert hugging_face.read_config(tmp_path / directory)["dtype"] == "bfloat16"
        golden.assert_identical(transformer.from_hf(tmp_path / directory, dtype="bfloat16")[1], rounded)
        wide = jax.tree.map(lambda x: x.astype("float32"), rounded)
        golden.assert_identical(transformer.from_hf(tmp_path / directory)[1], wide)


def first_mesh(model: Transformer) -> tuple[jax.sharding.Mesh, dict]:
    """(mesh, places of the parameters): the most divided mesh whose sizes divide the model's."""
    for sizes in ((2, 2, 1, 2), (4, 1, 1, 2), (2, 4, 1, 1), (4, 2, 1, 1)):
        mesh = sharding.make_mesh(Mesh(**dict(zip(("data", "fsdp", "expert", "tensor"), sizes, strict=True))))
        try:
            return mesh, initial.param_shardings(model, mesh)
        except sharding.ShardingError:
            continue
    raise AssertionError("no mesh divides this model")


@pytest.mark.parametrize("case", golden.CASES)
def test_import_onto_a_mesh(case):
    """Every parameter lies where a training run would have it, with the same values."""
    model, params = golden.imported(case)
    mesh, places = first_mesh(model)
    _, values = transformer.from_hf(golden.GOLDEN / case, mesh=mesh)
    assert jax.tree.map(lambda x: x.sharding, values) == places
    golden.assert_identical(values, params)
    table = values["embedding"]["token"]
    split = mesh.shape["fsdp"] * mesh.shape["tensor"]
    assert split > 1 and {shard.data.size for shard in table.addressable_shards} == {table.size // split}


@pytest.mark.parametrize("case", ONE_OF_ALL)
def test_each_tensor_is_read_once_a_leaf(case, monkeypatch):
    """Nothing but what the leaf in hand needs: no model, and no layer of another leaf, waits in host memory."""
    read, log, leaves = tensors.TensorFiles.read, [], []
    monkeypatch.setattr(tensors.TensorFiles, "read", lambda self, name: log.append(name) or read(self, name))

    def progress(path):
        leaves.append((path, tuple(log)))
        log.clear()

    model, params = transformer.from_hf(golden.GOLDEN / case, progress=progress)
    assert [path for path, _ in leaves] == list(golden.flatten(params)) and not log
    wanted = collections.defaultdict(list)
    for link in weights.links(families.get(model.spec.origin.family).table(model.spec), model.spec):
        for path, _ in link.leaves:
            wanted[path].append(link.name)
    assert {path: sorted(names) for path, names in leaves} == {path: sorted(names) for path, names in wanted.items()}


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_an_export_that_dies_leaves_nothing(error, tmp_path, monkeypatch):
    (model, params), save, calls = golden.imported(golden.CASES[0]), hugging_face.save_file, []

    def dies(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise error
        return save(*args, **kwargs)

    monkeypatch.setattr(hugging_face, "save_file", dies)
    with pytest.raises(type(error)):
        transformer.to_hf(model, params, tmp_path / "deep" / "out", shard_bytes=6000)
    assert list((tmp_path / "deep").iterdir()) == []


def test_a_full_directory_is_refused_and_an_empty_one_taken(tmp_path):
    model, params = golden.imported(golden.CASES[0])
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        transformer.to_hf(model, params, tmp_path)
    with pytest.raises(CheckpointError, match="not empty"):
        transformer.to_hf(model, params, tmp_path / "note.txt")
    assert [p.name for p in tmp_path.iterdir()] == ["note.txt"]
    (tmp_path / "empty").mkdir()
    transformer.to_hf(model, params, tmp_path / "empty")
    golden.assert_identical(transformer.from_hf(tmp_path / "empty")[1], params)


@st.composite
def dims(draw, family: str):
    """Random dimensions of a family: those of its tiny size, changed where there is a choice to make."""
    tiny = common.tiny_spec(family).origin.dims
    hints = typing.get_type_hints(type(tiny))
    kv_heads, head_dim = draw(st.integers(1, 3)), 2 * draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 3))
    layers = draw(st.integers(2, 7))
    scalings = {
        LinearScaling: LinearScaling(factor=4.0),
        PiecewiseScaling: PiecewiseScaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=32
        ),
        YarnScaling: draw(
            st.builds(
                YarnScaling,
                factor=st.just(4.0),
                beta_fast=st.sampled_from((32.0, 16.0)),
                beta_slow=st.just(1.0),
                original_max_length=st.just(64),
                attention_factor=st.sampled_from((None, 1.2)),
                mscale=st.sampled_from((None, 0.7)),
                mscale_all_dim=st.sampled_from((None, 1.0)),
                truncate=st.booleans(),
            )
        ),
        type(None): None,
    }
    vocab_size = draw(st.integers(2, 40))
    masked_lm, pooler = draw(st.booleans()), draw(st.booleans())
    choices = {
        "vocab_size": vocab_size,
        "decoder_start": draw(st.integers(0, vocab_size - 1)),
        "num_decoder_layers": draw(st.integers(1, 4)),
        "num_buckets": draw(st.sampled_from((4, 32))),
        "gated": draw(st.booleans()),
        "activation": draw(st.sampled_from(("relu", "silu", "gelu"))),
        "token_types": draw(st.integers(1, 3)),
        "masked_lm": masked_lm,
        "pooler": pooler,
        "next_sentence": pooler and draw(st.booleans()),
        "d_model": heads * head_dim,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "d_ff": draw(st.integers(1, 20)),
        "moe_d_ff": draw(st.integers(1, 20)),
        "pattern": draw(st.integers(1, 4)),
        "window": draw(st.integers(1, 9)),
        "full_layers": draw(st.integers(0, layers - 1)),
        "sparse_step": draw(st.integers(1, 3)),
        "q_rank": draw(st.sampled_from((None, 5))),
        "rope_theta": draw(st.sampled_from((1e4, 5e5))),
        "norm_eps": draw(st.sampled_from((1e-5, 1e-6))),
        "tied": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "final_softcap": draw(st.sampled_from((None, 30.0))),
        "attention_softcap": draw(st.sampled_from((None, 50.0))),
    }
    if type(None) in typing.get_args(hints.get("window")) and draw(st.booleans()):
        choices |= {"window": None, "full_layers": None}
    if "rope_scaling" in hints:
        choices["rope_scaling"] = scalings[draw(st.sampled_from(typing.get_args(hints["rope_scaling"])))]
    return dataclasses.replace(tiny, **{name: value for name, value in choices.items() if name in hints})


@pytest.mark.parametrize("family", EXPORTED)
@settings(max_examples=6, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_any_dimensions_come_back(family, data):
    """Written and read: the same spec and the same bits, NaN and infinity included."""
    model = transformer.build(families.make(family, data.draw(dims(family))))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    params = jax.tree.map(
        lambda x: rng.standard_normal(x.shape).astype(np.float32), transformer.init(model, abstract=True)
    )
    params["embedding"]["token"].flat[:2] = np.inf, -0.0
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out"
        transformer.to_hf(model, params, out, shard_bytes=data.draw(st.sampled_from((1000, 10**9))))
        back, values = transformer.from_hf(out)
    assert back.spec == model.spec
    golden.assert_identical(values, params)
