"""Sums over a whole slice through the TPU compiler: left to it, they would be all-reduces, twice the bytes."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from transformer import axes as ax
from transformer import sharding
from transformer.ops.products import product
from transformer.ops.sums import Sums
from transformer.planning import topology
from transformer.planning.collectives import collectives
from transformer.planning.compile import stay_off_tpus
from transformer.settings import Mesh

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='needs libtpu: pip install "jax[tpu]"'),
]
WIDTH, HIDDEN, LENGTH = 2048, 1024, 256


@pytest.mark.parametrize("names", [(ax.EMBED, ax.MLP), (ax.MLP, ax.EMBED)], ids=str)
@pytest.mark.parametrize("slices", ["v5p:4x4x4", "v5e:16x16"])
def test_a_gradient_is_scattered(slices, names):
    stay_off_tpus()
    devices = topology.parse(slices).describe()
    mesh = sharding.make_mesh(Mesh(data=1, fsdp=-1), devices)
    shape = (WIDTH, HIDDEN) if names[0] == ax.EMBED else (HIDDEN, WIDTH)

    def arrays(dims: tuple[int, ...], dtype, *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    rows = arrays((len(devices), LENGTH, shape[0]), jnp.bfloat16, "fsdp")
    weight = arrays(shape, jnp.float32, *["fsdp" if name == ax.EMBED else None for name in names])

    def total(weight, x):
        return jnp.sum(jnp.square(product(x, weight, 1, Sums(names)).astype(jnp.float32)))

    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(total), out_shardings=weight.sharding).lower(weight, rows).compile()
    found = collectives(program.as_text(), mesh.shape)
    size = 2 * WIDTH * HIDDEN
    sent = {kind: sum(c.total for c in found if c.kind == kind) for kind in ("all-reduce", "reduce-scatter")}
    assert sent["reduce-scatter"] == pytest.approx(size * (1 - 1 / len(devices)))
    assert sent["all-reduce"] < 0.01 * size
