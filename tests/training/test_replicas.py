"""The guard finds a device whose copy of something replicated is another, and names both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.training.damage import with_bit_flipped
from transformer import settings, sharding
from transformer.training.replicas import ReplicaError, ReplicaGuard

MESH = settings.Mesh(data=2, fsdp=2, expert=2)


@pytest.fixture(scope="module")
def mesh():
    return sharding.make_mesh(MESH)


@pytest.fixture(scope="module")
def tree(mesh):
    """Everything from everywhere the same to nowhere, and some dtypes."""
    rng = np.random.default_rng(0)

    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    return {
        "everywhere": put(rng.normal(size=(3, 8)).astype(np.float32)),
        "halves": put(rng.normal(size=(8, 4)).astype(np.float32), "fsdp"),
        "quarters": put(jnp.asarray(rng.normal(size=(4, 8)), jnp.bfloat16), None, ("expert", "fsdp")),
        "apart": put(np.arange(16), ("data", "fsdp", "expert")),
        "step": put(np.int32(7)),
        "flags": put(np.array([True, False])),
    }


@pytest.fixture(scope="module")
def guard(tree):
    return ReplicaGuard(tree)


def test_sound_copies_pass(guard, tree):
    guard.check(tree, step=1)


@pytest.mark.parametrize("name", ["everywhere", "step", "flags"])
@pytest.mark.parametrize("device", [0, 5])
def test_one_bit_on_one_device_is_found_and_named(guard, tree, name, device):
    damaged = {**tree, name: with_bit_flipped(tree[name], device)}
    with pytest.raises(ReplicaError, match=rf"step 3: copies of {name} differ: 1 of 8 .*: \S*{device} \(process 0\)"):
        guard.check(damaged, step=3)


def test_of_two_copies_both_are_named(guard, tree):
    """There is no telling which is right; "quarters" has a copy on either side of the axis "data"."""
    with pytest.raises(ReplicaError, match="copies of quarters differ: 2 of 8 devices"):
        guard.check({**tree, "quarters": with_bit_flipped(tree["quarters"], 3)}, step=3)


def test_what_has_no_copies_may_be_anything(guard, tree):
    guard.check({**tree, "apart": with_bit_flipped(tree["apart"], 3)}, step=1)
