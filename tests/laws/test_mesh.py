"""Law: a mesh holds a model in equal parts, or is refused. That it changes no result: tests/training/test_meshes.py."""

import itertools
from functools import partial

import jax
import numpy as np
import pytest

from tests import common
from transformer import sharding
from transformer.nn import initial
from transformer.nn.context import Source
from transformer.nn.parameter import Named
from transformer.settings import Mesh
from transformer.sharding import ShardingError
from transformer.spec import MoE

# Sizes of these axes; rows split along their length have a law of their own (test_context.py).
AXES = ("data", "fsdp", "expert", "tensor")
Sizes = tuple[int, int, int, int]
SIZES = [s for s in itertools.product((1, 2, 4, 8), repeat=4) if np.prod(s) == 8]


def legal(family: str, sizes: Sizes) -> bool:
    """True where every dimension that the mesh splits divides."""
    spec = common.tiny_spec(family)
    blocks = spec.layers
    heads = [n for b in blocks for n in (b.mixer.num_heads, getattr(b.mixer, "num_kv_heads", b.mixer.num_heads))]
    hidden = [width for b in blocks for width in common.hidden_widths(b.ffn)]
    ranks = [rank for b in blocks for rank in common.ranks(b.mixer) if rank]
    experts = [b.ffn.num_experts for b in blocks if isinstance(b.ffn, MoE)]
    _, fsdp, expert, tensor = sizes
    return (
        spec.d_model % (fsdp * expert) == 0
        and all(n % fsdp == 0 for n in ranks)
        and all(n % expert == 0 for n in experts)
        and all(n % tensor == 0 for n in (*heads, *hidden, spec.vocab_size))
    )


# The family that the most factorisations suit.
WIDEST = max(common.FAMILIES, key=lambda family: sum(legal(family, s) for s in SIZES))


def mesh_of(sizes: Sizes) -> jax.sharding.Mesh:
    return sharding.make_mesh(Mesh(**dict(zip(AXES, sizes, strict=True))))


@pytest.mark.parametrize("family", common.FAMILIES)
def test_each_device_holds_its_part_of_every_parameter(family):
    net, fits = common.model(family), [sizes for sizes in SIZES if legal(family, sizes)]
    assert fits
    for sizes in {fits[0], fits[len(fits) // 2], fits[-1]}:
        check_shards(net, jax.device_put(common.params(family), initial.param_shardings(net, mesh_of(sizes))), sizes)


def check_shards(net, params, sizes: Sizes) -> None:
    """Each device holds its part of every parameter and no more."""
    _, fsdp, expert, tensor = sizes
    both = fsdp * expert
    parts = {
        "embed": both,
        "latent": fsdp,
        "experts": expert,
        "expert_embed": fsdp,
        "heads": tensor,
        "kv_heads": tensor,
        "mlp": tensor,
        "vocab": tensor,
    }

    def check(path, box: Named, array: jax.Array):
        want = tuple(size // parts.get(name, 1) for name, size in zip(box.names, array.shape, strict=True))
        shapes = {shard.data.shape for shard in array.addressable_shards}
        assert shapes == {want}, jax.tree_util.keystr(path)

    jax.tree.map_with_path(check, initial.abstract_params(net), params, is_leaf=initial.is_named)


@pytest.mark.parametrize("family", common.FAMILIES)
def test_meshes_that_do_not_divide_are_refused(family):
    """By the parameters' placement, and by the model itself if it runs under such a mesh all the same."""
    net, tokens = common.model(family), np.zeros((8, 16), np.int32)
    refused = [sizes for sizes in SIZES if not legal(family, sizes)]
    assert refused
    for sizes in refused:
        mesh = mesh_of(sizes)
        with pytest.raises(ShardingError, match="can't be split"):
            initial.param_shardings(net, mesh)
        source = {"source": Source(tokens)} if common.reads_source(family) else {}
        with jax.set_mesh(mesh), pytest.raises(ShardingError, match="can't be split"):
            jax.eval_shape(partial(net.apply, **source), {"params": common.params(family)}, tokens)
