"""Attention over the context axis through the TPU compiler: kernels between messages that nobody waits for."""

import importlib.util
import os
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from transformer import sharding
from transformer.ops.attention import Call, Where, attend
from transformer.settings import Mesh
from transformer.spec import Mask

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the libtpu of jax[tpu]"),
]


def collectives(mask: Mask, exchange: str) -> Counter[str]:
    """How many collectives of each kind both passes have, on four chips."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices
    mesh = sharding.make_mesh(Mesh(data=1, context=4), devices)
    place = NamedSharding(mesh, PartitionSpec(None, "context"))
    q, k = (jax.ShapeDtypeStruct((1, 8192, heads, 128), jnp.bfloat16, sharding=place) for heads in (8, 2))
    row = jax.ShapeDtypeStruct((1, 8192), jnp.int32, sharding=place)
    call = Call(mask, 128**-0.5, aligned=True, exchange=exchange)

    def both_passes(q, k, v, where):
        out, pull = jax.vjp(lambda q, k, v: attend("splash", call, q, k, v, where), q, k, v)
        return out, pull(out)

    with jax.set_mesh(mesh):
        run = jax.jit(both_passes, out_shardings=place)
        text = run.lower(q, k, k, Where(row, row, zigzag=True)).compile().as_text()
    assert all(kernel in text for kernel in ("splash_forward", "splash_d_queries", "splash_d_keys_values"))
    return Counter(re.findall(r" = .*? (all-[a-z-]+|reduce-scatter|collective-permute[a-z-]*)\(", text))


@pytest.mark.parametrize("mask", [Mask(causal=True), Mask(causal=True, window=512)], ids=["ring", "tails"])
def test_keys_travel_while_kernels_run_and_are_never_gathered(mask):
    assert set(collectives(mask, "auto")) == {"collective-permute-start", "collective-permute-done"}


def test_gathered_keys_get_their_gradients_scattered():
    assert set(collectives(Mask(causal=True), "gather")) == {"all-gather", "reduce-scatter"}
