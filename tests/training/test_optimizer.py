"""Every optimiser is optax's; groups, averages and skipped steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import common
from tests.training.test_step import a_batch, close
from transformer import axes as ax
from transformer import config, sharding
from transformer.checkpoints.workdir import Workdir
from transformer.nn import initial
from transformer.nn.model import Transformer
from transformer.settings import Group, Optimizer, Settings, SettingsError, Train
from transformer.tokenizer import load_tokenizer
from transformer.training import data, guard, loop
from transformer.training import step as steps
from transformer.training.examples import shape_of
from transformer.training.optimizer import decays, learning_rate, make_optimizer, matrix_axes, weight_decays
from transformer.training.state import abstract_state, init_state

NAMES = ("adamw", "adafactor", "lion", "muon")
O = Optimizer(weight_decay=0.2, warmup_steps=2, peak_lr=0.1)
FAMILY = "mixtral"  # experts, the layers of a stack, an untied head


@functools.cache
def model() -> Transformer:
    return Transformer(common.tiny_spec(FAMILY))


@functools.cache
def boxes() -> dict:
    return initial.abstract_params(model())


def of_boxes(function):
    return jax.tree.map(function, boxes(), is_leaf=initial.is_named)


def muon_by_hand(o: Optimizer, rate) -> optax.GradientTransformation:
    """optax's own, whose Adam has Nesterov's momentum: compared on the matrices alone."""
    numbers = of_boxes(matrix_axes)
    return optax.contrib.muon(
        rate, beta=o.b1, weight_decay=o.weight_decay, muon_weight_dimension_numbers=numbers, consistent_rms=0.2
    )


def by_hand(o: Optimizer, steps: int) -> optax.GradientTransformation:
    """optax's aliases, of the whole of each rule."""
    rate, mask = learning_rate(o, steps), of_boxes(lambda box: decays(box.names))
    clip = optax.clip_by_global_norm(o.clip_norm)
    match o.name:
        case "adamw":
            return optax.chain(clip, optax.adamw(rate, o.b1, o.b2, o.eps, weight_decay=o.weight_decay, mask=mask))
        case "lion":
            return optax.chain(clip, optax.lion(rate, o.b1, o.b2, weight_decay=o.weight_decay, mask=mask))
        case "muon":
            return optax.chain(clip, muon_by_hand(o, rate))
    # Its momentum is of updates that the learning rate is in already: compared without.
    return optax.chain(clip, optax.adafactor(rate))


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_is_that_of_optax(name):
    """Three steps on random gradients, through warm-up and the schedule."""
    less = dict(b1=0.0, weight_decay=0.0) if name == "adafactor" else {}
    settings = Settings(optimizer=Optimizer(**{**vars(O), "name": name, **less}), train=Train(steps=6))
    ours, theirs = make_optimizer(model(), settings), by_hand(settings.optimizer, 6)
    params = hand = common.params(FAMILY)
    states = ours.init(params), theirs.init(params)
    step, hand_step = jax.jit(ours.update), jax.jit(theirs.update)
    rng = np.random.default_rng(0)
    for _ in range(3):
        grads = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), params)
        updates, ours_state = step(grads, states[0], params)
        hand_updates, hand_state = hand_step(grads, states[1], hand)
        states = ours_state, hand_state
        params, hand = optax.apply_updates(params, updates), optax.apply_updates(hand, hand_updates)
    if name == "muon":
        kept = of_boxes(lambda box: matrix_axes(box) is not None)
        params, hand = (jax.tree.map(lambda keep, x: x if keep else 0.0, kept, tree) for tree in (params, hand))
    close(params, hand)


def test_muon_turns_matrices_alone():
    """Heads side by side, layers and experts apart; vocabularies, routers, norms, biases and sinks are Adam's."""
    flat = {jax.tree_util.keystr(path, simple=True, separator="/"): box for path, box in
            jax.tree_util.tree_leaves_with_path(boxes(), is_leaf=initial.is_named)}  # fmt: skip
    sides = {name: matrix_axes(box) for name, box in flat.items()}
    for name, box in flat.items():
        if sides[name] is None:
            assert {ax.VOCAB, ax.ROUTES} & {*box.names} or not decays(box.names), name
            continue
        left = [box.names[i] for i in range(len(box.names)) if i not in (*sides[name][0], *sides[name][1])]
        assert {*left} <= {ax.LAYERS, ax.EXPERTS}, (name, left)
    heads = "decoder/body/block_0/attention/out/kernel"
    assert sides[heads] == ((1, 2), (3,))  # [layers, N, H, D]
    assert sides["decoder/body/block_0/ffn/experts/down_kernel"] == ((2,), (3,))  # [layers, E, F, D]
    assert sides["embedding/token"] is None and sides["head/kernel"] is None
    # All singular values of an update are one, but for the size that it is given.
    settings = Settings(optimizer=Optimizer(name="muon", weight_decay=0.0, schedule="constant", end_lr_fraction=0.1,
                                            warmup_steps=0, peak_lr=1.0))  # fmt: skip
    optimizer, params = make_optimizer(model(), settings), common.params(FAMILY)
    updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    kernel = np.asarray(updates["decoder"]["body"]["block_0"]["attention"]["out"]["kernel"])
    matrices = kernel.reshape(len(kernel), -1, kernel.shape[-1])
    values = np.linalg.svd(matrices, compute_uv=False) / (0.2 * np.sqrt(max(matrices.shape[1:])))
    assert np.quantile(values, 0.1) > 0.6 and values.max() < 1.3  # what five steps of Newton and Schulz come to


def test_groups_learn_at_their_rates():
    """The first group that names an axis has a parameter; a rate of 0 leaves it as it is."""
    groups = (Group(axes=("vocab",), lr=0.0), Group(axes=("experts", "vocab"), lr=0.5, weight_decay=0.7))
    base, grouped = (
        Settings(optimizer=Optimizer(groups=g, warmup_steps=0, schedule="constant", weight_decay=0.0))
        for g in ((), groups)
    )
    params, rng = common.params(FAMILY), np.random.default_rng(0)
    grads = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), params)
    ends = []
    for settings in (base, grouped):
        optimizer = make_optimizer(model(), settings)
        ends.append(jax.jit(optimizer.update)(grads, optimizer.init(params), params)[0])
    rates = weight_decays(model(), grouped.optimizer)
    lr = base.optimizer.peak_lr

    def compare(box, plain, own, rate, x):
        if ax.VOCAB in box.names:
            assert not own.any()
        elif ax.EXPERTS in box.names:
            assert rate == (0.7 if decays(box.names) else 0)
            np.testing.assert_allclose(own, 0.5 * (plain - lr * rate * x), rtol=1e-5, atol=1e-9)
        else:
            np.testing.assert_array_equal(own, plain)

    jax.tree.map(compare, boxes(), *ends, rates, params, is_leaf=initial.is_named)


def test_groups_without_parameters_are_refused():
    for groups, said in (
        ((Group(axes=("buckets",)),), r"groups\[0\].axes=\('buckets',\): no parameter"),
        ((Group(axes=("vocab",)), Group(axes=("vocab",), lr=2.0)), r"groups\[1\].axes"),
    ):
        with pytest.raises(SettingsError, match=said):
            make_optimizer(model(), Settings(optimizer=Optimizer(groups=groups)))
    with pytest.raises(SettingsError, match="names no axis"):
        Group(axes=("vocabulary",))


@pytest.mark.parametrize("name", NAMES)
def test_moments_lie_beside_their_parameters(name):
    """Split as they are, on a mesh; sums over an axis as the others."""
    run = config.load_config(f"{FAMILY}:tiny")
    run.mesh.update(dict(data=1, fsdp=2, expert=2, tensor=2))
    mesh = sharding.make_mesh(config.resolve(run).settings.mesh)
    state = abstract_state(model(), Settings(optimizer=Optimizer(name=name)), mesh)
    places = dict(jax.tree_util.tree_leaves_with_path(state.params))
    seen = 0
    for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state):
        owner = next((places[path[i:]] for i in range(len(path)) if path[i:] in places), None)
        if owner is not None and x.shape == owner.shape:
            assert x.sharding.spec == owner.sharding.spec, path
            seen += 1
    assert seen >= len(places)


def test_sums_over_an_axis_are_split_like_the_others():
    wide = dict(d_model=256, num_layers=1, d_ff=512)
    page = config.load_config("llama3:tiny")
    page.model.update(wide)
    page.mesh.update(dict(data=1, fsdp=4, tensor=2))
    page.optimizer.update(dict(name="adafactor"))
    run = config.resolve(page)
    state = abstract_state(Transformer(run.spec), run.settings, sharding.make_mesh(run.settings.mesh))
    factored = optax.tree.get(state.opt_state, "v_row"), optax.tree.get(state.opt_state, "v_col")
    found = {x.shape[1:]: x.sharding.spec[1] for tree in factored
             for x in [tree["decoder"]["body"]["block_0"]["ffn"]["up"]["kernel"]]}  # fmt: skip
    assert found == {(256,): "fsdp", (512,): "tensor"}


def test_wsd_is_constant_then_falls():
    rate = learning_rate(Optimizer(schedule="wsd", warmup_steps=10, decay_fraction=0.25, peak_lr=2.0), 100)
    values = np.array([rate(step) for step in range(101)])
    np.testing.assert_allclose(values[10:76], 2.0, rtol=1e-6)
    np.testing.assert_allclose(values[75:], np.linspace(2.0, 0.2, 26), rtol=1e-5)


def train(state, run, batches):
    """The states after each batch, and the metrics."""
    mesh = sharding.make_mesh(run.settings.mesh, jax.devices()[:1])
    step = jax.jit(steps.make_train_step(Transformer(run.spec, run.settings.compute), run.settings))
    with jax.set_mesh(mesh):
        for batch in batches:
            state, metrics = step(state, batch)
            yield state, metrics


def started(run):
    mesh = sharding.make_mesh(run.settings.mesh, jax.devices()[:1])
    return init_state(Transformer(run.spec, run.settings.compute), run.settings, mesh)


def test_a_step_that_is_not_finite_changes_nothing_but_counts():
    page = config.load_config("gpt2:tiny")
    page.optimizer.update(dict(average_decay=0.9, warmup_steps=0))
    page.data.update(dict(seq_len=24, batch_size=8))
    run = config.resolve(page)
    good = a_batch(run.spec.vocab_size)
    bad = {**good, "weights": np.where(good["weights"] > 0, np.inf, 0).astype(np.float32)}
    (one, _), (two, missed), (three, after) = train(started(run), run, [good, bad, good])
    for name in ("params", "average"):
        jax.tree.map(np.testing.assert_array_equal, getattr(one, name), getattr(two, name))
    for a, b in zip(jax.tree.leaves(one.opt_state), jax.tree.leaves(two.opt_state), strict=True):
        np.testing.assert_array_equal(b, a + 1 if jnp.issubdtype(a.dtype, jnp.integer) else a)
    assert (int(missed["skipped"]), int(missed["skipped_in_a_row"]), int(two.step)) == (1, 1, 2)
    assert (int(after["skipped"]), int(after["skipped_in_a_row"])) == (1, 0)
    assert np.isfinite(jax.tree.leaves(three.params)[0]).all() and np.isfinite(after["loss"])


def test_spikes_are_told_from_noise():
    rng, health = np.random.default_rng(0), guard.start()
    judge = jax.jit(functools.partial(guard.judge, spike=6.0))
    losses = 3 + 0.1 * rng.standard_normal(200)
    for loss in losses:
        counts, health = judge(health, loss, 1.0)
        assert counts
    np.testing.assert_allclose(health.mean, losses[-100:].mean(), atol=0.05)
    np.testing.assert_allclose(np.sqrt(health.variance), 0.1, rtol=0.4)
    assert not judge(health, 4.5, 1.0)[0] and judge(health, 1.0, 1.0)[0]
    assert guard.judge(health, 4.5, 1.0, spike=0.0)[0] and not guard.judge(health, 3.0, jnp.inf, spike=0.0)[0]
    counts, health = judge(guard.start(), 9.0, 1.0)
    assert counts and judge(health, 90.0, 1.0)[0]  # too early to tell


def test_too_many_in_a_row_stop_the_run():
    said = []
    assert guard.skips(3, {"skipped": 3, "skipped_in_a_row": 0}, 2, said.append, 7) == 3 and not said
    assert guard.skips(3, {"skipped": 4, "skipped_in_a_row": 1}, 2, said.append, 8) == 4 and "skipped 1 step" in said[0]
    with pytest.raises(guard.SkippedError, match="step 9: 2 steps in a row"):
        guard.skips(4, {"skipped": 5, "skipped_in_a_row": 2}, 2, said.append, 9)
    assert guard.skips(0, {"skipped": 50, "skipped_in_a_row": 50}, 0, said.append, 9) == 50


def test_the_average_is_what_generates(tmp_path):
    """By hand over three steps; a workdir gives it where the run keeps one."""
    page = config.load_config("gpt2:tiny")
    page.optimizer.update(dict(average_decay=0.6, warmup_steps=0))
    page.data.update(dict(seq_len=24, batch_size=8))
    run = config.resolve(page)
    first = started(run)
    want, batches = first.params, [a_batch(run.spec.vocab_size, seed) for seed in range(3)]
    for number, (state, _) in enumerate(train(first, run, batches)):
        decay = min(0.6, (1 + number) / (10 + number))
        want = jax.tree.map(lambda old, new, decay=decay: decay * old + (1 - decay) * new, want, state.params)
    close(want, state.weights)
    workdir = Workdir(tmp_path)
    workdir.open_config(run.values)
    workdir.save(3, state, {}, {})
    workdir.wait()
    found = workdir.restore_params(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state.params)
    )
    workdir.close()
    jax.tree.map(np.testing.assert_array_equal, found, state.average)


def entropy_of_targets(run) -> float:
    """Nats a target of what is held out: the least that a model without context comes to, whatever it has learnt."""
    d = run.settings.data
    batches = data.validation_batches(
        d, load_tokenizer(d.tokenizer), shape_of(run.spec), run.settings.train.eval_batches
    )
    counts = np.bincount(np.concatenate([batch["targets"][batch["weights"] > 0] for batch in batches]))
    shares = counts[counts > 0] / counts.sum()
    return -np.sum(shares * np.log(shares))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["cosine", "linear", "inverse_sqrt", "constant", "wsd"])
@pytest.mark.parametrize("name", NAMES)
def test_every_optimiser_learns_the_default_task_on_every_schedule(name, schedule, tmp_path):
    """The embedded text, by the loop itself: 60 steps lead well below what the frequencies of bytes can give."""
    rates = {"adamw": 1e-2, "adafactor": 0.1, "lion": 2e-3, "muon": 1e-2}
    page = config.load_config("llama3:tiny")
    page.data.update(dict(seq_len=64, batch_size=16))
    page.train.update(dict(steps=60, eval_every=0, checkpoint_every=0, eval_batches=4))
    page.optimizer.update(dict(name=name, schedule=schedule, peak_lr=rates[name], warmup_steps=5))
    if schedule in ("inverse_sqrt", "constant"):
        page.optimizer.end_lr_fraction = Optimizer.end_lr_fraction
    run = config.resolve(page)
    limit, result = entropy_of_targets(run) - 0.4, loop.train(run, tmp_path, quiet=True)
    evaluation, finished = result.evaluation, result.finished
    assert finished and evaluation["loss"] < limit
