"""A run resumes as if it had never stopped, and refuses what it can't do before it starts."""

import json
import os
import signal

import jax
import numpy as np
import pytest

import transformer
from tests.training.damage import with_bit_flipped
from transformer import config
from transformer.checkpoints.workdir import Workdir, WorkdirError
from transformer.settings import SettingsError
from transformer.sharding import ShardingError
from transformer.training import loop
from transformer.training.loop import _Loop, train
from transformer.training.replicas import ReplicaError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "the", "of", "a"]
    for i in range(30):
        (folder / f"{i}.txt").write_text(" ".join(rng.choice(words, 120)) + f" {i}.")
    return str(folder / "*.txt")


def a_config(corpus: str, **train_fields):
    page = config.load_config("llama3:tiny")
    page.model.num_layers, page.model.d_ff = 2, 64
    page.data.update({"source": "text", "paths": (corpus,), "seq_len": 32, "batch_size": 8})
    page.data.validation_fraction = 0.2
    page.optimizer.warmup_steps = 2
    page.train.update({"steps": 9, "log_every": 1, "eval_every": 4, "checkpoint_every": 3, "eval_batches": 2})
    page.train.norms_every = 5
    page.train.update(train_fields)
    return page


def records(workdir) -> list[dict]:
    """Metrics without the timings."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    timings = ("tokens_per_second", "mfu", "data_wait")
    return [{k: v for k, v in json.loads(line).items() if k not in timings} for line in lines]


def identical(a, b) -> None:
    """Bit for bit, leaf by leaf."""
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert np.array_equal(np.asarray(x), np.asarray(y)), jax.tree_util.keystr(path)


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
    """An undisturbed run: its result and workdir."""
    workdir = tmp_path_factory.mktemp("straight")
    return train(config.resolve(a_config(corpus)), workdir, quiet=True), workdir


# Before anything was saved or evaluated, at an evaluation; and, where both have been, at a checkpoint.
@pytest.mark.parametrize("stop_at", [1, 4, *(pytest.param(step, marks=pytest.mark.slow) for step in (3, 8))])
def test_stopped_and_resumed_is_the_straight_run(corpus, straight, tmp_path, monkeypatch, stop_at):
    expected, straight_dir = straight
    run = config.resolve(a_config(corpus))
    record = _Loop._record

    def interrupt(self, step, kind, *told):
        record(self, step, kind, *told)
        if step == stop_at and kind == "train":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(_Loop, "_record", interrupt)
    stopped = train(run, tmp_path, quiet=True)
    assert not stopped.finished and int(stopped.state.step) == stop_at
    assert Workdir(tmp_path).latest_step() == stop_at
    monkeypatch.undo()
    resumed = train(run, tmp_path, quiet=True)
    assert resumed.finished
    identical(expected.state, resumed.state)
    assert records(tmp_path) == records(straight_dir)


def test_what_was_not_saved_is_done_again(corpus, straight, tmp_path, monkeypatch):
    """A crash loses the steps after the newest checkpoint and nothing else; their metrics are not kept twice."""
    expected, straight_dir = straight
    run = config.resolve(a_config(corpus))
    record = _Loop._record

    def crash(self, step, kind, *told):
        record(self, step, kind, *told)
        if step == 8:
            raise RuntimeError("power cut")

    monkeypatch.setattr(_Loop, "_record", crash)
    with pytest.raises(RuntimeError, match="power cut"):
        train(run, tmp_path, quiet=True)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "kin')
    monkeypatch.undo()
    assert Workdir(tmp_path).latest_step() == 6
    identical(expected.state, train(run, tmp_path, quiet=True).state)
    assert records(tmp_path) == records(straight_dir)


def test_a_finished_run_stays_as_it_is(straight):
    result, workdir = straight
    before = records(workdir)
    again = train(config.resolve(json.loads((workdir / "config.json").read_text())), workdir, quiet=True)
    assert again.finished and again.evaluation == result.evaluation
    assert records(workdir) == before
    identical(result.state, again.state)


def test_a_device_that_errs_ends_the_run_before_it_is_saved(corpus, tmp_path, monkeypatch):
    compiled = loop.compile_train_step

    def erring(*arguments):
        step = compiled(*arguments)

        def erring_step(state, batch):
            state, values = step(state, batch)
            if int(state.step) == 5:
                norm = state.params["decoder"]["final_norm"]
                norm["scale"] = with_bit_flipped(norm["scale"], device=6)
            return state, values

        return erring_step

    monkeypatch.setattr(loop, "compile_train_step", erring)
    run = config.resolve(a_config(corpus, check_replicas_every=4))
    with pytest.raises(ReplicaError, match="step 6: copies of params/decoder/final_norm/scale differ: 1 of 8"):
        train(run, tmp_path, quiet=True)
    assert Workdir(tmp_path).latest_step() == 3


def test_norms_are_recorded(straight):
    """In JSON lines and as histograms; a signal that stops the run changes none (they are among `records`)."""
    (norms,) = [record for record in records(straight[1]) if record["kind"] == "norms"]
    assert norms["step"] == 5 and len(norms["gradient/decoder/body/block_0/ffn/up/kernel"]) == 2
    events = b"".join(file.read_bytes() for file in (straight[1] / "tensorboard").iterdir())
    for kind in ("norms", "numbers"):
        assert f"{kind}/gradient/decoder/body/block_0/ffn/up/kernel".encode() in events


def test_training_learns(straight):
    result, workdir = straight
    losses = [r["loss"] for r in records(workdir) if r["kind"] == "train"]
    assert len(losses) == 9 and losses[-1] < losses[0] - 0.5
    evaluation = result.evaluation
    assert evaluation["loss"] < losses[0]
    np.testing.assert_allclose(evaluation["perplexity"], np.exp(evaluation["loss"]), rtol=1e-6)
    assert list((workdir / "tensorboard").glob("events*"))


def test_workdir_loads_as_a_model(straight):
    result, workdir = straight
    model, params, tokenizer = transformer.load(workdir)
    identical(result.state.params, params)
    assert model.apply({"params": params}, np.array([tokenizer.encode("the")])).shape == (1, 3, 264)
    text = transformer.generate_text(model, params, tokenizer, "the ", max_new_tokens=5, temperature=0.0)
    assert len(text) == 1


def test_another_config_is_refused_by_its_fields(corpus, straight):
    _, workdir = straight
    other = a_config(corpus)
    other.optimizer.peak_lr, other.data.seed = 0.5, 3
    with pytest.raises(WorkdirError, match=r"data\.seed: 0 -> 3; optimizer\.peak_lr: 0\.003 -> 0\.5"):
        train(config.resolve(other), workdir, quiet=True)
    assert json.loads((workdir / "config.json").read_text())["data"]["seed"] == 0


def test_another_tokenizer_is_refused(straight):
    result, workdir = straight
    place = Workdir(workdir)
    with pytest.raises(WorkdirError, match="tokenizer"):
        place.restore(9, result.state, {"kind": "other"})
    place.close()


def test_free_fields_may_change(corpus, straight, tmp_path):
    """How often things happen, and rounding, are not the run."""
    run = config.resolve(a_config(corpus, steps=3))
    train(run, tmp_path, quiet=True)
    other = a_config(corpus, steps=3, log_every=2, keep_checkpoints=1)
    other.compute.remat = "full"
    assert train(config.resolve(other), tmp_path, quiet=True).finished
    assert json.loads((tmp_path / "config.json").read_text())["compute"]["remat"] == "full"


@pytest.mark.parametrize(
    ("field", "value", "error", "match"),
    [
        ("model.vocab_size", 100, SettingsError, "model.vocab_size=100.*data.tokenizer"),
        ("mesh.fsdp", 3, ShardingError, "doesn't divide 8 devices"),
        ("mesh.tensor", 4, ShardingError, r"kv_heads=2 can't be split 4 ways.*mesh\.tensor"),
        ("data.batch_size", 12, ShardingError, "12.*must divide over 8 devices"),
        ("train.accumulate", 3, SettingsError, "train.accumulate=3.*data.batch_size=8"),
        ("data.tokenizer", "none.json", SettingsError, "none.json"),
        ("train.check_replicas_every", -1, SettingsError, "train.check_replicas_every=-1.*0 .never."),
        ("train.watchdog_seconds", -1.0, SettingsError, "train.watchdog_seconds=-1.0.*0 .never."),
        ("data.paths", ("/none/*.txt",), SettingsError, "data.paths"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(corpus, tmp_path, field, value, error, match):
    page = a_config(corpus)
    group, name = field.split(".")
    page[group][name] = value
    with pytest.raises(error, match=match):
        train(config.resolve(page), tmp_path / "new", quiet=True)
    assert not (tmp_path / "new").exists()


def test_rows_that_the_mesh_cannot_split_are_refused_before_anything_is_written(corpus, tmp_path):
    page = a_config(corpus)
    page.mesh.context, page.data.seq_len = 4, 36
    with pytest.raises(ShardingError, match=r"data\.seq_len=36: mesh\.context=4 cuts rows into 8 parts"):
        train(config.resolve(page), tmp_path / "new", quiet=True)
    assert not (tmp_path / "new").exists()


def test_a_file_is_no_workdir(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkdirError, match="can't be written"):
        train(config.resolve(a_config(corpus)), tmp_path / "file", quiet=True)
    with pytest.raises(WorkdirError, match="no run here"):
        transformer.load(tmp_path)


def test_waiting_for_data_is_recorded(straight):
    found = [json.loads(line) for line in (straight[1] / "metrics.jsonl").read_text().splitlines()]
    waits = [record["data_wait"] for record in found if "data_wait" in record]
    assert len(waits) >= 6 and all(0 <= wait <= 1 for wait in waits)


@pytest.mark.slow
def test_data_that_end_are_saved_and_told(corpus, tmp_path, caplog):
    page = a_config(corpus, steps=1000, eval_every=0, checkpoint_every=0)
    page.data.update({"source": "mixture", "paths": (), "mixture": ({"paths": (corpus,), "weight": 1, "epochs": 1},)})
    result = train(config.resolve(page), tmp_path, quiet=True)
    step = int(result.state.step)
    assert not result.finished and 5 < step < 100 and Workdir(tmp_path).latest_step() == step
    assert f"the data ended at step {step} of train.steps=1000, which is saved: lower train.steps" in caplog.text
