"""Initial parameters: their scale, their names, and that a mesh changes where they lie and not what they are."""

import jax
import numpy as np
import pytest

from tests import common
from transformer import sharding, spec
from transformer.nn import initial
from transformer.nn.parameter import Named
from transformer.settings import Mesh
from transformer.sharding import ShardingError

# The one that compiles fastest.
PLAIN = [f for f in common.DECODERS if type(common.tiny_spec(f).layers[0].ffn) is spec.FeedForward]
FAMILY = min(PLAIN, key=lambda family: len(set(common.tiny_spec(family).layers)))


def test_scale_of_the_initial_parameters():
    """Kernels have standard deviation 1/sqrt(fan_in), the outputs of residual branches 1/sqrt(2 L) of that.

    Truncation at two deviations takes 12 % off all but the tables.
    """
    net = common.model(FAMILY)
    depth, first = net.spec.decoder.num_layers, net.spec.layers[0]
    params = jax.device_get(initial.params(net, seed=0))
    block = jax.tree.map(lambda x: x[0], params["decoder"]["body"]["block_0"])
    gain = (2 * depth) ** -0.5
    heads = first.mixer.num_heads * first.mixer.head_dim
    for kernel, fan_in, factor in (
        (block["attention"]["query"]["kernel"], net.spec.d_model, 1),
        (block["attention"]["out"]["kernel"], heads, gain),
        (block["ffn"]["up"]["kernel"], net.spec.d_model, 1),
        (block["ffn"]["down"]["kernel"], first.ffn.d_ff, gain),
        (params["embedding"]["token"], net.spec.d_model, 1),
    ):
        assert np.std(kernel) == pytest.approx(factor * fan_in**-0.5, rel=0.16)
    assert (block["attention_norm"]["scale"] + first.norm.offset == 1).all()
    body = params["decoder"]["body"]["block_0"]["ffn"]["up"]["kernel"]
    assert np.abs(body[0] - body[1]).max() > 0, "repeats must not start alike"


# Post-norm and pre-norm, scaled and plain embeddings, tied heads and not, experts, latents, two stacks.
VARIED = {"bert", "deepseek_v3", "gemma3", "marian", "t5"}


@pytest.mark.parametrize("family", common.often(VARIED))
def test_initial_model_predicts_almost_uniformly(family):
    net = common.model(family)
    batch = common.packed_batch(family)
    # The program of the laws, compiled already.
    losses = common.objective(net)(initial.params(net, 0), batch).losses[batch.weights > 0]
    # Where a scaled token vector stays large in the features, the tied head prefers the token itself.
    itself = net.spec.head.tied and net.spec.embedding.scale and net.spec.trunk.layers[-1].placement == "post"
    assert np.mean(losses) == pytest.approx(np.log(net.spec.vocab_size), abs=1.5 if itself else 0.7)


def test_mesh_changes_no_initial_value():
    net, mesh = common.model(FAMILY), sharding.make_mesh(Mesh(data=2, fsdp=2, tensor=2))
    whole, parts = initial.params(net, seed=3), initial.params(net, seed=3, mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(parts), jax.device_get(whole))
    assert jax.tree.map(lambda x: x.sharding, parts) == initial.param_shardings(net, mesh)
    other = initial.params(net, seed=4)
    assert np.abs(other["embedding"]["token"] - whole["embedding"]["token"]).max() > 0


def test_parameter_that_does_not_divide_is_named():
    mesh = sharding.make_mesh(Mesh(data=1, fsdp=1, tensor=8))
    with pytest.raises(ShardingError, match=r"decoder/body/block_0/attention/\w+/\w+: (kv_)?heads="):
        initial.param_shardings(common.model(FAMILY), mesh)


def test_scan_names_the_axis_that_it_stacks():
    box = Named(np.zeros((2, 3)), ("embed", "mlp"))
    stacked = box.add_axis(0, {"partition_name": "layers"})
    assert stacked.names == ("layers", "embed", "mlp")
    assert stacked.remove_axis(0, {"partition_name": "layers"}).names == box.names
    with pytest.raises(ValueError, match="is not 'layers'"):
        box.remove_axis(0, {"partition_name": "layers"})
