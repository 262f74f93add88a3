"""What TensorBoard and Weights & Biases are given, and that nobody imports the latter unasked."""

import html
import json
import struct
import sys
import types
import zlib

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tensorboardX.proto.event_pb2 import Event

from transformer import sharding
from transformer.checkpoints.workdir import Workdir
from transformer.settings import Mesh, SettingsError, Train
from transformer.training import boards, metrics
from transformer.training.norms import BINS, histogram

NUMBERS = np.random.default_rng(0).standard_normal((4, 16, 24)).astype(np.float32)


def decoded(png: bytes) -> np.ndarray:
    """The pixels of an unfiltered 8-bit grey PNG, every checksum checked."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        assert struct.unpack(">I", png[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + data)
        chunks[kind], at = data, at + 12 + size
    width, height, depth, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert (depth, colour) == (8, 0) and chunks[b"IEND"] == b""
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not rows[:, 0].any()
    return rows[:, 1:]


def test_png_holds_the_pixels():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7), dtype=np.uint8)
    np.testing.assert_array_equal(decoded(boards.png(pixels)), pixels)


def events(folder) -> list[Event]:
    """Of the one event file there: records of a length, its checksum, the bytes, and theirs."""
    (file,) = folder.iterdir()
    found, data, at = [], file.read_bytes(), 0
    while at < len(data):
        (size,) = struct.unpack("<Q", data[at : at + 8])
        found.append(Event.FromString(data[at + 12 : at + 12 + size]))
        at += 16 + size
    return found


@pytest.mark.parametrize("where", [None, PartitionSpec("fsdp", None, "tensor")])
def test_a_histogram_is_numpys_wherever_the_numbers_lie(where):
    x = NUMBERS
    mesh = sharding.make_mesh(Mesh(data=1, fsdp=4, tensor=2))
    if where is not None:
        x = jax.device_put(x, NamedSharding(mesh, where))
    program = jax.jit(histogram).lower(x).compile()
    assert "all-gather" not in program.as_text()
    got = jax.device_get(program(x))
    counts, edges = np.histogram(NUMBERS, BINS, range=(NUMBERS.min(), NUMBERS.max()))
    np.testing.assert_allclose(got.edges, edges, rtol=1e-5, atol=1e-6)
    assert np.abs(got.counts - counts).sum() <= 4 and got.counts.sum() == NUMBERS.size  # an edge may round
    np.testing.assert_allclose([got.sum, got.squares], [NUMBERS.sum(), np.square(NUMBERS).sum()], rtol=1e-4)
    one = jax.device_get(jax.jit(histogram)(np.float32(3.0)))
    assert one.counts.sum() == 1 and one.sum == 3


def test_tensorboard_has_scalars_and_histograms(tmp_path):
    log = metrics.MetricsLog(tmp_path, 4, False)
    spread = jax.device_get(jax.jit(histogram)(NUMBERS))
    bad = spread._replace(edges=spread.edges * np.nan)
    log.write(5, "norms", {"a": 2.5, "b": [1.0, 3.0]}, {"gradient/w": spread, "gradient/bad": bad})
    log.text(6, "sample", "a < b")
    log.close()
    first, *shown = events(tmp_path / "tensorboard")[1:]
    assert first.step == 5 and first.session_log.status == 1  # hides what an earlier try wrote
    values = {value.tag: (event.step, value) for event in shown for value in event.summary.value}
    assert values.keys() == {"norms/a", "norms/b", "numbers/gradient/w", "sample/text_summary"}
    assert values["norms/a"][1].simple_value == 2.5 and values["sample/text_summary"][0] == 6
    layers, numbers = (values[tag][1].histo for tag in ("norms/b", "numbers/gradient/w"))
    assert (layers.min, layers.max, layers.num, layers.sum, layers.sum_squares) == (1, 3, 2, 4, 10)
    np.testing.assert_array_equal(numbers.bucket, spread.counts)
    np.testing.assert_allclose(numbers.bucket_limit, spread.edges[1:])
    assert numbers.num == NUMBERS.size and np.isclose(numbers.min, NUMBERS.min())
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record == {"step": 5, "kind": "norms", "a": 2.5, "b": [1.0, 3.0]}


class Refused(Exception):
    """What the module raises where nobody has logged in."""


@pytest.fixture
def wandb(monkeypatch):
    """A module in the place of the real one, that keeps what it is told."""
    told = types.SimpleNamespace(inits=[], logs=[], finished=0)

    def finish():
        told.finished += 1

    def init(**given):
        if told.inits is None:
            raise Refused("api_key not configured")
        told.inits.append(given)
        return types.SimpleNamespace(log=lambda values, step: told.logs.append((step, values)), finish=finish)

    module = types.ModuleType("wandb")
    module.init, module.Error = init, Refused
    module.Histogram = lambda np_histogram: ("histogram", *np_histogram)
    module.Image, module.Html = (lambda x: ("image", x)), (lambda x: ("html", x))
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setitem(sys.modules, "PIL", types.ModuleType("PIL"))
    return told


def opened(folder, step=0, **train):
    workdir = Workdir(folder)
    workdir.open_config({"model": {"family": "x"}, "seed": 3})
    return metrics.open_log(workdir, Train(**train), step)


def test_weights_and_biases_is_given_what_tensorboard_is(tmp_path, wandb):
    layer = {"share": [0.5, 0.5], "violation": 1.0, "entropy": 0.7, "dropped": 0.0}
    log = opened(tmp_path, wandb_project="p")
    spread = boards.Histogram.of(NUMBERS.ravel())
    log.write(1, "train", {"loss": 2.0, "experts": {"decoder/tail_0": layer}}, {"w": spread})
    log.text(2, "sample", "a < b")
    log.close()
    (given,) = wandb.inits
    assert (given["project"], given["name"], given["config"]["seed"]) == ("p", tmp_path.name, 3)
    (step, values), sample = wandb.logs
    scalars = {name: x for name, x in values.items() if not isinstance(x, tuple)}
    worst = {"violation": 1.0, "dropped": 0.0, "entropy": 0.7}
    assert step == 1 and scalars == {"train/loss": 2.0} | {f"train/experts/{k}": x for k, x in worst.items()}
    assert values["train/experts/decoder/tail_0"][1].shape == (8, 16)
    kind, counts, edges = values["numbers/w"]
    assert kind == "histogram" and counts is spread.counts and edges is spread.edges
    assert sample == (2, {"sample": ("html", f"<pre>{html.escape('a < b')}</pre>")}) and wandb.finished == 1
    # The same command goes on with the same run.
    opened(tmp_path, 2, wandb_project="p").close()
    assert wandb.inits[1]["id"] == given["id"] and given["resume"] == "allow"


def test_who_is_not_let_in_is_told_what_to_do(tmp_path, wandb):
    wandb.inits = None
    with pytest.raises(SettingsError, match=r"train.wandb_project='p': api_key not configured; .*WANDB_MODE=offline"):
        opened(tmp_path, wandb_project="p")


def test_nobody_imports_it_unasked(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # whoever imports it fails
    log = opened(tmp_path)
    log.write(1, "train", {"loss": 2.0})
    log.close()
    boards.check_project("")
    monkeypatch.setitem(sys.modules, "PIL", types.ModuleType("PIL"))
    with pytest.raises(SettingsError, match=r"wandb_project='p': needs wandb; pip install 'transformer\[wandb\]'"):
        boards.check_project("p")
    assert not (tmp_path / "wandb.id").exists()
