"""Gradients of weights on meshes: the plain ones, summed once, in parts, and in the dtype asked for."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from transformer import axes as ax
from transformer import sharding
from transformer.ops.products import product
from transformer.ops.sums import Sums, gathered, scattered_sum
from transformer.settings import Mesh

B, T, D, F, N, H = 8, 4, 32, 6, 4, 3
# A weight's axes and sizes, and how many of them are summed over.
WEIGHTS = {
    "in": ((ax.EMBED, ax.MLP), (D, F), 1),
    "out": ((ax.MLP, ax.EMBED), (F, D), 1),
    "heads": ((ax.EMBED, ax.HEADS, ax.HEAD_DIM), (D, N, H), 1),
    "from heads": ((ax.HEADS, ax.HEAD_DIM, ax.EMBED), (N, H, D), 2),
    "whole": ((ax.EMBED_OUT, ax.ROUTES), (D, F), 1),
}
MESHES = [
    dict(fsdp=8),
    dict(data=2, fsdp=4),
    dict(data=8),
    dict(fsdp=2, expert=4),
    dict(fsdp=2, context=2, tensor=2),
    dict(slice=2, fsdp=4),
]


def mesh_of(sizes: dict[str, int]) -> jax.sharding.Mesh:
    return sharding.make_mesh(Mesh(**{"data": 1} | sizes))


def small(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Whole numbers of which float32 sums are exact in any order, and bfloat16 ones if they are few."""
    return rng.integers(-4, 5, shape).astype(np.float32)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("which", WEIGHTS)
def test_gradients_are_those_of_one_device(which, sizes):
    names, shape, count = WEIGHTS[which]
    rng = np.random.default_rng(0)
    x, weight = small(rng, B, T, *shape[:count]), small(rng, *shape)
    d = small(rng, B, T, *shape[count:])

    def total(x, weight):
        return jnp.sum(product(x, weight, count, Sums(names)) * d)

    want = jax.grad(total, argnums=(0, 1))(x, weight)
    with jax.set_mesh(mesh_of(sizes)):
        got = jax.jit(jax.grad(total, argnums=(0, 1)))(x, weight)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        (dict(fsdp=8), ("fsdp",)),
        (dict(data=2, fsdp=4), ("fsdp",)),
        (dict(fsdp=4, expert=2), ("fsdp", "expert")),
        (dict(slice=2, fsdp=4), ("fsdp",)),
    ],
    ids=str,
)
def test_stages_are_one_sum(sizes, axes):
    """Each device has the part that its place on the axes says, whether or not they span all devices of a slice."""
    x = small(np.random.default_rng(1), 8, 3, 16)
    others = tuple(axis for axis in sizes if axis not in axes)
    run = functools.partial(scattered_sum, axes=axes, dimension=2)
    with jax.set_mesh(mesh_of(sizes)):
        out = PartitionSpec(others or None, None, axes)
        got = jax.jit(jax.shard_map(run, in_specs=PartitionSpec(tuple(sizes)), out_specs=out))(x)
    want = x.reshape(*sizes.values(), 3, 16).sum(tuple(list(sizes).index(axis) for axis in axes))
    np.testing.assert_array_equal(got, want.reshape(-1, 3, 16))


SUM = r'"stablehlo\.(reduce_scatter|all_reduce)".*?\}\) : \(tensor<([\dx]*)x?([a-z]+\d+)>'


def reduced(program: str) -> list[tuple[str, str, int]]:
    """(what, dtype, numbers) of the sums over devices in a lowered program."""
    found = re.findall(SUM, program, re.DOTALL)
    return [(what, dtype, int(np.prod([int(n) for n in dims.split("x") if n]))) for what, dims, dtype in found]


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_sums_are_scattered_in_two_stages_and_in_the_dtype_asked_for(dtype):
    names, shape, count = WEIGHTS["out"]
    x, weight = jnp.ones((B, T, F), jnp.bfloat16), jnp.ones(shape)

    def total(weight):
        return jnp.sum(product(x, weight, count, Sums(names, dtype=dtype)))

    with jax.set_mesh(mesh_of(dict(fsdp=8))):
        program = jax.jit(jax.grad(total)).lower(weight).as_text()
    kind = "bf16" if dtype is None else "f32"
    assert reduced(program) == [("reduce_scatter", kind, D * F), ("reduce_scatter", kind, D * F // 2)]


def test_what_is_gathered_is_scattered_back():
    """In float32 of weights that are multiplied in bfloat16, where that is asked for."""
    mesh, rng = mesh_of(dict(fsdp=8)), np.random.default_rng(2)
    weight, d = small(rng, 3, 16), small(rng, 8, 3, 16)
    parts, rows = PartitionSpec(None, "fsdp"), PartitionSpec("fsdp")

    def local(weight, d):
        whole = gathered(weight, ("fsdp",), 1, jnp.bfloat16, "float32")
        assert whole.dtype == jnp.bfloat16
        return jnp.sum(whole.astype(jnp.float32) * d, keepdims=True)

    def total(weight):
        return jnp.sum(jax.shard_map(local, in_specs=(parts, rows), out_specs=rows)(weight, d))

    with jax.set_mesh(mesh):
        weight = jax.device_put(weight, NamedSharding(mesh, parts))
        lowered = jax.jit(jax.grad(total)).lower(weight)
        assert reduced(lowered.as_text())[:2] == [("reduce_scatter", "f32", 48), ("reduce_scatter", "f32", 24)]
        np.testing.assert_array_equal(lowered.compile()(weight), d.sum(0))


def test_a_mesh_of_one_kind_of_tokens_leaves_the_product_alone():
    run = functools.partial(product, count=1, sums=Sums(WEIGHTS["in"][0]))
    plain = str(jax.make_jaxpr(functools.partial(product, count=1))(jnp.ones((B, T, D)), jnp.ones((D, F))))
    with jax.set_mesh(mesh_of(dict(tensor=8))):
        assert str(jax.make_jaxpr(run)(jnp.ones((B, T, D)), jnp.ones((D, F)))) == plain
