"""`python -m transformer.generate`: what it prints where, and one line for what can't be done."""

import io
import re
import subprocess
import sys
import time

import jax
import pytest

from tests import common
from tests.generation.common import GREEDY, stand_in
from transformer import api, generation, spec
from transformer.checkpoints import source
from transformer.generate import main
from transformer.generation.meter import STAGES, Meter
from transformer.tokenizer import ByteTokenizer

FAMILY = "llama3"
LONG = "A prompt that is longer than the windows are"
COMMON = ["--workdir", "w", "--max-new-tokens", "20"]


@pytest.fixture
def cli(monkeypatch, capsys):
    """Runs the command line on the tiny model; gives (status, stdout, stderr)."""
    loaded = common.model(FAMILY), common.params(FAMILY), ByteTokenizer()
    stand_in(monkeypatch, loaded)

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
    read, speed = err.splitlines()
    assert re.fullmatch(r"read in [\d.]+ s, layers stacked", read)
    assert re.fullmatch(r"20 tokens in [\d.]+ s: first text after [\d.]+ s, nothing compiled, [\d.]+ tokens/s", speed)
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
        (["--prompt", "a", "--repetition-penalty", "0"], "repetition_penalty=0.0: use 1 (none)"),
        (["--prompt", "a", "--window", "100000"], "sinks + window=100004: must be at most"),
        (["--prompt-file", "/nowhere"], "--prompt-file /nowhere: can't be read (No such file or directory); give the"),
        (["--prompts", "/nowhere"], "--prompts /nowhere: can't be read (No such file or directory); give the"),
    ],
)
def test_what_cannot_be_done_is_one_line(cli, arguments, message):
    status, out, err = cli(*arguments)
    assert (status, out) == (2, "")
    err = re.sub(r"^read in .*\n", "", err)
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_a_file_that_is_no_text_is_one_line(cli, tmp_path):
    (tmp_path / "p").write_bytes(b"ab\xff")
    status, _, err = cli("--prompt-file", str(tmp_path / "p"))
    assert status == 2 and "not UTF-8 text" in err and "byte 2" in err


def test_a_workdir_without_a_run_is_one_line(capsys, tmp_path):
    assert main(["--workdir", str(tmp_path), "--prompt", "a"]) == 2
    err = capsys.readouterr().err
    assert str(tmp_path) in err and err.count("\n") == 1


MANY = ["--prompts", "x"]
CONTRADICTIONS = {
    "give a --prompt, a --prompt-file or --prompts": [],
    "--greedy: leaves nothing to --top-k, --min-p": ["--prompt", "a", "--greedy", "--top-k", "2", "--min-p", "0.1"],
    "argument --num-samples: 0: use at least 1": ["--prompt", "a", "--num-samples", "0"],
    "argument --max-new-tokens: 0: use at least 1": ["--prompt", "a", "--max-new-tokens", "0"],
    "argument --seed: invalid int value: 'x'": ["--prompt", "a", "--seed", "x"],
    "argument --batch-size: invalid int value: 'x'": ["--prompt", "a", "--batch-size", "x"],
    "argument --cache-dtype: invalid choice: 'int4'": ["--prompt", "a", "--cache-dtype", "int4"],
    "argument --weights: invalid choice: 'int4'": ["--prompt", "a", "--weights", "int4"],
    "--sinks: needs --window": ["--prompt", "a", "--sinks", "4"],
    "--output: needs --prompts": ["--prompt", "a", "--output", "x"],
    "--prompts: reads and writes files; leave out --prompt, --no-stream": [*MANY, "--prompt", "a", "--no-stream"],
    "--stop: an empty string stops everything; leave it out": ["--prompt", "a", "--stop", "x", "--stop", ""],
    "--beams: finds the most probable text; leave out --top-k, --greedy, --seed, --stop": [
        "--prompt",
        "a",
        "--beams",
        "2",
        "--top-k",
        "3",
        "--greedy",
        "--seed",
        "0",
        "--stop",
        "x",
    ],
    "--beams: finds the most probable text; leave out --repetition-penalty, --num-samples": [
        "--prompt",
        "a",
        "--beams",
        "2",
        "--repetition-penalty",
        "2",
        "--num-samples",
        "2",
    ],
    "--length-penalty: needs --beams": ["--prompt", "a", "--length-penalty", "0"],
    "--early-stopping: needs --beams": ["--prompt", "a", "--early-stopping", "true"],
    "--system: needs --chat": ["--prompt", "a", "--system", "s"],
    "--tokenizer: needs --hf": ["--prompt", "a", "--tokenizer", "bytes"],
    "unrecognized arguments: --nonsense": ["--prompt", "a", "--nonsense"],
}


@pytest.mark.parametrize(("message", "arguments"), CONTRADICTIONS.items())
def test_options_that_contradict_are_refused_in_one_line(message, arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*COMMON, *arguments])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}") and err.endswith("(--help lists the options)\n") and err.count("\n") == 1


def test_beams_print_the_best_text(cli):
    model, params = common.model(FAMILY), common.params(FAMILY)
    beams = generation.Beams(num_beams=3, length_penalty=0.5, early_stopping="never")
    [want] = generation.complete(model, params, ByteTokenizer(), ["The "], max_new_tokens=20, beams=beams)
    flags = ("--beams", "3", "--length-penalty", "0.5", "--early-stopping", "never")
    status, out, err = cli("--prompt", "The ", *flags)
    assert (status, out) == (0, want.text + "\n") and want.text != text(prompts="The ")[0]
    assert f"{len(want.tokens)} tokens in " in err


def test_numbers_reach_the_model(cli):
    ask = ("--prompt", "The ", "--greedy")
    plain = text(prompts="The ")[0]
    penalised = text(prompts="The ", repetition_penalty=9.0)[0]
    assert cli(*ask, "--repetition-penalty", "9")[1] == penalised + "\n" != plain + "\n"
    model, params = common.model(FAMILY), common.params(FAMILY)
    options = dict(max_new_tokens=20, temperature=0.0)
    flags = ("--prompt", LONG, "--greedy", "--logprobs")
    narrow = api.generate_text(model, generation.quantize(model, params), ByteTokenizer(), LONG, **options)[0]
    shown = {out: cli(*flags, *weights)[1] for out, weights in (("plain", ()), ("narrow", ("--weights", "int8")))}
    assert shown["narrow"].startswith(narrow + "\n") and shown["narrow"] != shown["plain"]
    windowed = model.clone(spec=spec.streaming(model.spec, sinks=2, window=6))
    want = api.generate_text(windowed, params, ByteTokenizer(), LONG, **options)[0]
    assert cli("--prompt", LONG, "--greedy", "--sinks", "2", "--window", "6")[1] == want + "\n"
    assert want != text(prompts=LONG)[0]


def test_options_of_the_run_are_handed_on_and_change_no_text(cli, monkeypatch):
    given, run = [], generation.text.generate
    monkeypatch.setattr(generation.text, "generate", lambda *args, **rest: given.append(rest) or run(*args, **rest))
    want = text(prompts=LONG)[0]
    given.clear()
    flags = ("--cache-dtype", "float32", "--prefill-chunk", "8", "--batch-size", "3", "--seed", "5")
    assert cli("--prompt", LONG, "--greedy", *flags)[1] == want + "\n"
    wanted = {"cache_dtype": "float32", "prefill_chunk": 8, "batch_size": 3, "seed": 5}
    assert wanted.items() <= given[0].items()
    cli("--prompt", LONG, "--greedy")
    assert not {"cache_dtype", "prefill_chunk", "batch_size"} & set(given[1])


def test_logprobs_follow_the_text_token_by_token(cli):
    model, params = common.model(FAMILY), common.params(FAMILY)
    [want] = generation.complete(model, params, ByteTokenizer(), ["The "], max_new_tokens=20, sampling=GREEDY)
    out = cli("--prompt", "The ", "--greedy", "--logprobs")[1]
    lines = out.removeprefix(want.text + "\n").splitlines()
    shown = [f"{p:10.4f}  {ByteTokenizer().decode([t])!r}" for t, p in zip(want.tokens, want.logprobs, strict=True)]
    assert lines == shown and len(shown) == len(want.tokens)


def test_layers_apart_say_the_same_and_auto_chooses_by_the_steps(cli):
    ask = ("--prompt", "The ", "--greedy")
    _, out, err = cli(*ask, "--layers", "apart")
    assert out == text(prompts="The ")[0] + "\n" and ", layers apart\n" in err
    long = cli(*ask, "--max-new-tokens", "400", "--stop", out[1])
    assert ", layers apart\n" in long[2] and ", layers stacked\n" in cli(*ask)[2]
    # Batches of 64: ten prompts are as many steps as one, two at a time five times as many.
    many = ("--prompt", "The ", "--num-samples", "10", "--max-new-tokens", "100", "--stop", out[1], "--greedy")
    assert ", layers stacked\n" in cli(*many)[2] and ", layers apart\n" in cli(*many, "--batch-size", "2")[2]
    assert ", layers stacked\n" in cli(*ask, "--layers", "stacked", "--max-new-tokens", "400", "--stop", out[1])[2]


def test_a_second_run_compiles_nothing(cli):
    ask = ("--prompt", "A prompt of a length of its own ", "--top-p", "0.9", "--max-new-tokens", "70")
    first, second = cli(*ask), cli(*ask)
    assert "s of compilation" in first[2] and "tokens/s without it" in first[2]
    assert "nothing compiled" in second[2] and first[1] == second[1]


def test_the_meter_counts_what_is_compiled_within_something_once():
    with Meter() as meter:
        time.sleep(0.2)
        # Two programs are traced within a third one; then something else happens; then it is compiled.
        for stage, seconds in ((0, 0.05), (0, 0.02), (0, 0.15)):
            jax.monitoring.record_event_duration_secs(STAGES[stage], seconds)
        jax.monitoring.record_event_duration_secs("/something/else", 0.2)
        time.sleep(0.1)
        jax.monitoring.record_event_duration_secs(STAGES[-1], 0.05)
        meter.mark()
        time.sleep(0.1)
        meter.mark()
    jax.monitoring.record_event_duration_secs(STAGES[-1], 1.0)
    assert meter.programs == 1 and meter.compiling == pytest.approx(0.2, abs=0.01)
    assert 0.3 <= meter.first <= meter.seconds - 0.1
    assert meter.speed(1) == pytest.approx(1 / (meter.seconds - meter.compiling))
    assert " s of compilation, " in meter.report(3, 2) and meter.report(3, 2).startswith("2 prompts, 3 tokens in ")


def test_help_does_not_wait_for_jax():
    code = "import sys; sys.argv = ['x', '--help']\ntry: from transformer import generate; generate.main()\n"
    code += "except SystemExit as stop: assert stop.code == 0\nassert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_draft_changes_no_greedy_text_and_tells_how_it_did(cli, monkeypatch):
    want = cli("--prompt", "The ", "--greedy")[1]
    monkeypatch.setattr(source, "open_source", lambda name: name)
    monkeypatch.setattr(api, "read", lambda name, **_: (common.model(FAMILY), common.params(FAMILY)))
    status, out, err = cli("--prompt", "The ", "--greedy", "--draft", "small", "--draft-tokens", "3")
    assert (status, out) == (0, want)
    assert re.search(r"draft: kept 1\d of 1\d guesses \(\d+%\), [\d.]+ tokens a pass, \d+ passes of the model", err)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--draft-tokens", "3"], "needs --draft"),
        (["--draft", "x", "--repetition-penalty", "1.1"], "can't know"),
        (["--draft", "x", "--prefill-chunk", "8"], "read whole"),
        (["--draft", "own"], "no module of multi-token prediction"),
    ],
)
def test_a_draft_that_cannot_be_is_refused(cli, flags, said, capsys):
    try:
        status, _, err = cli("--prompt", "The ", *flags)
    except SystemExit as end:
        status, err = end.code, capsys.readouterr().err
    assert status == 2 and said in err
