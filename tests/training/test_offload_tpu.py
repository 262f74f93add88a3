"""What rests in the host's memory, through the TPU compiler: `pytest -m slow tests/training/test_offload_tpu.py`."""

import importlib.util
import os

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import meshes
from transformer import sharding
from transformer.ops.checksum import checksums
from transformer.planning.accounting import parameters
from transformer.planning.topology import parse
from transformer.settings import Mesh
from transformer.training.replicas import _summing

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the libtpu of jax[tpu]"),
]
DEVICES = 4


def memory(policy: str, topology: str):
    run = meshes.run_of(meshes.DENSE, {"fsdp": DEVICES}, **meshes.POLICIES[policy])
    return run, meshes.compiled(run, parse(topology).describe(), apart=True).memory_analysis()


@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
def test_moments_rest_with_the_host(topology):
    """Both of them, in float32, and nothing of them with the device."""
    (run, there), (_, here) = (memory(name, topology) for name in ('moments_memory="pinned_host"', 'remat="full"'))
    moments = 2 * 4 * parameters(run.spec).total / DEVICES
    assert there.host_argument_size_in_bytes == pytest.approx(moments, rel=0.01)
    assert there.host_output_size_in_bytes == there.host_argument_size_in_bytes
    assert here.argument_size_in_bytes - there.argument_size_in_bytes == pytest.approx(moments, rel=0.01)


@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
def test_activations_wait_with_the_host(topology):
    """Each layer's up and gate, in bfloat16."""
    run, there = memory('remat="names", ffn_up, ffn_gate offloaded', topology)
    tokens = meshes.ROWS * meshes.LENGTH / DEVICES
    hidden = sum(block.ffn.d_ff for block in run.spec.layers)
    assert there.host_temp_size_in_bytes == pytest.approx(2 * 2 * tokens * hidden, rel=0.01)


def test_what_rests_with_the_host_is_sealed_and_compared_too():
    """It visits the device for its sum."""
    mesh = sharding.make_mesh(Mesh(data=1, fsdp=DEVICES), parse("v5e:2x2").describe())
    here = NamedSharding(mesh, PartitionSpec("fsdp"))
    places = here, here.with_memory_kind("pinned_host")
    arrays = [jax.ShapeDtypeStruct((64, 128), "float32", sharding=place) for place in places]
    for sums in (jax.jit(checksums), _summing(mesh, [here.spec, here.spec])):
        memory = sums.lower(arrays).compile().memory_analysis()
        assert memory.host_argument_size_in_bytes == 4 * 64 * 128 / DEVICES
