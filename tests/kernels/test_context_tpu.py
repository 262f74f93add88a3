"""Attention over the context axis through the TPU compiler: kernels between messages that nobody waits for."""

import dataclasses
import importlib.util
import os
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from tests import common
from transformer import families, sharding
from transformer.nn import initial
from transformer.nn.model import Transformer
from transformer.ops.attention import Call, Where, attend
from transformer.settings import Compute, Mesh
from transformer.spec import Mask

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the libtpu of jax[tpu]"),
]


def four_chips(**sizes: int) -> jax.sharding.Mesh:
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices
    return sharding.make_mesh(Mesh(**{"data": 1, **sizes}), devices)


def collectives(mask: Mask, exchange: str) -> Counter[str]:
    """How many collectives of each kind both passes have, on four chips."""
    mesh = four_chips(context=4)
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


def test_what_layers_add_up_is_scattered_over_the_tensor_axis():
    """Under rules="sequence", no sum of features is kept whole: the compiler fuses each with the cut that follows."""
    origin = common.tiny_spec("llama3").origin
    sizes = dict(d_model=512, num_heads=8, num_kv_heads=4, head_dim=64, d_ff=1024, vocab_size=1024, num_layers=1)
    spec = families.make(origin.family, dataclasses.replace(origin.dims, **sizes))
    net = Transformer(spec, Compute(dtype="bfloat16", attention="reference", rules="sequence"))
    mesh = four_chips(tensor=4)
    places = initial.param_shardings(net, mesh)
    shapes = jax.eval_shape(lambda: initial.init_fn(net, jax.random.key(0)))
    params = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, places)
    tokens = jax.ShapeDtypeStruct((2, 1024), jnp.int32, sharding=sharding.batch_sharding(mesh, "sequence"))

    def loss(params, tokens):
        return net.apply({"params": params}, tokens, tokens, method="token_losses").sum()

    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(loss), out_shardings=places).lower(params, tokens).compile().as_text()
    where = Counter()
    for part in re.split(r"\n(?=%|ENTRY)", text):
        fused = "all-reduce-scatter" in part.split("(")[0]
        where[fused] += len(re.findall(r"16\[2,1024,512\]\S* all-reduce\(", part))
    assert where[True] >= 4 and where[False] == 0, where
    assert re.search(r"16\[2,1024,512\]\S* all-gather", text)
