"""The training step: sums make every way of cutting a batch the same."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import common
from transformer import config, families, sharding
from transformer.nn.model import Transformer
from transformer.training import step as steps
from transformer.training.optimizer import decay_mask, learning_rate, make_optimizer
from transformer.training.state import init_state

LENGTH, ROWS = 24, 8


def a_run(family: str, **train):
    page = config.load_config(f"{family}:tiny")
    page.data.seq_len, page.data.batch_size = LENGTH, ROWS
    page.optimizer.warmup_steps = 2
    page.train.update({"steps": 10, **train})
    return config.resolve(page)


def a_batch(vocab: int, seed: int = 0, rows: int = ROWS) -> dict:
    """Two documents and some padding in every row, of other lengths in each: microbatches weigh differently."""
    rng = np.random.default_rng(seed)
    segments = np.zeros((rows, LENGTH), np.int32)
    positions = np.full((rows, LENGTH), -1, np.int32)
    for row in range(rows):
        first, second = rng.integers(3, 10), rng.integers(1, 12)
        segments[row, :first], segments[row, first : first + second] = 1, 2
        positions[row, :first], positions[row, first : first + second] = np.arange(first), np.arange(second)
    weights = (segments > 0).astype(np.float32)
    tokens, targets = rng.integers(0, vocab, (2, rows, LENGTH)).astype(np.int32)
    target_bytes = rng.integers(1, 4, (rows, LENGTH)).astype(np.int32) * (segments > 0)
    return {
        "tokens": tokens, "targets": targets, "segment_ids": segments, "positions": positions,
        "weights": weights, "target_bytes": target_bytes,
    }  # fmt: skip


def close(a, b, rtol=2e-5):
    """Leaves equal to float32 rounding, relative to the largest gradient of the tree."""
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(a))
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * scale, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("family", families.names())
def test_accumulation_is_the_big_batch(family):
    run = a_run(family)
    model, params = Transformer(run.spec, run.settings.compute), common.params(family)
    batch = a_batch(run.spec.vocab_size)
    cut = jax.jit(steps.gradients, static_argnums=(0, 3))
    whole, whole_sums = cut(model, params, batch, 1)
    grads, sums = cut(model, params, batch, 4)
    close(whole, grads)
    close(whole_sums, sums)


def test_gradient_is_of_the_mean_over_targets():
    run = a_run("gpt2")
    model, params = Transformer(run.spec, run.settings.compute), common.params("gpt2")
    batch = a_batch(run.spec.vocab_size)

    def mean_loss(p):
        logits = model.apply({"params": p}, batch["tokens"], batch["positions"], batch["segment_ids"])
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.sum(nats * batch["weights"]) / jnp.sum(batch["weights"])

    loss, expected = jax.jit(jax.value_and_grad(mean_loss))(params)
    grads, sums = jax.jit(steps.gradients, static_argnums=(0, 3))(model, params, batch, 1)
    close(expected, grads)
    values = steps.means(sums)
    np.testing.assert_allclose(values["loss"], loss, rtol=1e-6)
    bits = loss * batch["weights"].sum() / np.log(2) / batch["target_bytes"].sum()
    np.testing.assert_allclose(values["bits_per_byte"], bits, rtol=1e-6)


def test_step_is_adamw_on_the_clipped_gradient():
    run = a_run("llama3")
    model = Transformer(run.spec, run.settings.compute)
    mesh = sharding.make_mesh(run.settings.mesh, jax.devices()[:1])
    state = init_state(model, make_optimizer(model, run.settings), 0, mesh)
    batch = a_batch(run.spec.vocab_size)
    params = state.params
    o = run.settings.optimizer
    by_hand = optax.chain(
        optax.clip_by_global_norm(o.clip_norm),
        optax.adamw(learning_rate(o, 10), o.b1, o.b2, o.eps, weight_decay=o.weight_decay, mask=decay_mask(model)),
    )
    hand_state = by_hand.init(params)
    with jax.set_mesh(mesh):
        train_step = jax.jit(steps.make_train_step(model, run.settings))
        gradient = jax.jit(steps.gradients, static_argnums=(0, 3))
        for number in range(3):
            grads, _ = gradient(model, params, batch, 1)
            updates, hand_state = jax.jit(by_hand.update)(grads, hand_state, params)
            params = optax.apply_updates(params, updates)
            state, values = train_step(state, batch)
            np.testing.assert_allclose(values["grad_norm"], optax.tree.norm(grads), rtol=1e-5)
            np.testing.assert_allclose(values["learning_rate"], learning_rate(o, 10)(number), rtol=1e-6)
    assert int(state.step) == 3
    close(params, state.params)


@pytest.mark.parametrize("family", families.names())
def test_decay_spares_what_maps_no_features(family):
    model = Transformer(a_run(family).spec)
    for path, decayed in jax.tree_util.tree_leaves_with_path(decay_mask(model)):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        matrix = name.endswith(("kernel", "key_up", "value_up")) or name == "embedding/token"
        assert decayed == matrix, name


def test_schedule_warms_up_and_ends_where_it_should():
    o = a_run("gpt2").settings.optimizer
    rate = learning_rate(o, 100)
    assert float(rate(0)) == 0
    np.testing.assert_allclose(rate(o.warmup_steps), o.peak_lr, rtol=1e-6)
    np.testing.assert_allclose(rate(100), o.peak_lr * o.end_lr_fraction, rtol=1e-5)
    assert all(rate(i + 1) < rate(i) for i in range(o.warmup_steps, 99))
