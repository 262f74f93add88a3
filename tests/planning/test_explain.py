"""The explain command: what it prints is what the accounting counts, at once and without jax."""

import dataclasses
import json
import subprocess
import sys

import pytest

from tests.common import FAMILIES, build_spec, page, tiny_spec
from transformer import explain
from transformer.planning import accounting, words

SIZES = [(family, size) for family in FAMILIES for size in page(family).SIZES]


def run(capsys, *argv) -> tuple[int, str, str]:
    status = explain.main(argv)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize(("family", "size"), SIZES)
def test_spans_cover_every_layer_in_order(family, size):
    for name, stack in build_spec(family, size).stacks.items():
        layers = []
        for part in ("head", "body", "tail"):
            of_part = [s for s in explain.spans(stack, name) if s.part == part]
            blocks = [s.block for s in of_part for _ in range(s.first, s.last + 1)]
            layers += blocks * (of_part[0].repeats if of_part else 0)
        assert tuple(layers) == stack.layers
        assert sum(s.layers for s in explain.spans(stack, name)) == stack.num_layers


@pytest.mark.parametrize("family", FAMILIES)
def test_table_and_json_say_the_same_numbers(family, capsys):
    _, text, _ = run(capsys, "--config", f"{family}:tiny")
    status, out, err = run(capsys, "--config", f"{family}:tiny", "--json")
    data, model = json.loads(out), tiny_spec(family)
    assert (status, err) == (0, "")
    count = accounting.parameters(model)
    assert data["totals"]["parameters"] == count.total
    in_stack = sum(span["parameters_of_all_layers"] for span in data["stack"])
    parts = [data[name]["parameters"] for name in ("embedding", "relative_biases", "head", "pooler") if data[name]]
    around = sum(parts) + count.final_norm
    assert in_stack + around == count.total
    flops = accounting.flops_per_token(model, model.max_length, training=False)
    in_stack = sum(span["layers"] * span["forward_flops_per_token"]["total"] for span in data["stack"])
    assert in_stack + flops.head == pytest.approx(flops.total)
    training = data["totals"]["training_flops_per_token"]
    assert training["total"] - training["mtp"] == pytest.approx(3 * flops.total)
    in_modules = sum(span["parameters_of_all_layers"] for span in data["mtp"])
    assert bool(count.mtp) == bool(training["mtp"]) == bool(model.mtp) and in_modules <= count.mtp
    assert data["totals"]["mtp_parameters"] == count.mtp and (f"{count.mtp:,}" in text or not count.mtp)
    held = sum(span["layers"] * span["kv_numbers_per_token"] for span in data["stack"])
    assert data["totals"]["kv_bytes_per_token_bfloat16"] == 2 * held
    crossed = [span for span in data["stack"] if span["cross"]]
    from_source = sum(
        span["layers"] * 2 * span["cross"]["num_kv_heads"] * span["cross"]["head_dim"] for span in crossed
    )
    assert data["totals"]["source_kv_bytes_per_token_bfloat16"] == 2 * from_source
    assert bool(from_source) == (len(model.stacks) > 1) == ("cross: " in text)
    for number in (count.total, count.embedding, *(span["parameters_of_all_layers"] for span in data["stack"])):
        assert f"{number:,}" in text


def test_gemma_is_told_by_its_pattern(capsys):
    _, text, _ = run(capsys, "--config", "gemma3:27b")
    for part in ("body 0–4", "5 × 10 layers", "body 5", "tail 0–1", "window 1,024", "rope θ 1,000,000", "linear × 8"):
        assert part in text
    assert "20,644,928,000" in text and "27,009,346,304" in text
    assert "q, k: RMS 1+scale" in text and "sandwich" in text and "tied" in text


def test_the_norm_of_q_and_k_says_what_it_spans():
    mixer = tiny_spec("qwen3").decoder.body[0].mixer
    for joint, line in ((False, "q, k: RMS"), (True, "q, k: RMS over all heads")):
        text = words.attention(dataclasses.replace(mixer, qk_norm_joint=joint))
        assert line in text.splitlines()


def test_seq_len_moves_the_scores_alone(capsys):
    short, long = (
        json.loads(run(capsys, "--config", "llama3:8b", "--seq-len", n, "--json")[1])["totals"] for n in ("128", "256")
    )
    a, b = (t["forward_flops_per_token"] for t in (short, long))
    assert b["scores"] / a["scores"] == pytest.approx(257 / 129)
    assert {k: v for k, v in a.items() if k not in ("scores", "total")} == {
        k: v for k, v in b.items() if k not in ("scores", "total")
    }


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--config", "llama9"], "llama9"),
        (["--config", "llama3:9b"], "9b"),
        (["--config", "configs/none.py:9b"], "no such page"),
        (["--config", "gpt2:xl", "--seq-len", "2000"], "at most 1024"),
        (["--config", "gpt2:xl", "--seq-len", "0"], "at least 1"),
    ],
)
def test_an_error_is_one_line_and_exit_2(argv, why, capsys):
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert why in err and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 "), (999, "999 "), (1000, "1.00 k"), (999_999, "1.00 M"), (27_009_346_304, "27.0 G"), (2.5e18, "2500 P")],
)
def test_three_digits_and_a_prefix(value, text):
    assert words.si(value) == text


def test_the_command_never_loads_jax():
    code = (
        "import sys; from transformer import explain; "
        "status = explain.main(['--config', 'llama3:8b']); sys.exit(status or 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "8,030,261,248" in done.stdout
