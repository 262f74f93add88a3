"""The page of a run: what its metrics hold, no more and no less."""

import json
import re

import numpy as np
import pytest

pytest.importorskip("plotly")

from transformer import config, report
from transformer.figures import training as figures
from transformer.figures.data import training as data
from transformer.training.metrics import MetricsLog

LAYER = {"share": [0.75, 0.25], "violation": 1.5, "entropy": 0.5, "dropped": 0.0}


@pytest.fixture
def workdir(tmp_path):
    """A run of ten steps that were never run."""
    folder = tmp_path / "run<1>"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.resolve(config.load_config("mixtral:tiny")).values))
    log = MetricsLog(folder, 0, False)
    for step in range(1, 11):
        values = dict(
            loss=5 - step / 4, bits_per_byte=3.0, grad_norm=10.0**-step, learning_rate=1e-3, skipped=step // 5
        )
        layers = {"decoder/body/block_0": {**LAYER, "violation": [1.5, step], "share": [LAYER["share"]] * 2}}
        log.write(step, "train", {**values, "experts": layers})
    log.write(10, "eval", dict(loss=2.75, bits_per_byte=2.5, perplexity=15.6))
    for step in (5, 10):
        log.write(step, "norms", {"gradient/a/kernel": [1.0, step], "gradient/b": 2.0, "activation/x": [3.0]})
    log.close()
    return folder


def test_layers_are_lines(workdir):
    steps, names, norms = data.layers(data.read(workdir), "gradient")
    assert (steps, names) == ((5, 10), ("a/kernel[0]", "a/kernel[1]", "b"))
    assert norms == [[1, 1], [5, 10], [2, 2]]
    assert data.experts(data.read(workdir), "violation", max) == (tuple(range(1, 11)), (1.5, *range(2, 11)))


def test_panels_are_those_that_were_told(workdir):
    drawn = figures.run_panels(workdir)
    titles = [note.text for note in drawn.layout.annotations]
    assert len(titles) == 7 and not any("FLOP" in title or "wait" in title for title in titles)
    np.testing.assert_allclose(drawn.data[3].y, 10.0 ** -np.arange(1, 11))
    assert drawn.layout.yaxis3.type == "log"
    layers = figures.run_layers(workdir, "gradient")
    np.testing.assert_allclose(layers.data[0].z[1], np.log10([5, 10]))


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_stands_alone(workdir, tmp_path, capsys, language):
    out = tmp_path / "page.html"
    assert report.main([str(workdir), str(out), f"--language={language}", "--theme=dark"]) == 0
    text = out.read_text()
    assert "10 of " in text and "loss 2.75" in text and "&lt;1&gt;" in text and "run<1>" not in text
    assert text.count("Plotly.newPlot(") >= 4  # losses, panels, two kinds of norms
    assert not re.search(r"<(script|link)[^>]+(src|href)=", text)
    assert f"wrote {out}" in capsys.readouterr().out


def test_no_run_is_one_line(workdir, tmp_path, capsys):
    (workdir / data.FILE).unlink()
    for arguments, said in (
        ([str(tmp_path / "none"), "x.html"], "no run here"),
        ([str(workdir), str(tmp_path / "x.html")], "nothing told yet"),
        ([str(workdir), str(tmp_path / "no" / "x.html")], "no directory"),
    ):
        assert report.main(arguments) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1
