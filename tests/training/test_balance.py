"""Balancing in the training step: cut as you like, it is the same; and it balances."""

import functools

import jax
import numpy as np
import pytest

from benchmarks.experts import recovery
from tests import common
from tests.training.test_step import a_batch, close
from transformer import config, sharding
from transformer.nn.model import Transformer
from transformer.ops import balance as ops
from transformer.settings import Balance, Mesh, SettingsError
from transformer.training import balance
from transformer.training import step as steps
from transformer.training.state import init_state

ALL = Balance(auxiliary=0.3, sequence=0.2, z=0.1)
CORRECTED, PLAIN = "deepseek_v3", "mixtral"  # sigmoid scores, groups and a correction; a softmax


@functools.cache
def gradient(family: str, accumulate: int, settings: Balance):
    net, batch = common.model(family), a_batch(common.tiny_spec(family).vocab_size)
    run = jax.jit(lambda params: steps.gradients(net, params, batch, accumulate, settings))
    return jax.device_get(run(common.params(family)))


@pytest.mark.parametrize("family", [CORRECTED, PLAIN])
def test_accumulation_changes_no_balance_loss_and_no_load(family):
    (grads, sums), (cut, cut_sums) = (gradient(family, accumulate, ALL) for accumulate in (1, 4))
    close(grads, cut)
    np.testing.assert_allclose(sums["penalty"], cut_sums["penalty"], rtol=1e-5)
    assert sums["loads"]
    for name, load in sums["loads"].items():
        np.testing.assert_array_equal(load.picks, cut_sums["loads"][name].picks)


def test_balance_losses_reach_the_router():
    (plain, _), (pushed, _) = (gradient(PLAIN, 1, settings) for settings in (Balance(), ALL))
    layer = "decoder", "body", "block_0", "ffn", "router", "kernel"
    before, after = (functools.reduce(dict.__getitem__, layer, grads) for grads in (plain, pushed))
    assert np.abs(after - before).max() > 0.05 * np.abs(before).max()


def test_penalty_weighs_each_loss_and_layer_by_itself():
    rng = np.random.default_rng(0)
    load = ops.Load(*(rng.random(shape) for shape in ((2,), (2, 4), (2, 4), (2,), (2,), (2,), (2,))))
    single = jax.tree.map(lambda x: x[0], load)
    layers = {"decoder/body/block_0": load, "decoder/tail_0": single}
    shares = balance.shares(layers)

    def switch(load):
        return 4 * np.sum(load.picks / load.picks.sum() * load.probability)

    want = dict(
        auxiliary=switch(single) * 2 + switch(jax.tree.map(lambda x: x[1], load)),
        sequence=load.sequence.sum() + single.sequence,
        z=load.z.sum() + single.z,
    )
    for name, value in want.items():
        np.testing.assert_allclose(balance.penalty(Balance(**{name: 2.0}), layers, shares), 2 * value, rtol=1e-5)


def run_steps(family: str, mesh: jax.sharding.Mesh, settings: Balance, accumulate: int = 1):
    """The state after two steps, and the metrics of the second."""
    page = config.load_config(f"{family}:tiny")
    page.data.seq_len, page.data.batch_size = 24, 8
    page.optimizer.warmup_steps = 0
    page.train.update({"steps": 10, "accumulate": accumulate})
    page.balance.update(vars(settings))
    page.compute.experts = "grouped"
    run = config.resolve(page)
    net = Transformer(run.spec, run.settings.compute)
    state = init_state(net, run.settings, mesh)
    place = sharding.batch_sharding(mesh)
    with jax.set_mesh(mesh):
        train_step = jax.jit(steps.make_train_step(net, run.settings))
        for seed in range(2):
            state, values = train_step(state, jax.device_put(a_batch(run.spec.vocab_size, seed), place))
    return state, values


def corrections(params) -> dict[str, jax.Array]:
    leaves = jax.tree.leaves_with_path(params)
    return {jax.tree_util.keystr(path): x for path, x in leaves if path[-1].key == "correction"}


@functools.cache
def on_one_device():
    mesh = sharding.make_mesh(Mesh(), jax.devices()[:1])
    return run_steps(CORRECTED, mesh, Balance(correction_rate=0.01))


@pytest.mark.parametrize(
    ("sizes", "accumulate"),
    [
        pytest.param(dict(data=2, fsdp=1, expert=2), 2, marks=pytest.mark.slow),
        (dict(data=1, context=2, tensor=2), 1),
    ],
)
def test_correction_is_the_same_on_all_devices_and_however_the_batch_is_cut(sizes, accumulate):
    (alone, _), mesh = on_one_device(), sharding.make_mesh(Mesh(**sizes), jax.devices()[:4])
    state, _ = run_steps(CORRECTED, mesh, Balance(correction_rate=0.01), accumulate)
    assert corrections(state.params)
    for name, array in corrections(state.params).items():
        buffers = [np.asarray(shard.data) for shard in array.addressable_shards]
        assert len(buffers) == 4 and all(buffer.shape == array.shape for buffer in buffers)
        for buffer in buffers:
            np.testing.assert_array_equal(buffer, corrections(alone.params)[name], err_msg=name)


def test_correction_moves_once_a_step_and_by_nothing_else():
    """Two steps at 0.01: every entry is 0 or ±0.01 or ±0.02; the optimiser leaves it alone."""
    (state, values) = on_one_device()
    for array in corrections(state.params).values():
        moved = np.abs(np.asarray(array)) / 0.01
        np.testing.assert_allclose(moved, np.round(moved), atol=1e-3)
        assert 0 < moved.max() <= 2
    for layer in values["experts"].values():
        np.testing.assert_allclose(layer["share"].sum(axis=-1), 1, rtol=1e-5)
        assert (layer["dropped"] == 0).all()


def test_dropped_tokens_are_reported():
    net = common.model(PLAIN, experts="capacity", expert_capacity=0.25)
    batch = a_batch(net.spec.vocab_size)
    _, sums = jax.jit(lambda params: steps.loss_sums(net, params, batch))(common.params(PLAIN))
    assert sums["loads"]
    for layer in balance.metrics(sums["loads"]).values():
        assert (layer["dropped"] > 0.05).all() and (layer["dropped"] < 1).all()


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("llama3", Balance(auxiliary=0.1), r"balance.auxiliary=0.1: the model has no experts"),
        ("llama3", Balance(correction_rate=0.1), r"balance.correction_rate=0.1: no router .* set it to 0$"),
        ("mixtral", Balance(correction_rate=0.1), r"no router of the model has a correction; .* use balance.auxiliary"),
    ],
)
def test_what_cannot_be_balanced_is_refused(family, settings, message):
    with pytest.raises(SettingsError, match=message):
        balance.check_balance(common.tiny_spec(family), settings)


@pytest.mark.slow
@pytest.mark.parametrize("remedy", ["loss-free", "auxiliary"])
def test_a_collapsed_router_recovers(remedy):
    """Largest load over the mean, in the worst layer; single batches are noisy, so that twenty are looked at."""
    curve = list(recovery(remedy, 300))
    assert curve[0] > 2
    assert np.median(curve[-20:]) < 1.3


@pytest.mark.slow
def test_nothing_else_recovers_a_collapsed_router():
    assert np.median(list(recovery("none", 100))[-20:]) > 1.6
