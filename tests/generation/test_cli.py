"""`python -m transformer.generate`: what it prints where, and one line for what can't be done."""

import io
import re
import subprocess
import sys

import pytest

from tests import common
from transformer import api
from transformer.generate import main
from transformer.tokenizer import ByteTokenizer

FAMILY = "llama3"
COMMON = ["--workdir", "w", "--max-new-tokens", "20"]


@pytest.fixture
def cli(monkeypatch, capsys):
    """Runs the command line on the tiny model; gives (status, stdout, stderr)."""
    loaded = common.model(FAMILY), common.params(FAMILY), ByteTokenizer()
    monkeypatch.setattr(api, "load", lambda workdir: loaded)

    def run(*arguments):
        status = main([*COMMON, *arguments])
        return status, *capsys.readouterr()

    return run


def text(**options) -> str:
    options = {"temperature": 0.0, **options}
    return api.generate_text(common.model(FAMILY), common.params(FAMILY), ByteTokenizer(), max_new_tokens=20, **options)


def test_one_prompt_streams_its_text_alone(cli):
    want = text(prompts="The ")[0]
    status, out, err = cli("--prompt", "The ", "--greedy")
    assert (status, out) == (0, want + "\n")
    assert re.fullmatch(r"20 tokens in [\d.]+ s, [\d.]+ tokens/s, first text after [\d.]+ s .*\n", err)
    assert cli("--prompt", "The ", "--greedy", "--no-stream")[1] == out


def test_several_prompts_print_each_with_its_text(cli, tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_text("from a file: é")
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    prompts = ["The ", "from a file: é", "from stdin"]
    status, out, _ = cli("--prompt", "The ", "--prompt-file", str(tmp_path / "p.txt"), "--prompt-file", "-", "--greedy")
    assert status == 0
    whole = [prompt + answer for prompt, answer in zip(prompts, text(prompts=prompts), strict=True)]
    assert out == "".join(f"--- {i} of 3 ---\n{t}\n" for i, t in enumerate(whole, start=1))


def test_samples_differ_and_follow_the_seed(cli):
    ask = ("--prompt", "The ", "--num-samples", "2", "--temperature", "1.5", "--top-k", "50", "--top-p", "0.99")
    first, again, other = (cli(*ask, "--seed", seed)[1] for seed in ("1", "1", "2"))
    assert first == again != other
    a, b = first.split("--- 2 of 2 ---\n")
    assert a.removeprefix("--- 1 of 2 ---\n") != b
    want = text(prompts=["The ", "The "], temperature=1.5, top_k=50, top_p=0.99, seed=1)
    assert b == "The " + want[1] + "\n"


def test_a_stop_string_ends_the_text(cli):
    whole = text(prompts="The ")[0]
    stop = whole[2:4]
    assert cli("--prompt", "The ", "--greedy", "--stop", stop)[1] == whole[: whole.index(stop)] + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--top-p", "2"], "top_p=2.0: use a probability"),
        (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens=0: use at least 1"),
        (["--prompt", "a", "--stop", ""], "stop="),
        (["--prompt-file", "/nowhere/at/all"], "No such file"),
    ],
)
def test_what_cannot_be_done_is_one_line(cli, arguments, message):
    status, out, err = cli(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_a_file_that_is_no_text_is_one_line(cli, tmp_path):
    (tmp_path / "p").write_bytes(b"ab\xff")
    status, _, err = cli("--prompt-file", str(tmp_path / "p"))
    assert status == 2 and "not UTF-8 text" in err and "byte 2" in err


def test_a_workdir_without_a_run_is_one_line(capsys, tmp_path):
    assert main(["--workdir", str(tmp_path), "--prompt", "a"]) == 2
    err = capsys.readouterr().err
    assert str(tmp_path) in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [[], ["--prompt", "a", "--greedy", "--top-k", "2"], ["--prompt", "a", "--num-samples", "0"]]
)
def test_options_that_contradict_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*COMMON, *arguments])
    assert stop.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_help_does_not_wait_for_jax():
    code = "import sys; sys.argv = ['x', '--help']\ntry: from transformer import generate; generate.main()\n"
    code += "except SystemExit as stop: assert stop.code == 0\nassert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
