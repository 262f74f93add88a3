"""The command that plans: what it prints, writes and refuses. The compiler itself among the slow proofs."""

import dataclasses
import json
import time
from pathlib import Path

import pytest

from benchmarks import plans
from transformer import plan
from transformer.planning import assemble, report
from transformer.planning.compile import OutOfMemory
from transformer.planning.report import Buffer
from transformer.planning.waiting import working

SMALL = ["--config", "gpt2:small", "--topology", "v5e:2x2", "--no-compile"]


def told(capsys, *argv: str) -> tuple[int, str, str]:
    status = plan.main(list(argv))
    out, err = capsys.readouterr()
    return status, out, err


def test_a_plan_is_printed_and_written(capsys, tmp_path):
    data, page = tmp_path / "plan.json", tmp_path / "plan.html"
    status, out, _ = told(capsys, *SMALL, "--tokens", "1e10", "--json", str(data), "--html", str(page))
    assert status == 0
    for words in (
        "gpt2:small on v5e:2x2",
        "nothing was compiled",
        "HBM of a device",
        "nothing was measured",
        "chip-hours",
        "accelerator type v5litepod-4",
        "python train.py --config gpt2:small",
    ):
        assert words in out
    found = report.from_json(data.read_text())
    assert found.request.tokens == 1e10 and found.memory.fits and found.compile is None
    assert "<html" in page.read_text().lower()


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_generation_is_planned(capsys, tmp_path, kind):
    data = tmp_path / "plan.json"
    status, out, _ = told(capsys, *SMALL, f"--{kind}", "--batch", "8", "--json", str(data))
    assert status == 0 and "cache" in out
    assert json.loads(data.read_text())["request"]["kind"] == kind


def test_settings_and_meshes_are_taken(capsys):
    status, out, _ = told(capsys, *SMALL, "--mesh", "data=2,fsdp=2", "--set", "compute.remat='none'", "--seq", "512")
    assert status == 0 and "mesh data=2,fsdp=2" in out and "512 tokens" in out and "compute.remat='none'" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config", "gpt2:small"], "--topology=None: required"),
        (["--topology", "v5e:2x2"], "--config=None: required"),
        ([*SMALL, "--mesh", "fsdp:4"], "--mesh='fsdp:4': write axes and sizes"),
        ([*SMALL, "--set", "compute.remat"], "write NAME=VALUE"),
        (
            [*SMALL, "--batch", "6"],
            "must be a multiple of 4, into which mesh fsdp=4 cuts it; the nearest batch is 4 or 8",
        ),
        (["--diff", "no-such.json", "gpt2:small"], "--diff='no-such.json': no such file"),
        ([*SMALL, "--json", "no/such/plan.json"], "--json='no/such/plan.json': no such directory"),
        ([*SMALL, "--search", "--mesh", "fsdp=4"], "--search finds it"),
        (["--config", "gpt2:small", "--topology", "v5e", "--no-compile"], "v5e has 2 dimensions"),
        (["--config", "gpt2:small", "--topology", "v9", "--no-compile", "--search"], "use a slice, or one of v4"),
        ([*SMALL, "--diff", "no-such-revision", "HEAD"], "no-such-revision"),
    ],
)
def test_mistakes_end_in_one_line(capsys, argv, message):
    status, out, err = told(capsys, *argv)
    assert status == 2 and not out
    assert message in err and len(err.strip().splitlines()) == 1


def test_what_does_not_fit_is_the_same_refusal_compiled_or_not(capsys, monkeypatch, tmp_path):
    def too_much(asked, apart):
        raise OutOfMemory("too much", 18 * 2**30, 2**34, (Buffer(name="bf16[8]", bytes=2**30),))

    monkeypatch.setattr(plan, "plan", too_much)
    status, out, err = told(capsys, *SMALL[:-1])
    assert status == 1 and "1.00 GiB  bf16[8]" in out.replace("bf16[8]  1.00 GiB", "1.00 GiB  bf16[8]")
    assert "needs 18.00 GiB of a device (as compiled), which offers 15.75; the nearest that fits is --" in err
    large, data = ["--config", "llama3:8b", "--topology", "v5e:2x2"], tmp_path / "plan.json"
    compiled = told(capsys, *large)
    assert compiled == told(capsys, *large, "--no-compile", "--json", str(data)), "what it keeps is more than there is"
    status, out, err = compiled
    assert status == 1 and err.startswith("does not fit: llama3:8b on v5e:2x2") and len(err.splitlines()) == 1
    assert "optimizer" in out and "fits, by analysis" in out and "estimate" not in out
    assert not report.from_json(data.read_text()).memory.fits


def test_the_best_way_is_searched(capsys):
    status, out, _ = told(capsys, *SMALL, "--search", "--batch", "16", "--seq", "256")
    assert status == 0 and "→" in out and "dropped:" in out
    assert (
        plan.main([*SMALL[:2], "--topology", "v5e", "--no-compile", "--search", "--batch", "16", "--seq", "256"]) == 0
    )


def test_two_plans_are_compared(capsys, tmp_path):
    data, page = tmp_path / "one.json", tmp_path / "both.html"
    told(capsys, *SMALL, "--json", str(data))
    rest = ["--topology", "v5e:2x2", "--no-compile", "--html", str(page)]
    status, out, _ = told(capsys, *rest, "--diff", str(data), "gpt2:medium")
    assert status == 0 and "memory needed" in out and "gpt2:medium" in page.read_text()


def test_two_meshes_of_one_config_are_compared(capsys):
    argv = ["--config", "gpt2:small", "--topology", "v5e:2x2", "--no-compile", "--tokens", "1e10"]
    status, out, err = told(capsys, *argv, "--diff", "--mesh fsdp=4", "gpt2:medium --mesh data=4 --batch 8")
    assert status == 0 and not err and "sent by all-reduce along data" in out
    assert "estimated days" in out and "estimated chip-hours" in out and "by analysis" not in out
    assert "a step of the first plan is 4 x 1,024 tokens, of the second 8 x 1,024 tokens" in out


def test_a_compiled_plan_beside_one_that_is_not_is_told(capsys, tmp_path):
    data, compiled = tmp_path / "one.json", tmp_path / "other.json"
    told(capsys, *SMALL, "--json", str(data))
    found = dataclasses.replace(report.from_json(data.read_text()), compile=report.Compile(seconds=1.0, max_rss=1))
    compiled.write_text(found.to_json())
    _, out, _ = told(capsys, "--diff", str(compiled), str(data))
    assert "the first plan is compiled, the second by analysis" in " ".join(out.split())
    _, out, _ = told(capsys, "--diff", str(data), str(data))
    assert "the first plan" not in out


def test_a_long_wait_shows_signs_of_life(capsys):
    with working("compiling", every=0.01):
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2 and all(line.startswith("compiling: ") and line.endswith(" s") for line in lines)
    time.sleep(0.05)
    assert not capsys.readouterr().err


def test_options_of_the_comparison_are_not_those_of_its_sides():
    argv = ["--config", "a", "--diff", "x", "y", "--html", "z", "--decode"]
    assert plan._without(argv, {"--diff": 2, "--html": 1}) == ["--config", "a", "--decode"]


def test_the_table_has_every_published_model_once():
    lines = [line.strip("|").split("|") for line in Path("docs/plans.md").read_text().splitlines()]
    rows = [line[0].strip() for line in lines if len(line) == len(plans.HEAD)][2:]
    assert rows == sorted(plans.models())


@pytest.mark.slow
@pytest.mark.parametrize("model", plans.models())
def test_two_layers_of_every_model_compile_for_its_slice(model):
    asked = plans.cut(plans.chosen(model))
    found = plan.plan(asked)
    assert found.memory.fits and found.flops.compiled > 0
    assert found.flops.compiled == pytest.approx(found.flops.program, rel=0.01)
    assert found.memory.peak > found.memory.arguments > 0
    assert assemble.largest(asked, found)
