"""Slices by name, and the meshes that lie on them: what JAX itself lays, and what it refuses."""

import math

import jax
import pytest

from transformer.planning import chips, topology
from transformer.settings import SettingsError
from transformer.sharding import MESH_AXES, ShardingError

NAMES = ("v4:4x4x8", "v5e:16x16", "v5p:2x2x1", "v5p:8x8x16", "v6e:4x8", "tpu7x:2x2x2", "2*v5p:4x4x4")


@pytest.mark.parametrize("name", NAMES)
def test_names_are_read_and_written(name):
    found = topology.parse(name)
    assert found.name == name
    cores = 2 if name.startswith("tpu7x") else 1
    assert found.devices == found.chips * found.slices * cores
    assert len(found.places()) == found.chips * cores


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("v5p:4x4x4", (True,) * 3),
        ("v5p:2x4x4", (False,) * 3),
        ("v5e:8x16", (False, True)),
        ("v6e:16x16", (True,) * 2),
        ("v6e:8x8", (False,) * 2),
    ],
)
def test_links_go_around_in_whole_rows(name, wrap):
    assert topology.parse(name).wrap == wrap


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9:2x2", "unknown chip; use one of v4, v5e, v5p, v6e, tpu7x"),
        ("v6e-32", "an accelerator type; name the shape of its torus: v6e:4x8"),
        ("2*v5p-128", "name the shape of its torus: 2*v5p:4x4x4"),
        ("v5e-16", "name the shape of its torus: v5e:4x4"),
        ("v6e-31", "name a slice by the shape of its torus, such as v6e:4x4"),
        ("v5e:2x2x2", "v5e has 2 dimensions"),
        ("v5p:4x4x6", "no slice of v5p has this shape; the nearest are v5p:4x4x4 or v5p:4x4x8"),
        ("v5p:16x8x8", "the nearest are v5p:8x8x16 or"),
        ("v5e:3x4", "the nearest are v5e:2x4 or v5e:4x4"),
        ("3*v6e:3x4", "the nearest are 3*v6e:2x4 or 3*v6e:4x4"),
        ("0*v6e:4x4", "write slices as in"),
    ],
)
def test_what_is_not_offered_is_refused_with_the_nearest(name, message):
    with pytest.raises(SettingsError, match="topology='") as caught:
        topology.parse(name)
    assert message in str(caught.value)


@pytest.mark.parametrize("chip", chips.CHIPS)
def test_every_slice_that_is_offered_can_be_named(chip):
    sizes = [slices.chips for slices in topology.offered(chips.CHIPS[chip])]
    assert sizes == sorted(sizes) and len(sizes) > 7
    for slices in topology.offered(chips.CHIPS[chip])[:20]:
        assert topology.parse(slices.name) == slices


def sizes_of(name: str, **asked: int) -> dict[str, int]:
    return {axis: size for axis, size in topology.mesh_sizes(topology.parse(name), asked).items() if size > 1}


def test_axes_take_what_is_left():
    assert sizes_of("v5p:8x8x16", fsdp=64, expert=16) == {"fsdp": 64, "expert": 16}
    assert sizes_of("v5p:8x8x16", expert=16) == {"data": 64, "expert": 16}
    assert sizes_of("2*v6e:4x8", fsdp=-1, expert=4) == {"slice": 2, "fsdp": 8, "expert": 4}
    assert sizes_of("tpu7x:4x4x4", fsdp=64, tensor=2) == {"fsdp": 64, "tensor": 2}


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("v5p:8x8x8", dict(fsdp=32, expert=16), "the nearest mesh is fsdp=64,expert=8"),
        ("v6e:4x8", dict(fsdp=16, expert=2), "the nearest mesh is fsdp=8,expert=4"),
        ("v5p:4x4x4", dict(fsdp=5), "sizes multiply to 5, and v5p:4x4x4 has 64 devices; the nearest mesh is fsdp=64"),
        ("v5p:4x4x4", dict(fsdp=32, data=1), "sizes multiply to 32"),
        # As near as expert=32, and both axes are kept.
        ("v6e:4x8", dict(fsdp=2, expert=16), "the nearest mesh is fsdp=4,expert=8"),
        ("v6e:4x8", dict(fsdp=-1, expert=16), "the nearest mesh is fsdp=4,expert=8"),
        ("tpu7x:4x4x4", dict(data=2, fsdp=2, tensor=32), "of the torus of tpu7x:4x4x4 and its pairs of cores"),
    ],
)
def test_meshes_that_do_not_lie_are_refused_with_the_nearest(name, asked, message):
    with pytest.raises(ShardingError) as caught:
        topology.mesh_sizes(topology.parse(name), asked)
    assert message in str(caught.value)
    typed = ",".join(f"{axis}={size}" for axis, size in asked.items() if size != 1)
    assert str(caught.value).startswith(f"mesh={typed}: "), "the mesh that was asked for, and no other"


def test_the_nearest_mesh_is_one_that_holds():
    on = topology.parse("v6e:4x8")
    for asked in ({"fsdp": 2, "expert": 16}, {"expert": 12}, {"tensor": 3, "fsdp": 11}):
        near = topology.nearest(on, asked, lambda sizes: sizes["fsdp"] <= 4)
        assert topology.lies(on, near) and near["fsdp"] <= 4
        assert topology.nearest(on, near, lambda sizes: True) == near
    assert topology.nearest(on, {"expert": 2}, lambda sizes: False) is None


@pytest.mark.parametrize(
    ("name", "accelerator"),  # as the chips' pages list them
    [("v4:4x4x4", "v4-128"), ("v5e:16x16", "v5litepod-256"), ("v5p:2x2x1", "v5p-8"), ("v5p:16x16x24", "v5p-12288"),
     ("v6e:4x8", "v6e-32"), ("2*v6e:4x8", "v6e-32"), ("tpu7x:4x4x4", "tpu7x-128")],
)  # fmt: skip
def test_clouds_accelerator_types_count_chips_or_cores(name, accelerator):
    assert topology.parse(name).accelerator == accelerator


def test_unknown_axes_and_slices_are_refused():
    with pytest.raises(SettingsError, match="'fdsp' is no axis"):
        topology.mesh_sizes(topology.parse("v5p:4x4x4"), {"fdsp": 4})
    with pytest.raises(SettingsError, match=r"mesh\.slice=2: v5p:4x4x4 has 1"):
        topology.mesh_sizes(topology.parse("v5p:4x4x4"), {"slice": 2})


@pytest.mark.parametrize("name", ["v5p:2x4x4", "v6e:4x8", "tpu7x:2x2x4"])
def test_meshes_are_those_that_jax_lays(name):
    """Every factorisation along two axes: listed if and only if `jax.make_mesh` does not refuse it."""
    found = topology.parse(name)
    listed = {(m["fsdp"], m["tensor"]) for m in topology.meshes(found, ("fsdp", "tensor"))}
    for fsdp in (n for n in range(1, found.devices + 1) if found.devices % n == 0):
        sizes = [dict(fsdp=fsdp, tensor=found.devices // fsdp).get(axis, 1) for axis in MESH_AXES]
        try:
            jax.make_mesh(sizes, MESH_AXES, devices=found.places())
        except NotImplementedError:
            assert (fsdp, found.devices // fsdp) not in listed
        else:
            assert (fsdp, found.devices // fsdp) in listed
    assert math.prod(next(iter(listed))) == found.devices
