"""Many processes, the same run: whatever their number and the mesh, and whichever of them saved it."""

import json
import shutil

import jax
import numpy as np
import pytest

import transformer
from tests.training import processes
from transformer import config
from transformer.training.loop import train

CONFIG = "mixtral:tiny"
# A mixture of experts on packed rows; there are few heads, so that any mesh will do.
TINY = {
    **processes.TEXTS,
    "model.d_model": 32, "model.num_heads": 2, "model.num_kv_heads": 1, "model.d_ff": 32, "model.num_experts": 4,
    "data.seq_len": 32, "data.batch_size": 8, "optimizer.warmup_steps": 2, "mesh.data": 1, "train.log_every": 1,
    "train.eval_every": 0, "train.eval_batches": 1,
}  # fmt: skip
MESH = {"mesh.fsdp": 4, "mesh.expert": 2}
OTHER_MESH = {"mesh.fsdp": 2, "mesh.expert": 4}
STEPS = 50
LAYOUTS = {1: 8, 2: 4, 4: 2}  # processes: devices of each


def run(workdir, count, devices, fields):
    """Trains to the end."""
    codes, outputs = processes.finish(processes.start(workdir, count, devices, CONFIG, fields), seconds=900)
    assert codes == [0] * count, "\n---\n".join(outputs)
    return outputs


def copy(workdir, target, step):
    """What a run of `workdir` that stopped at `step` would have left."""
    shutil.copytree(workdir, target)
    for folder in (target / "checkpoints").iterdir():
        if folder.name != str(step):
            shutil.rmtree(folder)
    return target


def position(workdir, step):
    """Where the reader stood."""
    return json.loads((workdir / "checkpoints" / str(step) / "data" / "metadata").read_text())


def seal(workdir, step):
    """What tells whether two states are the same to the bit."""
    return json.loads((workdir / "checkpoints" / str(step) / "checksums" / "metadata").read_text())


def assert_same_run(got, want, first=1, rtol=1e-3):
    """Of the same examples in every step, to the tolerance of float32 sums in another order."""
    got, want = ([r for r in processes.records(x) if r["kind"] == "train"] for x in (got, want))
    assert [r["step"] for r in got] == [r["step"] for r in want]
    for a, b in zip(got, want, strict=True):
        assert a["tokens"] == b["tokens"]
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=rtol, err_msg=f"step {a['step']}")


def assert_same_parameters(got, want, atol):
    """Adam divides by the root of a second moment: where gradients are noise, so is the step, of the learning rate."""
    found, expected = (transformer.load(x)[1] for x in (got, want))
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=atol, rtol=0, err_msg=jax.tree_util.keystr(path))


def resume_here(workdir, fields):
    """The same run, gone on with by this process and its eight devices."""
    values = config.load_config(CONFIG).to_dict()
    for name, value in fields.items():
        config.override(values, name, str(value))
    assert train(config.resolve(values), workdir, quiet=True).finished


def test_two_processes_train_what_one_resumes(tmp_path):
    """Saved at step 2 by two processes of two devices, and gone on with by one of eight."""
    fields = {**TINY, "train.steps": 4, "train.checkpoint_every": 2, "mesh.fsdp": 2, "mesh.expert": 2}
    first, second = run(tmp_path / "two", 2, 2, fields)
    assert "done" in first and not [line for line in second.splitlines() if line and "[Gloo]" not in line]
    one = copy(tmp_path / "two", tmp_path / "one", step=2)
    resume_here(one, {**fields, **MESH})
    assert position(one, 4) == position(tmp_path / "two", 4)
    assert_same_run(one, tmp_path / "two", rtol=1e-4)
    assert_same_parameters(one, tmp_path / "two", atol=1e-4)


@pytest.mark.slow
def test_processes_that_hold_the_same_rows_read_the_same(tmp_path):
    """Tensor parallelism over two processes: each holds every row of the batch, not half of them."""
    fields = {**TINY, "model.num_kv_heads": 2, "train.steps": 4, "train.checkpoint_every": 2}
    run(tmp_path / "two", 2, 1, {**fields, "mesh.tensor": 2})
    one = copy(tmp_path / "two", tmp_path / "one", step=2)
    resume_here(one, {**fields, **MESH})
    assert_same_run(one, tmp_path / "two", rtol=1e-4)
    assert_same_parameters(one, tmp_path / "two", atol=1e-4)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The same 50 steps by each layout, saved at 25 and 50."""
    root = tmp_path_factory.mktemp("straight")
    for count, devices in LAYOUTS.items():
        run(root / str(count), count, devices, {**TINY, **MESH, "train.steps": STEPS, "train.checkpoint_every": 25})
    return root


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_every_layout_trains_the_same(straight, count):
    assert position(straight / str(count), STEPS) == position(straight / "1", STEPS)
    assert_same_run(straight / str(count), straight / "1")
    assert_same_parameters(straight / str(count), straight / "1", atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("saved_by", "count", "devices"), [(4, 1, 8), (4, 2, 4), (4, 8, 1), (1, 2, 4), (2, 1, 8)])
def test_saved_by_one_layout_and_resumed_by_another_on_another_mesh(straight, tmp_path, saved_by, count, devices):
    workdir = copy(straight / str(saved_by), tmp_path / "run", step=25)
    run(workdir, count, devices, {**TINY, **OTHER_MESH, "train.steps": STEPS, "train.checkpoint_every": 25})
    assert position(workdir, STEPS) == position(straight / "1", STEPS)
    assert_same_run(workdir, straight / "1")
    assert_same_parameters(workdir, straight / "1", atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
def test_resumed_by_the_same_layout_it_is_the_straight_run(straight, tmp_path, count):
    workdir = copy(straight / str(count), tmp_path / "run", step=25)
    run(workdir, count, LAYOUTS[count], {**TINY, **MESH, "train.steps": STEPS, "train.checkpoint_every": 25})
    assert seal(workdir, STEPS) == seal(straight / str(count), STEPS)
    assert processes.records(workdir) == processes.records(straight / str(count))
