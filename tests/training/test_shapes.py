"""Models of every shape train on their objectives, through the real data; how a batch is cut changes nothing."""

import os
import signal

import jax
import numpy as np
import pytest

from tests import common
from tests.training.test_step import close
from transformer import config, sharding
from transformer.nn import initial
from transformer.nn.model import Transformer
from transformer.settings import Mesh
from transformer.tokenizer import load_tokenizer
from transformer.training import data, loop
from transformer.training import step as steps
from transformer.training.examples import shape_of

# (page, what differs from its data): an objective for each shape, and one that reads a prefix both ways.
RUNS = {
    "masked": ("bert:tiny", {}),
    "spans": ("t5:tiny", {}),
    "pairs of two sides": ("vaswani:tiny", dict(source="reversal")),
    "prefix": ("gpt2:tiny", dict(objective="prefix")),
    "pairs in a row": ("llama3:tiny", dict(objective="pairs", source="sort")),
}
each = pytest.mark.parametrize("name", RUNS)


def a_run(name: str, **train):
    address, changes = RUNS[name]
    page = config.load_config(address)
    page.data.update({"seq_len": 48, "batch_size": 8, "target_len": None, **changes})
    page.optimizer.warmup_steps = 2
    page.train.update({"steps": 6, "eval_pairs": 0, "eval_every": 0, "checkpoint_every": 3, "eval_batches": 1, **train})
    return config.resolve(page)


def a_batch(run) -> dict:
    d = run.settings.data
    batches = data.train_iterator(d, load_tokenizer(d.tokenizer), shape_of(run.spec))
    try:
        return next(batches)
    finally:
        batches.close()


@each
def test_cutting_a_batch_changes_no_gradient(name):
    """Into microbatches, of which half are padding and add nothing, and over a mesh."""
    run = a_run(name)
    model, batch = Transformer(run.spec, run.settings.compute), a_batch(run)
    family = RUNS[name][0].partition(":")[0]
    assert model.spec == common.tiny_spec(family)
    params = common.params(family)
    gradients = jax.jit(steps.gradients, static_argnums=(0, 3))
    whole, sums = jax.device_get(gradients(model, params, batch, 1))
    assert sums["tokens"] > 0 and np.isfinite(sums["nats"])
    quiet = {"pooler"}  # it has no loss
    for path, gradient in jax.tree.leaves_with_path(whole):
        if not quiet & {entry.key for entry in path}:
            assert np.abs(gradient).max() > 0, jax.tree_util.keystr(path)

    padding = {key: np.full_like(x, -1 if "positions" in key or key == "orders" else 0) for key, x in batch.items()}
    longer = {key: np.concatenate([x, padding[key]]) for key, x in batch.items()}
    close(whole, gradients(model, params, longer, 4)[0])

    if name != "prefix":  # with orders; what else a batch may have, the laws of meshes have too
        return
    mesh = sharding.make_mesh(Mesh(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, initial.param_shardings(model, mesh))
        split = gradients(model, placed, jax.device_put(batch, sharding.batch_sharding(mesh)), 1)[0]
    close(whole, jax.device_get(split), rtol=1e-4)


def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    straight = loop.train(a_run("spans"), tmp_path / "straight", quiet=True)
    step = loop._Loop._save

    def stop(self, number, state):
        step(self, number, state)
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop._Loop, "_save", stop)
    assert not loop.train(a_run("spans"), tmp_path / "stopped", quiet=True).finished
    monkeypatch.undo()
    resumed = loop.train(a_run("spans"), tmp_path / "stopped", quiet=True)
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (resumed.state.params, straight.state.params)))


def test_exact_answers_are_counted_at_every_evaluation(tmp_path):
    """Of as many held-out pairs as asked for."""
    asked = []

    def matcher(model, params, tokenizer, pairs):
        asked.append([*pairs])
        return 0.25

    run = a_run("pairs of two sides", eval_pairs=7, eval_every=3)
    result = loop.train(run, tmp_path, matcher=matcher, quiet=True)
    assert result.evaluation["exact_match"] == 0.25
    assert len(asked) == 2 and len(asked[0]) == 7 and all(target == source[::-1] for source, target in asked[0])
