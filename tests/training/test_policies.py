"""Policies of memory and precision: what they change, and what they must not."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import common
from tests.training.test_step import a_batch, a_run
from transformer import config, sharding
from transformer.checkpoints.workdir import Workdir
from transformer.nn.model import Transformer
from transformer.settings import Compute, Optimizer, Settings, SettingsError
from transformer.training import step as steps
from transformer.training.optimizer import make_optimizer
from transformer.training.state import abstract_state, check_memory, init_state

ROUNDED = Settings(optimizer=Optimizer(moments_dtype="bfloat16"))


def moments(opt_state) -> list[jax.Array]:
    return jax.tree.leaves([optax.tree.get(opt_state, name) for name in ("mu", "nu")])


def one_device():
    return sharding.make_mesh(Settings().mesh, jax.devices()[:1])


def test_rounded_moments_lead_where_exact_ones_do():
    """Thirty steps on gradients of fixed sign and random size: parameters end within 2 % of the way they went."""
    model, first = Transformer(common.tiny_spec("gpt2")), common.params("gpt2")
    rng, ends = np.random.default_rng(0), []
    signs = jax.tree.map(lambda x: np.sign(rng.standard_normal(x.shape)).astype(np.float32), first)
    sizes = rng.random(30).astype(np.float32) + 0.1
    for settings in (Settings(), ROUNDED):
        optimizer = make_optimizer(model, settings)
        state = optimizer.init(first)
        wanted = jnp.dtype(settings.optimizer.moments_dtype)
        assert {x.dtype for x in moments(state)} == {wanted}

        def one(carry, size, optimizer=optimizer):
            params, state = carry
            updates, state = optimizer.update(jax.tree.map(lambda s: s * size, signs), state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, state), _ = jax.jit(lambda c, s, one=one: jax.lax.scan(one, c, s))((first, state), sizes)
        assert {x.dtype for x in moments(state)} == {wanted}
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
        ends.append(params)
    away = math.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(*map(jax.tree.leaves, ends), strict=True)))
    way = math.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(*map(jax.tree.leaves, (ends[0], first)), strict=True)))
    assert 0 < away < 0.02 * way


def test_rounded_moments_are_saved_and_restored(tmp_path):
    """Bit for bit; a checkpoint of others is refused."""
    model, mesh, workdir = Transformer(common.tiny_spec("gpt2")), one_device(), Workdir(tmp_path)
    workdir.open_config({"model": {}})
    state = init_state(model, ROUNDED, mesh)
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), state)
    workdir.save(1, state, {}, {})
    workdir.wait()
    like = abstract_state(model, ROUNDED, mesh)
    assert {x.dtype for x in moments(like.opt_state)} == {jnp.dtype("bfloat16")}
    restored, _ = workdir.restore(1, like, {})
    workdir.close()
    for got, want, shape in zip(*map(jax.tree.leaves, (restored, state, like)), strict=True):
        assert got.dtype == want.dtype == shape.dtype
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_rounded_sums_of_microbatches_are_close():
    run = a_run("gpt2")
    model, params = Transformer(run.spec, run.settings.compute), common.params("gpt2")
    batch, grads = a_batch(run.spec.vocab_size), {}
    for dtype in ("float32", "bfloat16"):
        cut = jax.jit(lambda p, b, dtype=dtype: steps.gradients(model, p, b, 4, dtype=dtype)[0])
        grads[dtype] = jax.device_get(cut(params, batch))
    assert {x.dtype for x in jax.tree.leaves(grads["bfloat16"])} == {np.dtype("float32")}
    common.assert_same_gradients(grads["bfloat16"], grads["float32"], rtol=0.02, atol=0.002)
    with pytest.raises(AssertionError):
        common.assert_same_gradients(grads["bfloat16"], grads["float32"])


@pytest.mark.parametrize(
    ("family", "compute", "optimizer", "message"),
    [
        (
            "gpt2",
            dict(remat="names", remat_names=("ffn_gate",)),
            {},
            r"compute.remat_names=.* has no \['ffn_gate'\]; it",
        ),
        ("gpt2", dict(remat="names", offload_names=("cross_out",)), {}, r"compute.offload_names=.* no \['cross_out'\]"),
        ("t5", dict(remat="names", offload_names=("cross_out",)), {}, r"offload_names=.*'cpu' have no host memory"),
        (
            "gpt2",
            {},
            dict(moments_memory="pinned_host"),
            r"moments_memory='pinned_host': .*'cpu' have no .*\"device\"$",
        ),
        ("gpt2", dict(reduce_dtype="bfloat16"), {}, r"compute.reduce_dtype='bfloat16': no device .* own; use None$"),
    ],
)
def test_what_is_not_there_is_refused(family, compute, optimizer, message):
    settings = Settings(compute=Compute(**compute), optimizer=Optimizer(**optimizer))
    model = Transformer(common.tiny_spec(family), settings.compute)
    with pytest.raises(SettingsError, match=message):
        abstract_state(model, settings, one_device())


def test_points_that_are_there_are_taken():
    model = Transformer(common.tiny_spec("t5"), Compute(remat="names", remat_names=("cross_out", "attended")))
    check_memory(model, Settings(compute=model.compute), one_device())


@pytest.mark.slow
def test_rounded_moments_learn_as_well(tmp_path):
    """Validation losses of the default task, embedded text byte by byte, after 150 steps: within 2 %."""
    from transformer.training.loop import train

    losses = {}
    for dtype in ("float32", "bfloat16"):
        page = config.load_config("llama3:tiny")
        page.data.update(dict(seq_len=64, batch_size=8))
        page.train.update(dict(steps=150, eval_every=0, checkpoint_every=0, eval_batches=4))
        page.optimizer.moments_dtype = dtype
        losses[dtype] = train(config.resolve(page), tmp_path / dtype, quiet=True).evaluation["loss"]
    assert losses["float32"] < 3.0
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)
