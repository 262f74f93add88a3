"""Checksums see every bit, and nothing of how an array is split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from transformer import settings, sharding
from transformer.ops.checksum import checksum

DTYPES = ["float32", "bfloat16", "int32", "int8", "bool"]


def array(dtype: str, shape=(4, 6)) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape) * 50).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_counts(dtype):
    x = np.asarray(array(dtype))
    content, same = np.frombuffer(x.tobytes(), np.uint8), int(jax.jit(checksum)(x))
    bits = 1 if dtype == "bool" else 8
    flipped = np.stack([content] * (bits * len(content)))
    for i in range(len(content)):
        for bit in range(bits):
            flipped[i * bits + bit, i] ^= 1 << bit
    sums = jax.jit(jax.vmap(checksum))(flipped.view(x.dtype).reshape(-1, *x.shape))
    assert same not in sums.tolist()


def test_places_count():
    x = array("float32")
    assert int(checksum(x)) != int(checksum(x[::-1])) != int(checksum(x.T))


@pytest.mark.parametrize("spec", [(), ("fsdp",), (None, "expert"), (("data", "fsdp"), "expert")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_mesh_does_not_count(spec, dtype):
    mesh = sharding.make_mesh(settings.Mesh(data=2, fsdp=2, expert=2))
    x = array(dtype)
    there = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    assert int(jax.jit(checksum)(there)) == int(jax.jit(checksum)(x))
