"""What people get wrong: one line that names the field, the value and the remedy, before anything is compiled."""

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import train
from transformer.training import loop

TEXT = "A sentence about nothing much, with a number of words in it, again and again. "


@pytest.fixture(autouse=True)
def nothing_compiles(monkeypatch):
    """Who comes as far as the training step was let through. Nor is there a package that few have."""
    monkeypatch.setitem(sys.modules, "wandb", None)

    def reached(*_):
        raise AssertionError("not refused: the training step would be compiled")

    monkeypatch.setattr(loop, "compile_train_step", reached)


def said(capsys, folder: Path, *arguments: str, size: str = "gpt2:tiny") -> str:
    """The one line."""
    code = train.main([f"--config={size}", f"--workdir={folder / 'run'}", "--quiet", *arguments])
    err = capsys.readouterr().err.strip()
    assert code == 2, err
    assert err.startswith("error: ") and "\n" not in err and "Traceback" not in err
    assert len(err) < 1000
    return err


# Fields: the setting that is wrong, and what must be said.
FIELDS = {
    "an unknown group": ("trian.steps=3", "trian.steps='3'", "no such group"),
    "an unknown field": ("train.stops=3", "train.stops='3'", "did you mean train.steps"),
    "a word for a number": ("train.steps=many", "train.steps='many'", "expected int"),
    "a fraction for a count": ("data.batch_size=1.5", "data.batch_size=1.5", "expected int"),
    "no such choice": ("optimizer.name=sgd", "optimizer.name='sgd'", "use one of"),
    "no steps": ("train.steps=0", "train.steps=0", "at least 1"),
    "a warm-up longer than the run": ("optimizer.warmup_steps=300", "optimizer.warmup_steps=300", "lower it"),
    "a negative learning rate": ("optimizer.peak_lr=-1.0", "optimizer.peak_lr=-1.0", "use a positive"),
    "an endless learning rate": ("optimizer.peak_lr=1e999", "optimizer.peak_lr=inf", "finite"),
    "an end without use": ("optimizer.schedule=constant,optimizer.end_lr_fraction=0.5", "end_lr_fraction=0.5", "leave"),
    "a moment that never decays": ("optimizer.moments_dtype=bfloat16,optimizer.b2=0.999", "b2=0.999", "at most 0.99"),
    "Adafactor with b2": ("optimizer.name=adafactor,optimizer.b2=0.9", "optimizer.b2=0.9", "no use for it"),
    "a group of no axis": ("optimizer.groups=({'axes': ('vocabs',)},)", "'vocabs'", "use some of"),
    "a group of no parameter": ("optimizer.groups=({'axes': ('experts',)},)", "axes=('experts',)", "leave it out"),
    "accumulation that doesn't divide": ("data.batch_size=7,train.accumulate=2", "train.accumulate=2", "must divide"),
    "a mesh of too many devices": ("mesh.data=1,mesh.fsdp=64", "mesh", "64"),
    "two axes that take the rest": ("mesh.fsdp=-1", "mesh", "only one axis may be -1"),
    "a batch smaller than the mesh": ("data.batch_size=3", "data.batch_size", "3"),
    "more tensor parts than heads": ("mesh.data=1,mesh.tensor=8", "8", "mesh.tensor"),
    "a row beyond learned positions": ("data.seq_len=4096", "data.seq_len=4096", "use a shorter row"),
    "heads that don't divide": ("model.num_heads=5", "num_heads", "5"),
    "no layers": ("model.num_layers=0", "num_layers", "0"),
    "a field that the family hasn't": ("model.window=8", "model.window=8", "unknown field"),
    "a vocabulary too small for the data": ("model.vocab_size=100", "model.vocab_size=100", "use model.vocab_size=259"),
    "no tokenizer there": ("data.tokenizer=none.json", "none.json", "can't be read"),
    "an objective for encoders": ("data.objective=masked", "data.objective='masked'", "trains on"),
    "paths without files": ("data.source=text,data.paths=('none/*.txt',)", "none/*.txt", "matches no file"),
    "paths for no source": ("data.paths=('a.txt',)", "data.paths=('a.txt',)", 'data.source="text"'),
    "all of it held out": ("data.validation_fraction=1.0", "data.validation_fraction=1.0", "between 0 and 1"),
    "a spike below nothing": ("train.spike=-1.0", "train.spike=-1.0", "use 0 (off)"),
    "balance without experts": ("balance.auxiliary=0.1", "balance.auxiliary=0.1", "set it to 0"),
    "host memory on a CPU": ("optimizer.moments_memory=pinned_host", "moments_memory='pinned_host'", "device"),
    "remat of no point": ("compute.remat=names,compute.remat_names=('qkv',)", "'qkv'", "use some of"),
    "more steps than can be counted": ("train.steps=9999999999", "train.steps=9999999999", "2**31 - 1"),
    "an army of workers": ("data.workers=100000", "data.workers=100000", "a core or two"),
    "a number for groups": ("optimizer.groups=3", "optimizer.groups=3", "write ({'axes': …},)"),
    "a mixture that is no literal": ("data.source=mixture,data.mixture=({'weight':nan},)", "nan", "{'weight': …}"),
    "a project without its packages": ("train.wandb_project=p", "train.wandb_project='p'", "transformer[wandb]"),
    "a mixture of nothing": ("data.source=mixture", "data.mixture", "components"),
}  # fmt: skip


@pytest.mark.parametrize("case", FIELDS)
def test_a_wrong_field(case, capsys, tmp_path):
    options, *words = FIELDS[case]
    line = said(capsys, tmp_path, size=f"gpt2:tiny,{options}")
    assert all(word in line for word in words), line
    assert not (tmp_path / "run").exists()


def test_a_window_of_nothing(capsys, tmp_path):
    line = said(capsys, tmp_path, size="mistral:tiny,model.window=0")
    assert "window" in line and "0" in line


def parquet(path: Path, **columns) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(columns), path)
    return path


def truncated(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def written(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


# Files: how one is made, and what must be said of it beside its name.
FILES: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "an empty text": (written("a.txt", b""), ("no text",)),
    "blanks alone": (written("a.txt", b" \n\n "), ("no text",)),
    "a text in Latin 1": (written("a.txt", "Käse".encode("latin-1") * 99), ("not UTF-8",)),
    "an empty JSONL": (written("a.jsonl", b""), ("no text",)),
    "binary garbage in JSONL": (written("a.jsonl", b'{"text": "a"}\n\x00\xff\xfe\x01\n'), ("line 2", "skip")),
    "half a line of JSON": (written("a.jsonl", b'{"text": "a"}\n{"text": "b\n'), ("line 2", "not JSON")),
    "a list for an object": (written("a.jsonl", b"[1, 2]\n"), ("line 1", "expected an object")),
    "a missing column": (written("a.jsonl", b'{"body": "x"}\n'), ("'text'", "'body'", "data.text_field")),
    "a number for a text": (written("a.jsonl", b'{"text": 3}\n'), ("line 1", "int", "expected a text")),
    "a truncated gzip": (
        written("a.jsonl.gz", gzip.compress(b'{"text": "a sentence"}\n' * 999)[:40]), ("a.jsonl.gz",)
    ),
    "a truncated Parquet": (
        lambda folder: truncated(parquet(folder / "a.parquet", text=[TEXT] * 99)), ("a.parquet",)
    ),
    "a Parquet without the column": (
        lambda folder: parquet(folder / "a.parquet", body=["x", "y"]), ("'text'", "body", "data.text_field")
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_wrong_file(case, capsys, tmp_path):
    make, words = FILES[case]
    name = make(tmp_path)
    line = said(capsys, tmp_path, size=f"gpt2:tiny,data.source=text,data.paths=('{name}',)")
    assert "data." in line and all(word in line for word in words), line
    assert not (tmp_path / "run").exists()


def refusal(capsys, folder: Path, change: Callable[[Path], None], *arguments: str) -> str:
    """Of a workdir that is as `change` leaves it."""
    change(folder / "run")
    return said(capsys, folder, *arguments)


def test_a_workdir_that_is_a_file(capsys, tmp_path):
    assert "use another workdir" in refusal(capsys, tmp_path, lambda run: run.write_text("x"))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no place that not even root may write to")
def test_a_workdir_that_is_read_only(capsys):
    assert "can't be written" in said(capsys, Path("/proc"))


def test_a_workdir_with_a_damaged_config(capsys, tmp_path):
    def damage(run: Path) -> None:
        run.mkdir()
        (run / "config.json").write_text('{"model": ')

    assert "config.json: damaged" in refusal(capsys, tmp_path, damage)


def test_a_workdir_of_another_run(capsys, tmp_path):
    from transformer import config

    def other(run: Path) -> None:
        run.mkdir()
        (run / "config.json").write_text(json.dumps(config.resolve(config.load_config("gpt2:tiny")).values))

    line = refusal(capsys, tmp_path, other, "--config.optimizer.peak_lr=0.5")
    assert "optimizer.peak_lr: 0.003 -> 0.5" in line and "another workdir" in line


def test_a_source_that_is_none(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "config.json" in said(capsys, tmp_path, f"--init-from={tmp_path / 'empty'}")
    assert "convert it first" in said(capsys, tmp_path, "--init-from=model.gguf")


def test_a_workdir_without_a_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "--workdir='': name a directory" in said(capsys, tmp_path, "--workdir=")
    assert not [*tmp_path.iterdir()]


def test_a_config_page_that_fails(capsys, tmp_path):
    page = tmp_path / "page.py"
    page.write_text("def get_config():\n    return {}['size']\n")
    line = said(capsys, tmp_path, size=str(page))
    assert f"config='{page}': get_config fails (KeyError: 'size')" in line


def test_a_window_of_the_profiler(capsys, tmp_path):
    assert "steps=FIRST:LAST" in said(capsys, tmp_path, "--profile=10")
