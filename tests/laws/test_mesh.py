"""Law: any factorisation of the devices over the mesh gives one device's losses and gradients, or is refused."""

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
from transformer.ops import losses
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
    embeds = [spec.d_model, *(rank for b in blocks for rank in common.ranks(b.mixer) if rank)]
    experts = [b.ffn.num_experts for b in blocks if isinstance(b.ffn, MoE)]
    _, fsdp, expert, tensor = sizes
    return (
        all(n % (fsdp * expert) == 0 for n in embeds)
        and all(n % expert == 0 for n in experts)
        and all(n % tensor == 0 for n in (*heads, *hidden, spec.vocab_size))
    )


# All factorisations of the family that has the most, and two mixed ones of every other; of mixtures also one that
# splits the experts, by default of those with the most mechanisms.
PLAIN = [family for family in common.FAMILIES if not common.routes(family)]
WIDEST = max(PLAIN, key=lambda family: sum(legal(family, s) for s in SIZES))
WITH_EXPERTS = (1, 2, 2, 2)


def chosen(family: str, sizes: Sizes) -> bool:
    """True for the factorisations that are tested."""
    if family == WIDEST:
        return sizes[2] == 1 or sizes == WITH_EXPERTS
    return sizes in ((2, 2, 1, 2), (1, 8, 1, 1)) or (common.routes(family) and sizes == WITH_EXPERTS)


def case(family: str, sizes: Sizes):
    corrected = any(isinstance(b.ffn, MoE) and b.ffn.router.correction for b in common.tiny_spec(family).layers)
    slow = common.routes(family) and sizes == WITH_EXPERTS and not corrected
    return pytest.param(
        (family, sizes), marks=[pytest.mark.slow] if slow else [], id="-".join(map(str, (family, *sizes)))
    )


CASES = [case(f, sizes) for f in common.FAMILIES for sizes in SIZES if legal(f, sizes) and chosen(f, sizes)]


def mesh_of(sizes: Sizes) -> jax.sharding.Mesh:
    return sharding.make_mesh(Mesh(**dict(zip(AXES, sizes, strict=True))))


@pytest.mark.parametrize("case", CASES)
def test_mesh_changes_no_loss_and_no_gradient(case):
    family, sizes = case
    # On a mesh with experts, tokens travel to them.
    net, mesh = common.model(family, experts="grouped" if sizes[2] > 1 else "dense"), mesh_of(sizes)
    params = jax.device_put(common.params(family), initial.param_shardings(net, mesh))
    check_shards(net, params, sizes)
    batch = jax.device_put(common.packed_batch(family), sharding.batch_sharding(mesh))
    with jax.set_mesh(mesh):
        got = common.objective(net)(params, batch)
    assert len(got.losses.sharding.device_set) == 8
    common.assert_same(jax.device_get(got), common.packed_result(family))


def check_shards(net, params, sizes: Sizes) -> None:
    """Each device holds its part of every parameter and no more."""
    _, fsdp, expert, tensor = sizes
    both = fsdp * expert
    parts = {
        "embed": both,
        "latent": both,
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


def test_loss_walks_the_vocabulary_along_the_mesh(monkeypatch):
    """The model tells the loss how the mesh holds the table, so that no chunk gathers it."""
    seen = []

    def spy(*args, shards: int, **kwargs):
        seen.append(shards)
        return original(*args, shards=shards, **kwargs)

    original = losses.cross_entropy
    monkeypatch.setattr(losses, "cross_entropy", spy)
    net, tokens = common.model(WIDEST), np.zeros((8, 16), np.int32)
    for tensor in (1, 2):
        with jax.set_mesh(mesh_of((8 // tensor, 1, 1, tensor))):
            jax.eval_shape(
                lambda p: net.apply({"params": p}, tokens, tokens, method="token_losses"), common.params(WIDEST)
            )
    assert seen == [1, 2]
