"""What is told of a step: the experts' load, waits, and lines."""

import json

import jax.numpy as jnp
import numpy as np

from tests.training.test_boards import decoded
from transformer.training import metrics

LAYERS = {
    "decoder/head_0": {
        "share": jnp.array([0.5, 0.5]), "violation": jnp.array(1.0),
        "entropy": jnp.array(0.7), "dropped": jnp.array(0.0),
    },
    "decoder/body/block_0": {
        "share": jnp.array([[0.25, 0.75], [1.0, 0.0]]), "violation": jnp.array([1.5, 2.0]),
        "entropy": jnp.array([0.5, 0.1]), "dropped": jnp.array([0.0, 0.25]),
    },
}  # fmt: skip


def test_load_of_the_experts_is_logged_by_layer(tmp_path):
    log = metrics.MetricsLog(tmp_path, 0, False)
    written = []
    log._boards[0]._write = lambda step, summary: written.extend(summary.value)
    log.write(3, "train", metrics.plain({"loss": jnp.float32(2.0), "experts": LAYERS}))
    log.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record["loss"] == 2.0
    assert record["experts"]["decoder/body/block_0"]["share"] == [[0.25, 0.75], [1.0, 0.0]]
    scalars = {value.tag: value.simple_value for value in written if value.WhichOneof("value") == "simple_value"}
    worst = {name: scalars[f"train/experts/{name}"] for name in ("violation", "dropped", "entropy")}
    assert worst["violation"] == 2 and worst["dropped"] == 0.25 and np.isclose(worst["entropy"], 0.1)
    pictures = {
        value.tag: value.image.encoded_image_string for value in written if value.WhichOneof("value") == "image"
    }
    got = decoded(pictures["train/experts/decoder/body/block_0"])[::8, ::8]
    np.testing.assert_array_equal(got, [[63, 190], [254, 0]])
    assert set(pictures) == {f"train/experts/{name}" for name in LAYERS}


def test_the_clock_tells_waiting_apart(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])

    def wait(seconds):
        with clock.waiting():
            now[0] += seconds

    clock = metrics.Clock()
    wait(100)
    assert clock.lap(1) is None  # still compiling
    clock.start(1)
    wait(3)
    now[0] += 5
    wait(1)
    assert clock.lap(3) == (2, 9.0, 4.0)
    now[0] += 2
    assert clock.lap(4) == (1, 2.0, 0.0) and clock.lap(4) is None


def test_a_long_wait_for_data_is_shown(capsys):
    values = dict(loss=1.0, bits_per_byte=1.0, grad_norm=1.0, learning_rate=1e-3)
    line = metrics.ProgressLine(0, 10, quiet=False)
    line.record(1, values | {"data_wait": 0.25})
    line.record(2, values | {"data_wait": 0.001})
    line.close()
    first, second = capsys.readouterr().out.strip().splitlines()
    assert "data wait 25%" in first and "wait" not in second
