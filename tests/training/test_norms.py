"""Norms layer by layer, by hand; the window that a profiler records."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import common
from tests.training.test_step import a_batch, a_run
from transformer.nn.model import Transformer
from transformer.settings import SettingsError
from transformer.training import step as steps
from transformer.training.norms import make_norms
from transformer.training.profile import Profiler, parse_window


def test_norms_are_those_of_each_layer():
    run = a_run("gpt2")
    model, params, batch = Transformer(run.spec), common.params("gpt2"), a_batch(run.spec.vocab_size)
    norms, spread = jax.jit(make_norms(model, run.settings))(params, batch)
    grads, _ = jax.jit(lambda p, b: steps.gradients(model, p, b, 1))(params, batch)
    path = "decoder/body/block_0/ffn/up/kernel"
    kernel, grad = (tree["decoder"]["body"]["block_0"]["ffn"]["up"]["kernel"] for tree in (params, grads))
    for kind, x in (("parameter", kernel), ("gradient", grad)):
        want = [np.linalg.norm(layer) for layer in np.asarray(x)]
        np.testing.assert_allclose(norms[f"{kind}/{path}"], want, rtol=1e-5)
    assert norms["gradient/embedding/token"].shape == ()
    assert spread.keys() == {name for name in norms if not name.startswith("activation/")}
    for kind, x in (("parameter", kernel), ("gradient", grad)):
        found = spread[f"{kind}/{path}"]
        assert np.sum(found.counts) == x.size
        np.testing.assert_allclose([found.edges[0], found.edges[-1]], [x.min(), x.max()], rtol=1e-4, atol=1e-7)
    total = np.sqrt(sum(np.sum(np.square(x)) for name, x in norms.items() if name.startswith("gradient/")))
    np.testing.assert_allclose(total, np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads))), rtol=1e-5)
    texts = batch["tokens"], batch["positions"], batch["segment_ids"]
    _, kept = model.apply({"params": params}, *texts, method="features", mutable=["intermediates"])
    residual = np.asarray(kept["intermediates"]["decoder"]["body"]["block_0"]["residual"])
    want = [np.sqrt(np.mean(np.square(layer))) for layer in residual]
    np.testing.assert_allclose(norms["activation/decoder/body/block_0"], want, rtol=1e-5)


@pytest.mark.parametrize("family", ["t5", "deepseek_v3"])
def test_every_layer_of_every_stack_is_told(family):
    run = a_run(family)
    batch = a_batch(run.spec.vocab_size, sourced=common.reads_source(family))
    norms, _ = jax.eval_shape(make_norms(Transformer(run.spec), run.settings), common.params(family), batch)
    told = sum(int(np.prod(x.shape)) for name, x in norms.items() if name.startswith("activation/"))
    assert told == len(run.spec.layers)


@pytest.mark.parametrize("text", ["10:13", "steps=10", "steps=0:3", "steps=5:4", "steps=a:b", "steps=-1:2"])
def test_other_windows_are_refused(text):
    with pytest.raises(SettingsError, match="--profile="):
        parse_window(text)


def test_a_window_of_steps_is_recorded(tmp_path):
    assert parse_window("steps=2:3") == (2, 3)
    profiler, done = Profiler((2, 3), tmp_path / "profile"), []
    for step in range(1, 5):
        profiler.begin(step)
        done.append(profiler.end(step, jnp.ones(3) * step))
    profiler.close()
    assert done == [False, False, True, False]
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    silent = Profiler(None, tmp_path / "none")
    silent.begin(1)
    assert not silent.end(1, jnp.ones(())) and not (tmp_path / "none").exists()
