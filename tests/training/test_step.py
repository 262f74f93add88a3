"""The training step: sums make every way of cutting a batch the same."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import common
from transformer import config, families, sharding
from transformer.nn.model import Losses, Transformer
from transformer.settings import Optimizer
from transformer.training import step as steps
from transformer.training.optimizer import learning_rate, weight_decays
from transformer.training.state import init_state

LENGTH, ROWS = 24, 8


def a_run(family: str, **train):
    page = config.load_config(f"{family}:tiny")
    page.data.seq_len, page.data.batch_size = LENGTH, ROWS
    page.optimizer.warmup_steps = 2
    page.train.update({"steps": 10, **train})
    return config.resolve(page)


def two_documents(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Segment ids and positions [rows, LENGTH] of two documents and some padding in every row."""
    segments = np.zeros((rows, LENGTH), np.int32)
    positions = np.full((rows, LENGTH), -1, np.int32)
    for row in range(rows):
        first, second = rng.integers(3, 10), rng.integers(1, 12)
        segments[row, :first], segments[row, first : first + second] = 1, 2
        positions[row, :first], positions[row, first : first + second] = np.arange(first), np.arange(second)
    return segments, positions


def a_batch(vocab: int, seed: int = 0, rows: int = ROWS, sourced: bool = False) -> dict:
    """Rows of documents of other lengths: microbatches weigh differently. With a source where a model reads one."""
    rng = np.random.default_rng(seed)
    segments, positions = two_documents(rng, rows)
    source = {}
    if sourced:
        of_source, places = two_documents(rng, rows)
        tokens = rng.integers(0, vocab, (rows, LENGTH)).astype(np.int32)
        source = {"source_tokens": tokens, "source_segment_ids": of_source, "source_positions": places}
    weights = (segments > 0).astype(np.float32)
    tokens, targets = rng.integers(0, vocab, (2, rows, LENGTH)).astype(np.int32)
    target_bytes = rng.integers(1, 4, (rows, LENGTH)).astype(np.int32) * (segments > 0)
    return {
        "tokens": tokens, "targets": targets, "segment_ids": segments, "positions": positions,
        "weights": weights, "target_bytes": target_bytes, **source,
    }  # fmt: skip


def close(a, b, rtol=2e-5):
    """Leaves equal to float32 rounding, relative to the largest gradient of the tree."""
    a, b = jax.device_get((a, b))
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(a))
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * scale, err_msg=jax.tree_util.keystr(path))


# What accumulates knows no family; of each shape and of mixtures, `test_shapes` and `test_balance` show it too.
@pytest.mark.parametrize("family", common.often({"gemma3"}))
def test_accumulation_is_the_big_batch(family):
    run = a_run(family)
    model, params = Transformer(run.spec, run.settings.compute), common.params(family)
    batch = a_batch(run.spec.vocab_size, sourced=common.reads_source(family))
    cut = jax.jit(steps.gradients, static_argnums=(0, 3))
    whole, whole_sums = cut(model, params, batch, 1)
    grads, sums = cut(model, params, batch, 4)
    close(whole, grads)
    close(whole_sums, sums)


@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 0.05)])
def test_gradient_is_of_the_mean_over_targets(smoothing, z):
    """Against smoothed targets and with a z-loss where asked for; what is reported never is."""
    run = a_run("gpt2")
    model, params = Transformer(run.spec, run.settings.compute), common.params("gpt2")
    batch = a_batch(run.spec.vocab_size)

    def mean_loss(p):
        logits = model.apply({"params": p}, batch["tokens"], batch["positions"], batch["segment_ids"])
        labels = optax.smooth_labels(jax.nn.one_hot(batch["targets"], logits.shape[-1]), smoothing)
        smoothed = optax.softmax_cross_entropy(logits, labels) + z * jax.nn.logsumexp(logits, axis=-1) ** 2
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        smoothed, nats = (jnp.sum(x * batch["weights"]) / jnp.sum(batch["weights"]) for x in (smoothed, nats))
        return smoothed, nats

    expected, loss = jax.jit(jax.grad(mean_loss, has_aux=True))(params)
    run = jax.jit(functools.partial(steps.gradients, smoothing=smoothing, z=z), static_argnums=(0, 3))
    grads, sums = run(model, params, batch, 1)
    close(expected, grads)
    values = steps.means(sums)
    np.testing.assert_allclose(values["loss"], loss, rtol=1e-6)
    bits = loss * batch["weights"].sum() / np.log(2) / batch["target_bytes"].sum()
    np.testing.assert_allclose(values["bits_per_byte"], bits, rtol=1e-6)


def test_step_is_adamw_on_the_clipped_gradient():
    run = a_run("llama3")
    model = Transformer(run.spec, run.settings.compute)
    mesh = sharding.make_mesh(run.settings.mesh, jax.devices()[:1])
    state = init_state(model, run.settings, mesh)
    batch = a_batch(run.spec.vocab_size)
    params = state.params
    o = run.settings.optimizer
    mask = jax.tree.map(bool, weight_decays(model, o))
    by_hand = optax.chain(
        optax.clip_by_global_norm(o.clip_norm),
        optax.adamw(learning_rate(o, 10), o.b1, o.b2, o.eps, weight_decay=o.weight_decay, mask=mask),
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
    for path, decay in jax.tree_util.tree_leaves_with_path(weight_decays(model, Optimizer(weight_decay=0.3))):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        matrix = name.endswith(("kernel", "key_up", "value_up")) or name == "embedding/token"
        assert decay == 0.3 * matrix, name


@pytest.mark.parametrize("further", [{}, {"orders"}, {"source_tokens", "source_positions", "source_segment_ids"}])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_model_is_given_what_the_batch_has(further, smoothing):
    """A stand-in takes the place of the model, which has all of these in no one family."""
    batch, calls = a_batch(9), []
    batch |= {name: np.full((ROWS, 5), i, np.int32) for i, name in enumerate(sorted(further))}
    nats = np.random.default_rng(0).random((ROWS, LENGTH)).astype(np.float32)

    def apply(variables, weights, *args, method, mutable, smoothing, z, mtp_weight, **given):
        calls.append((args, method, given))
        return Losses(jnp.sum((2 if smoothing else 1) * nats * weights), nats, [], []), {}

    total, sums = steps.loss_sums(SimpleNamespace(apply=apply), {}, batch, smoothing=smoothing)
    [(args, method, given)] = calls
    assert method == "weighed_losses"
    for got, name in zip(args, ("tokens", "targets", "positions", "segment_ids"), strict=True):
        assert got is batch[name]
    assert given.keys() == {"source" if name.startswith("source") else name for name in further}
    for name in further:
        field = {"source_segment_ids": "segments"}.get(name, name.removeprefix("source_"))
        assert (getattr(given["source"], field) if "source" in given else given[name]) is batch[name]
    scored = (nats * batch["weights"]).sum()
    np.testing.assert_allclose(sums["nats"], scored, rtol=1e-6)
    np.testing.assert_allclose(total, scored * (2 if smoothing else 1), rtol=1e-6)


def test_schedules_fall_as_they_should():
    def rates(schedule, warmup, *at):
        rate = learning_rate(Optimizer(peak_lr=0.5, schedule=schedule, warmup_steps=warmup), 100)
        return [float(rate(step)) for step in at]

    for schedule in ("cosine", "linear", "inverse_sqrt", "constant"):
        np.testing.assert_allclose(rates(schedule, 10, 0, 3, 10), [0, 0.15, 0.5], rtol=1e-6)
    np.testing.assert_allclose(rates("inverse_sqrt", 10, 40, 90), [0.25, 0.5 / 3], rtol=1e-6)
    np.testing.assert_allclose(rates("linear", 10, 55, 100), [0.275, 0.05], rtol=1e-6)
    np.testing.assert_allclose(rates("cosine", 10, 55, 100), [0.275, 0.05], rtol=1e-6)
    np.testing.assert_allclose(rates("constant", 0, 0, 50, 100), [0.5] * 3, rtol=1e-6)
    np.testing.assert_allclose(rates("linear", 0, 0, 50), [0.5, 0.275], rtol=1e-6)
    steps_ = np.arange(1, 200)
    rate = learning_rate(Optimizer(schedule="inverse_sqrt", warmup_steps=7, peak_lr=2.0), 300)
    np.testing.assert_allclose(rate(steps_), 2 * np.minimum(steps_ / 7, np.sqrt(7 / steps_)), rtol=1e-5)


def test_schedule_warms_up_and_ends_where_it_should():
    o = a_run("gpt2").settings.optimizer
    rate = learning_rate(o, 100)
    assert float(rate(0)) == 0
    np.testing.assert_allclose(rate(o.warmup_steps), o.peak_lr, rtol=1e-6)
    np.testing.assert_allclose(rate(100), o.peak_lr * o.end_lr_fraction, rtol=1e-5)
    assert all(rate(i + 1) < rate(i) for i in range(o.warmup_steps, 99))
