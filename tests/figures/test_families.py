"""What diagrams and the table say, against what was published."""

import pytest

from transformer import families
from transformer.figures.data import families as data
from transformer.figures.data import published

# pre: x + F(norm x); post: norm(x + F x); after: x + norm(F x); sandwich: x + norm(F(norm x)).
PLACES = {"pre": {"in"}, "post": {"sum"}, "after": {"out"}, "sandwich": {"in", "out"}}


def test_facts_are_those_of_the_papers():
    told = {name: data.aspects(name) for name in ("llama3:8b", "deepseek_v3:671b", "gemma3:27b", "gpt_oss:120b")}
    assert told["llama3:8b"]["attention"] == (("GQA", dict(heads=32, kv=8, dim=128)),)
    assert told["llama3:8b"]["norm"] == (("placed pre", {}), ("RMSNorm", {}))
    assert told["llama3:8b"]["positions"] == (("rope", dict(theta=5e5)),)
    assert told["llama3:8b"]["ffn"] == (("dense", dict(gate="SwiGLU", width=14336)),)
    assert told["llama3:8b"]["size"] == (("parameters", dict(count="8.03B")),)
    assert told["deepseek_v3:671b"]["size"][1] == ("active", dict(count="37.6B"))
    assert told["deepseek_v3:671b"]["ffn"][0] == ("experts", dict(count=256, top=8))
    assert ("dense layers", dict(count=3)) in told["deepseek_v3:671b"]["ffn"]
    assert ("windows", dict(window=1024, local=5)) in told["gemma3:27b"]["attention"]
    assert ("windows", dict(window=128, local=1)) in told["gpt_oss:120b"]["attention"]
    assert {fact[1]["theta"] for fact in told["gemma3:27b"]["positions"] if fact[0] == "rope"} == {1e4, 1e6}


def test_differences_are_the_lesson_s():
    """GPT-3 → Llama 3: norm, positions, attention and FFN; a model does not differ from itself."""
    assert {"norm", "positions", "attention", "ffn"} <= set(data.differences("gpt3:175b", "llama3:8b"))
    assert data.differences("llama3:8b", "llama3:8b") == ()
    assert "norm" not in data.differences("mistral:7b-v0.1", "llama3:8b")


def test_changes_are_of_kind_not_of_size():
    """Vaswani → Llama 3 changes all four; → GPT-2 keeps MHA, of other heads; Mistral → Mixtral has another FFN."""
    assert data.changes("vaswani:base", "llama3:8b") == data.CHANGES
    assert data.changes("vaswani:base", "gpt2:xl") == ("norm", "positions", "ffn")
    assert "ffn" in data.changes("mistral:7b-v0.1", "mixtral:8x7b")
    assert "norm" not in data.changes("mistral:7b-v0.1", "mixtral:8x7b")
    assert data.changes("llama3:8b", "llama3:70b") == ()


@pytest.mark.parametrize("family", families.names())
def test_parts_run_in_the_order_of_the_block(family):
    model = published.model(f"{family}:tiny")
    slots = [part.slot for part in data.parts(model)]
    block, has = model.layers[-1], PLACES[model.layers[-1].placement]
    branches = ["attention", *["cross"] * (block.cross is not None), "ffn"]
    inner = [slot for slot in slots if slot.startswith(tuple(branches))]
    assert [slot for slot in inner if slot in branches] == branches
    for branch in branches:
        own = [slot.removeprefix(branch).strip() for slot in inner if slot.startswith(branch)]
        order = ["norm in", "", "norm out", "add", "norm sum"]
        assert own == [place for place in order if place in ("", "add") or place.removeprefix("norm ") in has]
    assert (slots[0], "head" in slots) == ("embedding", model.head is not None)


def test_every_window_is_told():
    """A model whose layers all have a window says so, and one without says nothing."""
    assert ("window", dict(window=4096)) in data.aspects("mistral:7b-v0.1")["attention"]
    assert not any("window" in key for key, _ in data.aspects("mistral:7b-v0.3")["attention"])
