"""What people get wrong in the other commands: one line, as in train.py, before any weight is read."""

import json
from pathlib import Path

import pytest

from transformer import config, evaluate, report, tokenize

TEXT = "a.txt"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the commands run: a text, and workdirs that hold no checkpoint yet."""
    monkeypatch.chdir(tmp_path)
    Path(TEXT).write_text("Half a sentence, and the other half.")
    Path("bad.txt").write_bytes(b"\xff\xfe\x00")
    Path("empty.txt").touch()
    values = config.resolve(config.load_config("gpt2:tiny")).values
    runs = {"run": values, "nothing": {"model": {"family": "nothing"}}, "half": {"model": values["model"]}}
    for name, kept in runs.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(kept))
    return tmp_path


def said(capsys, main, arguments: list[str]) -> str:
    """The one line."""
    code = main(arguments)
    err = capsys.readouterr().err.strip()
    assert code == 2, err
    assert err.startswith("error: ") and "\n" not in err and len(err) < 1000
    return err


# Options behind the run and the text, and what must be said.
EVALUATE = {
    "a run without a checkpoint": ([], "run': no checkpoint yet", "train until"),
    "no such run": (["--workdir=none"], "none': no run here", "train one first"),
    "a run without a name": (["--workdir="], "no run here"),
    "a run of no family": (["--workdir=nothing"], "model.family='nothing'", "use one of"),
    "half a config": (["--workdir=half"], "half/config.json: names no tokenizer (data.tokenizer)", "restore it"),
    "no such text": (["--file=none*.txt"], "--file='none*.txt': matches no file"),
    "no text": (["--file=empty.txt"], "empty.txt holds no text", "leave it out"),
    "no UTF-8": (["--file=bad.txt"], "--file:", "bad.txt is not UTF-8 at byte 0", "convert it"),
    "rows of nothing": (["--length=0"], "length=0: use at least 1"),
    "rows beyond the positions": (["--length=9999"], "length=9999", "use at most"),
    "a stride beyond the row": (["--length=8", "--stride=9"], "stride=9: use 1 to length=8"),
    "a batch of nothing": (["--batch-size=0"], "batch_size=0: use at least 1"),
    "no such tokenizer": (["--tokenizer=none.json"], "data.tokenizer='none.json': can't be read"),
    "figures in no directory": (["--json=none/x.json"], "--json=none/x.json: there is no such directory", "make it"),
    "figures as a directory": (["--json=run"], "--json=run: a directory", "name a file"),
}


@pytest.mark.parametrize("case", EVALUATE)
def test_evaluate(case, folder, capsys):
    options, *words = EVALUATE[case]
    line = said(capsys, evaluate.main, ["--workdir=run", f"--file={TEXT}", *options])
    assert all(word in line for word in words), line


TOKENIZE = {
    "a vocabulary too small": (["--vocab-size=-1"], "--vocab-size=-1", "need at least 259"),
    "nowhere to write": (["--output="], "--output='': name a directory"),
    "fewer sentinels than none": (["--sentinels=-3"], "--sentinels=-3: use 0"),
    "a token of nothing": (["--special", ""], "--special=['']", "leave the empty one out"),
    "a token twice": (["--special", "<s>"], "--special=['<s>']", "once"),
    "pairs that never occur": (["--min-frequency=0"], "--min-frequency=0: use 1"),
}


@pytest.mark.parametrize("case", TOKENIZE)
def test_tokenize(case, folder, capsys):
    options, *words = TOKENIZE[case]
    line = said(capsys, tokenize.main, ["train", "--config=llama3:mini", "--output=tok", "--vocab-size=300", *options])
    assert all(word in line for word in words), line
    assert not Path("tok").exists() and not Path("tokenizer.json").exists()


def test_a_text_that_is_none(capsys):
    assert "text='a?b': is not UTF-8" in said(capsys, tokenize.main, ["inspect", "a\udce4b"])


REPORT = {
    "no record yet": ("", "x.html", "nothing told yet"),
    "half a line of JSON": ('{"step": 1\n', "x.html", "metrics.jsonl, line 1: damaged", "delete the line"),
    "a list for a record": ('{"step": 1, "kind": "train"}\n[1]\n', "x.html", "line 2: damaged"),
    "a record of no step": ('{"kind": "train"}\n', "x.html", "line 1: damaged"),
    "bytes for a record": (b"\xff\xfe\x00\n", "x.html", "line 1: damaged"),
    "a page as a directory": ("", "run", "run: a directory", "run/report.html"),
    "a page in no directory": ("", "none/x.html", "no directory none", "make it first"),
}


@pytest.mark.parametrize("case", REPORT)
def test_report(case, folder, capsys):
    pytest.importorskip("plotly")
    content, out, *words = REPORT[case]
    Path("run/metrics.jsonl").write_bytes(content.encode() if isinstance(content, str) else content)
    line = said(capsys, report.main, ["run", out])
    assert all(word in line for word in words), line
