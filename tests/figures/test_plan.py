"""What a plan says that a device holds and sends, against states that JAX shards and steps that XLA compiles."""

import math

import jax
import pytest

from transformer import config, settings, sharding
from transformer.figures.data import plan
from transformer.nn.model import Transformer
from transformer.ops import cache as caches
from transformer.planning.collectives import KINDS
from transformer.sharding import ShardingError
from transformer.training.state import abstract_state

MESHES = [dict(data=8), dict(data=2, fsdp=2, tensor=2), dict(fsdp=2, context=2, tensor=2)]


def held(tree) -> int:
    """Bytes of the shards that a device has of a tree of shapes with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_device_holds_its_shards_of_the_state(mesh, dtype):
    told = plan.training("llama3:tiny", dtype, **mesh)
    values = config.load_config("llama3:tiny").to_dict()
    values["mesh"] |= {"data": 1, **mesh}
    values["optimizer"] |= dict(moments_dtype=dtype)
    run = config.resolve(values)
    model, there = Transformer(run.spec, run.settings.compute), sharding.make_mesh(run.settings.mesh)
    state = abstract_state(model, run.settings, there)
    counters = sum(x.dtype.itemsize for x in jax.tree.leaves(state.opt_state) if not x.shape)
    assert told["parameters"] == told["gradients"] == held(state.params)
    assert told["first moment"] + told["second moment"] == held(state.opt_state) - counters


@pytest.mark.parametrize("reference", ["llama3:tiny", "gemma3:tiny", "deepseek_v3:tiny"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_decoding_holds_whole_caches_and_weights_on_one_device(reference, dtype):
    model = config.resolve(config.load_config(reference)).spec
    made = jax.eval_shape(lambda: caches.init(model.decoder, 3, 40, dtype))
    rows = jax.tree.leaves(made.map(lambda layer: layer.positions))
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(made)) - sum(x.size * 4 for x in rows)
    told = plan.decoding(reference, 3, 40, cache_dtype=dtype)
    assert told["cache"] == whole
    numbers = sum(x.size for x in jax.tree.leaves(abstract_state(*_alone(model)).params))
    assert told["weights"] == 2 * numbers


def _alone(model):
    one = sharding.make_mesh(settings.Mesh(), jax.devices()[:1])
    return Transformer(model, settings.Compute()), settings.Settings(), one


def test_decoding_splits_rows_and_heads():
    whole = plan.decoding("llama3:tiny", 8, 64)
    split = plan.decoding("llama3:tiny", 8, 64, data=2, fsdp=2, tensor=2)
    assert split["cache"] == whole["cache"] / 8 and whole["weights"] / 5 < split["weights"] < whole["weights"] / 3
    with pytest.raises(ShardingError, match="3 ways"):
        plan.decoding("llama3:tiny", 8, 64, fsdp=3)


def test_a_compiled_step_sends_what_shapes_tell():
    sent = plan.compiled("llama3:tiny", fsdp=4, tensor=2)
    assert sum(sent.by_axis.values()) == pytest.approx(sum(sent.compiled.values()))
    assert {kind for _, kind in sent.by_axis} <= set(KINDS)
    assert {axes for axes, _ in sent.by_axis} <= {"fsdp", "tensor", "fsdp, tensor"}
    for purpose, must in sent.expected.items():
        assert sent.compiled[purpose] == pytest.approx(must, rel=0.1, abs=0.01 * sum(sent.expected.values()))
    along = sum(n for (axes, _), n in sent.by_axis.items() if axes == "tensor")
    assert along == pytest.approx(sent.compiled["activations"])
    with pytest.raises(ValueError, match="16 devices, and the host has 8"):
        plan.compiled("llama3:tiny", fsdp=16)


def test_more_tensor_parallelism_trades_parameters_for_activations():
    few, many = (plan.sent("llama3:8b", 64, 4096, fsdp=64 // ways, tensor=ways) for ways in (2, 8))
    assert many["parameters"] < few["parameters"] and many["activations"] > few["activations"]
