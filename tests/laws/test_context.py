"""Law: a training step on a mesh that splits rows along their length is one device's, or is refused."""

import functools

import jax
import numpy as np
import optax
import pytest

from tests import common
from transformer import sharding
from transformer.nn import initial
from transformer.nn.context import default_positions
from transformer.settings import Balance, Mesh
from transformer.training import step as steps

LENGTH = 48
# One of each shape, and of windows and full layers with and without learned sinks.
MESHES = {
    "deepseek_v3": dict(data=1, expert=2, context=2, tensor=2),
    "gemma3": dict(data=2, context=4),
    "gpt_oss": dict(data=1, context=8),
    "t5": dict(slice=2, data=1, context=4),
}
OTHERWISE = dict(data=1, fsdp=2, context=2, tensor=2)


def batch_of(family: str) -> dict[str, np.ndarray]:
    """Packed documents with all that the data pipeline gives."""
    given = common.packed_batch(family, length=LENGTH)
    positions = np.asarray(default_positions(given.segment_ids, given.tokens.shape))
    batch = {
        "tokens": given.tokens, "targets": given.targets, "segment_ids": given.segment_ids, "positions": positions,
        "weights": given.weights, "target_bytes": given.segment_ids,
    }  # fmt: skip
    if given.source is not None:
        places = np.asarray(default_positions(given.source.segments, given.source.tokens.shape))
        batch |= {"source_tokens": given.source.tokens, "source_segment_ids": given.source.segments}
        batch |= {"source_positions": places}
    return batch


def gradients(family: str, params, batch):
    """Of two microbatches, recomputed in the backward pass; and the sums."""
    routed, foretold = common.routes(family), common.tiny_spec(family).mtp is not None
    net = common.model(family, attention="auto", remat="full", experts="grouped" if routed else "dense")
    balance = Balance(sequence=0.01, z=0.001) if routed else Balance()
    run = functools.partial(steps.gradients, net, accumulate=2, balance=balance, mtp_weight=0.3 if foretold else 0.0)
    return jax.jit(run)(params, batch)


@pytest.mark.parametrize(
    ("rules", "sizes"),
    [
        ("default", dict(data=2, context=4)),
        pytest.param("sequence", dict(data=2, context=2, tensor=2), marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_are_one_devices(rules, sizes):
    """Of windows and full layers in turns; by default, for what a step adds to it is slow."""
    family, mesh = "gemma3", sharding.make_mesh(Mesh(**sizes))
    net = common.model(family, rules=rules)
    with jax.set_mesh(mesh):
        params = jax.device_put(common.params(family), initial.param_shardings(net, mesh))
        got = common.objective(net)(params, jax.device_put(common.packed_batch(family), sharding.batch_sharding(mesh)))
    common.assert_same(jax.device_get(got), common.packed_result(family))


@pytest.mark.slow
@pytest.mark.parametrize("family", common.FAMILIES)
def test_a_step_is_one_devices(family):
    sizes, params, batch = MESHES.get(family, OTHERWISE), common.params(family), batch_of(family)
    want, want_sums = jax.device_get(gradients(family, params, batch))
    mesh = sharding.make_mesh(Mesh(**sizes))
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, initial.param_shardings(common.model(family), mesh))
        got, sums = gradients(family, placed, jax.device_put(batch, sharding.batch_sharding(mesh)))
    assert len(jax.tree.leaves(got)[0].sharding.device_set) == mesh.size
    got, sums = jax.device_get((got, sums))
    common.assert_same_gradients(got, want)
    np.testing.assert_allclose(optax.tree.norm(got), optax.tree.norm(want), rtol=1e-5)
    for one, other in zip(*map(jax.tree.leaves, (sums, want_sums)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)
