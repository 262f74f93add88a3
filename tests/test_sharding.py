"""The mesh and the table from logical axes to it."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from transformer import axes as ax
from transformer import sharding
from transformer.settings import Mesh, Settings
from transformer.sharding import ShardingError, partition_spec


def mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, expert: int = 1, **more: int) -> jax.sharding.Mesh:
    sizes = Mesh(data=data, fsdp=fsdp, expert=expert, tensor=tensor, **more)
    return sharding.make_mesh(sizes, jax.devices()[: math.prod(dataclasses.asdict(sizes).values())])


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        (dict(), (1, 8, 1, 1, 1, 1)),
        (dict(data=1, fsdp=-1, tensor=2), (1, 1, 4, 1, 1, 2)),
        (dict(data=2, fsdp=2, tensor=2), (1, 2, 2, 1, 1, 2)),
        (dict(data=4, fsdp=2, tensor=-1), (1, 4, 2, 1, 1, 1)),
        (dict(data=1, expert=-1), (1, 1, 1, 8, 1, 1)),
        (dict(slice=2, context=2), (2, 2, 1, 1, 2, 1)),
    ],
)
def test_mesh_takes_all_devices(sizes, shape):
    got = sharding.make_mesh(Mesh(**sizes))
    assert got.axis_names == ("slice", "data", "fsdp", "expert", "context", "tensor") and got.devices.shape == shape
    assert set(got.axis_types) == {AxisType.Auto}
    assert {d.id for d in got.devices.flat} == {d.id for d in jax.devices()}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(data=3), "sizes multiply to 3, which doesn't divide 8 devices"),
        (dict(data=-1, tensor=16), "sizes multiply to 16, which doesn't divide 8 devices"),
        (dict(data=2, fsdp=2), "uses 4 of 8 devices; set one axis to -1"),
    ],
)
def test_mesh_that_does_not_fit_is_refused(sizes, message):
    with pytest.raises(ShardingError, match=message):
        sharding.make_mesh(Mesh(**sizes))


@pytest.mark.parametrize(
    ("names", "shape", "want"),
    [
        ((ax.EMBED, ax.HEADS, ax.HEAD_DIM), (8, 4, 3), ("fsdp", "tensor", None)),
        ((ax.EMBED, ax.KV_HEADS, ax.HEAD_DIM), (8, 2, 3), ("fsdp", "tensor", None)),
        ((ax.LAYERS, ax.MLP, ax.EMBED), (3, 8, 8), (None, "tensor", "fsdp")),
        ((ax.VOCAB, ax.EMBED), (8, 8), ("tensor", "fsdp")),
        ((ax.NORM,), (7,), (None,)),
        ((ax.BATCH, ax.LENGTH, ax.ACT_EMBED), (4, 7, 7), (("data", "fsdp"), None, None)),
        ((ax.BATCH, ax.LENGTH, ax.ACT_HEADS, None), (4, 7, 2, 7), (("data", "fsdp"), None, "tensor", None)),
        ((ax.BATCH, ax.LENGTH, ax.ACT_VOCAB), (4, 7, 8), (("data", "fsdp"), None, "tensor")),
    ],
)
def test_table(names, shape, want):
    assert partition_spec(names, shape, mesh(2, 2, 2)) == PartitionSpec(*want)
    # Axes of size 1 are left out: on one device every array is whole.
    assert partition_spec(names, shape, mesh()) == PartitionSpec(*(None for _ in shape))


def test_every_axis_name_has_a_rule_and_every_rule_a_mesh_axis():
    for table in sharding.RULES.values():
        assert set(table) == ax.ALL
        assert {axis for used in table.values() for axis in used} == set(sharding.MESH_AXES)


@pytest.mark.parametrize(
    ("names", "shape", "message"),
    [
        ((ax.EMBED,), (6,), "w: embed=6 can't be split 4 ways over mesh axes .'fsdp',.; change mesh.fsdp"),
        ((ax.BATCH,), (2,), "w: batch=2 can't be split 4 ways"),
        ((ax.HEADS, ax.MLP), (8, 8), "w: axes 'heads' and 'mlp' both want mesh axis 'tensor'"),
        (("hedas",), (8,), "w: unknown logical axis 'hedas'; axes.py lists"),
        ((ax.EMBED,), (8, 8), "w: 1 axis names"),
    ],
)
def test_names_that_do_not_fit_are_refused(names, shape, message):
    with pytest.raises(ShardingError, match=message):
        partition_spec(names, shape, mesh(1, 4, 2), what="w")


def test_unknown_axis_is_refused_on_one_device_too():
    with pytest.raises(ShardingError, match="unknown logical axis"):
        partition_spec(("hedas",), (8,), mesh())


def test_constrain_is_the_identity_only_without_a_mesh():
    x = jnp.ones((4, 2, 8))
    names = (ax.BATCH, ax.LENGTH, ax.ACT_MLP)
    assert sharding.constrain(x, names) is x
    for sizes in ((2, 2, 2), (8, 1, 1)):
        with jax.set_mesh(mesh(*sizes)):
            program = jax.make_jaxpr(lambda x: sharding.constrain(x, names))(jnp.ones((8, 2, 8)))
            assert "sharding_constraint" in str(program)
    with jax.set_mesh(mesh(2, 2, 2)):
        y = jax.jit(lambda x: sharding.constrain(x, names))(x)
        assert y.sharding.spec == PartitionSpec(("data", "fsdp"), None, "tensor")
        with pytest.raises(ShardingError, match="activation: batch=3 can't be split"):
            sharding.constrain(jnp.ones((3, 2, 8)), names)


def test_ways_counts_the_parts_of_the_mesh_in_force():
    assert sharding.ways(ax.VOCAB) == 1
    with jax.set_mesh(mesh(2, 2, 2)):
        assert sharding.ways(ax.VOCAB) == 2
        assert sharding.ways(ax.BATCH) == 4
        assert sharding.ways(ax.LENGTH) == 1


def test_experts_lie_on_their_axis_and_everything_else_is_split_over_it_too():
    two = mesh(1, 2, 2, expert=2)
    names = (ax.LAYERS, ax.EXPERTS, ax.EXPERT_EMBED, ax.MLP)
    assert partition_spec(names, (3, 8, 8, 8), two) == PartitionSpec(None, "expert", "fsdp", "tensor")
    assert partition_spec((ax.EMBED, ax.MLP), (8, 8), two) == PartitionSpec(("fsdp", "expert"), "tensor")
    assert partition_spec((ax.BATCH,), (8,), two) == PartitionSpec(("fsdp", "expert"))
    with pytest.raises(ShardingError, match=r"w: experts=6 can't be split 4 ways .*; change mesh.expert or the model"):
        partition_spec((ax.EXPERTS,), (6,), mesh(expert=4), what="w")


def test_platform_is_that_of_the_mesh_in_force():
    assert sharding.platform() == jax.default_backend() == "cpu"
    with jax.sharding.use_abstract_mesh(mesh(2).abstract_mesh):
        assert sharding.platform() == "cpu"


def test_rows_are_split_along_their_length_too_and_parameters_over_that_axis():
    two = mesh(1, 2, 2, context=2)
    assert partition_spec((ax.BATCH, ax.LENGTH, ax.ACT_HEADS), (4, 6, 2), two) == PartitionSpec(
        "fsdp", "context", "tensor"
    )
    assert partition_spec((ax.EMBED, ax.MLP), (8, 8), two) == PartitionSpec(("fsdp", "context"), "tensor")
    # In decoding, which has no length to split, rows are split instead.
    got = partition_spec((ax.BATCH, ax.LENGTH, ax.ACT_HEADS), (4, 1, 2), two, "decode")
    assert got == PartitionSpec(("fsdp", "context"), None, "tensor")
    placed = jax.device_put(np.zeros((4, 6)), sharding.batch_sharding(two))
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 3)}


def test_rows_that_do_not_divide_are_refused():
    sharding.check_length("data.seq_len", 24, mesh(1, 1, 2, context=4), halves=True)
    sharding.check_length("data.seq_len", 7, mesh(4), halves=True)
    for length, halves, rules, parts in (
        (20, True, "default", 8),
        (18, False, "default", 4),
        (20, False, "sequence", 8),
    ):
        message = f"data.seq_len={length}: mesh.context=4.* cuts rows into {parts} parts; use a multiple of {parts}"
        with pytest.raises(ShardingError, match=message):
            sharding.check_length("data.seq_len", length, mesh(1, 1, 2, context=4), halves, rules)


class Chip(NamedTuple):
    """What a mesh needs to know of a TPU."""

    id: int
    slice_index: int
    platform: str = "tpu"
    device_kind: str = "TPU imagined"
    process_index: int = 0
    core_on_chip: int = 0

    @property
    def coords(self) -> tuple[int, int, int]:
        """Each slice is a square of four."""
        return (self.id // 2 % 2, self.id // 4, 0)


def test_slices_of_tpus_lie_along_their_axis():
    """Collectives of all other axes stay in a slice."""
    chips = [Chip(i, i % 2) for i in range(8)]
    got = sharding.make_mesh(Mesh(slice=2, fsdp=2), chips).devices
    assert got.shape == (2, 2, 2, 1, 1, 1)
    assert [{chip.slice_index for chip in part.flat} for part in got] == [{0}, {1}]
    for wrong in (1, 4):
        with pytest.raises(ShardingError, match=f"mesh.slice={wrong}: the devices are of 2 slices; use mesh.slice=2"):
            sharding.make_mesh(Mesh(slice=wrong), chips)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 8, 1), (1, 1, 8), (8, 1, 1), (1, 2, 2, 2), (1, 1, 1, 8)])
def test_batch_is_split_over_all_axes_but_tensor(sizes):
    batch = np.arange(16).reshape(8, 2)
    parts = math.prod(sizes) // sizes[2]
    placed = jax.device_put(batch, sharding.batch_sharding(mesh(*sizes)))
    assert {shard.data.shape for shard in placed.addressable_shards} == {(8 // parts, 2)}
    np.testing.assert_array_equal(placed, batch)
    sharding.check_batch(8, mesh(*sizes))


def test_batch_that_does_not_divide_is_refused():
    with pytest.raises(ShardingError, match="=6: must divide over 4 devices"):
        sharding.check_batch(6, mesh(2, 2, 2))


def test_default_settings_fit_these_devices():
    sharding.check_batch(Settings().data.batch_size, sharding.make_mesh(Settings().mesh))
