"""What a plan says that a device holds and sends, against states that JAX shards and steps that XLA compiles."""

import math

import jax
import pytest

from transformer import config, sharding
from transformer.figures.data import plan
from transformer.nn.model import Transformer
from transformer.planning.collectives import KINDS
from transformer.training.state import abstract_state

MESHES = [dict(data=8), dict(data=2, fsdp=2, tensor=2)]


def held(tree) -> int:
    """Bytes of the shards that a device has of a tree of shapes with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree) if x.shape)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_device_holds_at_least_its_shards_of_the_state(mesh):
    told = plan.training("llama3:tiny", 16, 64, **mesh)
    assert tuple(told) == plan.PARTS and told["cache"] == 0
    values = config.load_config("llama3:tiny").to_dict()
    values["mesh"] |= {"data": 1, **mesh}
    run = config.resolve(values)
    state = abstract_state(
        Transformer(run.spec, run.settings.compute), run.settings, sharding.make_mesh(run.settings.mesh)
    )
    # TPUs pad the last two axes to tiles, which of tiny arrays is much.
    assert held(state.params) <= told["parameters"] < 8 * held(state.params)
    assert told["optimizer"] == 2 * told["parameters"]


def test_a_split_model_is_a_part_of_it():
    whole, split = plan.training("llama3:8b", 64, 4096, data=8), plan.training("llama3:8b", 64, 4096, fsdp=8)
    assert whole["parameters"] == pytest.approx(4 * 8_030_261_248, rel=1e-3)
    assert split["parameters"] == pytest.approx(whole["parameters"] / 8, rel=1e-3)
    assert whole["parameters"] == pytest.approx(plan.PARAMETER_BYTES * plan.count("llama3:8b"), rel=1e-3)
    assert split["activations"] == pytest.approx(whole["activations"], rel=0.05), "of as many tokens"
    without = plan.training("llama3:8b", 64, 4096, remat="none", fsdp=8)
    assert without["activations"] > 3 * split["activations"]


def test_decoding_splits_rows_and_heads():
    whole, split = plan.decoding("llama3:8b", 64, 4096), plan.decoding("llama3:8b", 64, 4096, data=2, fsdp=2, tensor=2)
    positions = 64 * 32 * 4096 * 4
    assert whole["cache"] == 2 * 32 * 8 * 128 * 4096 * 64 * 2 + positions
    assert split["cache"] == pytest.approx(whole["cache"] / 8, rel=0.01)
    assert whole["parameters"] == pytest.approx(2 * 8_030_261_248, rel=1e-3)
    assert split["parameters"] == pytest.approx(whole["parameters"] / 4, rel=1e-3)


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
