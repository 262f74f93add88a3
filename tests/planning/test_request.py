"""What can't be planned ends in one sentence that says why, with the nearest that can."""

import shlex

import pytest

import train
from transformer import config, families
from transformer.planning.request import ask
from transformer.settings import SettingsError
from transformer.sharding import ShardingError
from transformer.spec import SpecError


def test_defaults_are_those_of_a_run_on_tpus():
    asked = ask("llama3:8b", "v5p:4x4x4")
    assert asked.mesh["fsdp"] == 64 and asked.request.rows == 64 and asked.request.length == 4096
    assert asked.run.settings.compute.dtype == "bfloat16" and asked.run.settings.compute.remat == "full"
    assert asked.run.settings.data.batch_size == 64 and asked.run.settings.mesh.fsdp == 64
    assert ask("gpt2:small", "v5e:2x2").request.length == 1024


def test_settings_are_the_users():
    asked = ask("llama3:8b", "v5p:4x4x4", overrides={"compute.remat": '"none"', "train.accumulate": "2"})
    assert asked.run.settings.compute.remat == "none" and asked.request.rows == 128
    assert asked.request.overrides["compute.dtype"] == "'bfloat16'"


def test_to_decode_weights_stay_where_they_are():
    asked = ask("llama3:70b", "v5p:2x2x4", kind="decode")
    assert (asked.mesh["tensor"], asked.mesh["data"], asked.mesh["fsdp"]) == (8, 2, 1)
    # A latent is one head, which no axis splits; its experts can be.
    asked = ask("deepseek_v3:671b", "v5p:2x4x4", kind="decode")
    assert (asked.mesh["tensor"], asked.mesh["expert"]) == (1, 32)
    with pytest.raises(ShardingError, match=r"the cache's 1 heads can't be split 32 ways .* nearest mesh is fsdp=32"):
        ask("deepseek_v3:671b", "v5p:2x4x4", kind="decode", mesh=dict(tensor=32))


@pytest.mark.parametrize(
    ("page", "slices", "how", "message"),
    [
        ("llama3:8b", "v5q:2x2", {}, "unknown chip; use one of v4, v5e, v5p, v6e, tpu7x"),
        ("llama3:9b", "v5p:4x4x4", {}, "size '9b' of llama3: unknown"),
        ("llama3:8b", "v5p:4x4x4", dict(rows=100), "the nearest batch is 64 or 128"),
        ("llama3:8b", "v5p:4x4x4", dict(rows=3), "the nearest batch is 64"),
        (
            "llama3:8b",
            "v5p:4x4x4",
            dict(mesh=dict(fsdp=4, tensor=16)),
            "kv_heads=8 can't be split 16 ways over mesh axes ('tensor',); the nearest mesh is fsdp=16,tensor=4",
        ),
        (
            "mixtral:8x7b",
            "v5p:4x4x8",
            dict(mesh=dict(fsdp=8, expert=16)),
            "the model's 8 experts can't be split 16 ways; on v5p:4x4x8 mesh.expert can be 1, 4 or 8, and the nearest",
        ),
        (
            "qwen3_moe:30b-a3b",
            "v6e:4x8",
            dict(mesh=dict(expert=12)),
            "the model's 128 experts can't be split 12 ways; on v6e:4x8 mesh.expert can be 1, 4, 8 or 32",
        ),
        ("qwen3_moe:30b-a3b", "v6e:4x8", dict(rows=100), "must be a multiple of 32, into which mesh fsdp=32 cuts it"),
        (
            "llama3:8b",
            "v6e:4x8",
            dict(rows=96, overrides={"train.accumulate": "2"}),
            "a multiple of 64, into which mesh fsdp=32 and 2 microbatches cut it; the nearest batch is 64 or 128",
        ),
        ("gpt2:small", "v5e:4x4", dict(mesh=dict(tensor=16)), "can't be split 16 ways"),
        ("llama3:8b", "v5p:4x4x4", dict(mesh=dict(fsdp=16, context=4), length=4100), "the nearest are 4096 or 4104"),
        ("bert:base", "v5e:2x2", dict(kind="decode"), "this model writes no text"),
        ("llama3:8b", "v5p:4x4x4", dict(overrides={"mesh.fsdp": "4"}), "give the mesh with --mesh"),
        ("llama3:8b", "v5p:4x4x4", dict(overrides={"compute.remta": "1"}), "did you mean compute.remat?"),
        ("gpt2:small", "v5e:2x2", dict(length=2048), "learned positions end at"),
    ],
)
def test_refusals(page, slices, how, message):
    with pytest.raises((SettingsError, ShardingError, SpecError)) as caught:
        ask(page, slices, **how)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("family", families.names())
def test_the_command_of_a_plan_trains_what_was_planned(family):
    """`train.py` reads the fields as words; with them the page makes the very run that was planned."""
    page = f"{family}:tiny"
    overrides = {"train.accumulate": "2", "optimizer.moments_dtype": "'bfloat16'", "optimizer.warmup_steps": "3"}
    overrides |= {"compute.remat": '"names"', "compute.remat_names": "('attended', 'q')"}
    asked = ask(page, "v5e:2x2", mesh={"data": 2, "fsdp": 2}, rows=8, length=32, overrides=overrides, tokens=1e5)
    words = shlex.split(asked.request.command)
    assert words[:2] == ["python", "train.py"]
    flags, fields = train.parse(words[2:])
    values = config.load_config(flags.config).to_dict()
    for name, text in fields:
        config.override(values, name, text)
    run = config.resolve(values)
    assert run == asked.run and run.settings.mesh.data == 2 and run.settings.compute.remat_names == ("attended", "q")
    per_step = 8 * (run.settings.data.target_len or 32 if run.spec.trunk.crosses else 32)
    assert run.settings.train.steps == -(-100_000 // per_step)


def test_generation_has_no_command_that_trains():
    assert ask("gpt2:small", "v5e:2x2", kind="decode").request.command is None
