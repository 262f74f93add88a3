"""What is read of a compiler's words, and of programs that it made; the compiler itself among the slow proofs."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import plans
from tests.common import FAMILIES
from tests.planning import cuts
from transformer import sharding
from transformer.planning import analysis, assemble, compile, topology
from transformer.planning.collectives import Collective
from transformer.planning.hlo import parse
from transformer.planning.request import ask
from transformer.planning.work import work
from transformer.settings import Mesh, SettingsError

USAGE = """Memory Space: default (color=0)
Total bytes: 25904260608 (24.12GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
    8.00GiB( 50%);    8.00GiB;   8589934592;                7; 7×bf16[524288,8192]
   16.00GiB(100%);    32.0KiB;  17179869184;                1; f32[8192]
   16.00GiB(100%);       512B;  17180065792;                1; (f32[8192], f32[8192], u32[])
Memory Space: alternate (color=1)
    8.00MiB( 50%);    8.00MiB;            0;                1; bf16[1024,4096]
"""


def test_buffers_are_read_from_the_compilers_report():
    found = [(buffer.name, buffer.bytes) for buffer in compile.read_usage(USAGE)]
    assert found == [
        ("7×bf16[524288,8192]", 8 * 2**30),
        ("f32[8192]", 32 * 2**10),
        ("(f32[8192], f32[8192], u32[])", 512),
    ]


@pytest.mark.parametrize(
    ("message", "sizes"),
    [
        ("HLO temporaries (24.5G) exceeds available HBM (15.75G). HLO", (round(24.5 * 2**30), round(15.75 * 2**30))),
        (
            "Ran out of memory in memory space hbm. Used 112.4G of 95.7G hbm.",
            (round(112.4 * 2**30), round(95.7 * 2**30)),
        ),
        ("something else", (None, None)),
    ],
)
def test_sizes_are_read_from_the_compilers_refusal(message, sizes):
    assert compile._sizes(message) == sizes


def test_without_libtpu_the_remedy_is_told(monkeypatch):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"libtpu: not installed; .*transformer\[plan\].*--no-compile"):
        compile.find_libtpu()


def test_a_program_is_described():
    mesh = sharding.make_mesh(Mesh(data=1), jax.devices()[:1])
    square = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    made = compile.compile_program(lambda: jax.jit(lambda x: jnp.tanh(x @ x) @ x), (square,), mesh)
    assert made.program == 2 * 2 * 64**3 and made.arguments == 64 * 64 * 4
    assert made.peak >= 2 * made.arguments and "ENTRY" in made.text and made.max_rss > 10**7


def test_collectives_are_gathered_by_what_they_are_for():
    one = Collective("all-gather", ("fsdp",), "bf16", 10, 30.0, 4, "", False)
    hidden = dataclasses.replace(one, overlapped=True, times=1)
    found = assemble.exchanges([one, one, hidden], "default", steps=2)
    assert [(e.overlapped, e.times, e.operand, e.sent, e.purpose) for e in found] == [
        (False, 4, 40.0, 120.0, "parameters"), (True, 1, 5.0, 15.0, "parameters"),
    ]  # fmt: skip


def test_the_biggest_arrays_come_first():
    largest = assemble.analysed(ask("gpt2:small", "v5e:2x2")).memory.largest
    assert largest[0].bytes >= largest[-1].bytes > 0


@pytest.mark.slow
def test_what_does_not_fit_names_its_biggest_buffers():
    compile.find_libtpu()
    mesh = sharding.make_mesh(Mesh(data=1, fsdp=4), topology.parse("v5e:2x2").describe())

    def squares(x, w):
        layers = [x]
        for _ in range(6):
            layers.append(jnp.tanh(layers[-1] @ w))
        return sum(jnp.sin(y[::-1]).astype(jnp.float32).sum(0) for y in reversed(layers))

    place = NamedSharding(mesh, PartitionSpec())
    args = [jax.ShapeDtypeStruct((n, 8192), jnp.bfloat16, sharding=place) for n in (2**19, 8192)]
    with pytest.raises(compile.OutOfMemory) as caught:
        compile.compile_program(lambda: jax.jit(squares), tuple(args), mesh)
    assert caught.value.needed > 16 * 2**30 > caught.value.offered > 15 * 2**30
    assert "bf16[524288,8192]" in caught.value.largest[0].name


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the libtpu of jax[tpu]")
@pytest.mark.parametrize("family", FAMILIES)
def test_two_layers_of_every_size_fit_their_slice_and_multiply_what_analysis_says(family, tmp_path):
    """At real widths, on the slice and mesh of docs/plans.md, by the TPU's compiler, up to the assignment of buffers.

    By then it has refused what it can't shard, lay out or fit, and its program is final; what it has not done is to
    make code of it, which takes ten times as long and is left to the slow proof in tests/test_plan.py.
    """
    whole = [plans.chosen(model) for model in plans.models() if model.split(":")[0] == family]
    requests = [one.request for one in whole]
    jobs = [dict(reference=r.config, slices=r.topology, mesh=r.mesh, rows=r.rows, length=r.length) for r in requests]
    for one, found in zip(map(plans.cut, whole), cuts.planned(jobs, tmp_path), strict=True):
        name, expected = one.request.config, analysis.report(one.request, one.run)
        assert found.peak <= one.topology.chip.offered, name
        assert found.arguments == expected.memory.arguments, name
        flops = work(parse(found.text), one.topology.devices).flops
        assert flops == pytest.approx(expected.flops.program, rel=0.01), name
