"""The search: what it enumerates is legal, what it drops it says, and the compiler has the last word."""

import dataclasses
import math
from collections import Counter

import pytest

from transformer import config, sharding
from transformer.planning import analysis, chips, legal, search, topology
from transformer.planning.fit import ROOM, DoesNotFit
from transformer.planning.report import Request


def run_of(reference: str, length: int = 2048, **model) -> config.Run:
    values = config.load_config(reference).to_dict()
    values["model"] |= model
    values["train"]["mtp_weight"] = 0.3 if values["model"].get("mtp") else 0.0
    values["compute"] |= dict(dtype="bfloat16")
    values["data"] |= dict(seq_len=length, batch_size=1)
    return config.resolve(values)


DENSE, MIXTURE = run_of("llama3:8b"), run_of("qwen3_moe:30b-a3b", num_layers=8)


@pytest.mark.parametrize("run", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_meshes_are_those_that_hold_the_model_and_lie_on_the_torus(run):
    on, pruned = topology.parse("v5p:2x2x4"), Counter()
    found = list(legal.meshes(run, on, 2048, pruned))
    assert found and all(topology.lies(on, mesh) and legal.refused(run, mesh, 2048) is None for mesh in found)
    assert all(math.prod(mesh.values()) == 16 for mesh in found)
    # 16 = 2**4 into five axes.
    assert len(found) + sum(pruned.values()) == math.comb(4 + 4, 4)
    assert {mesh["expert"] for mesh in found} == (
        {1} if run is DENSE else {1, 2, 4, 8, 16} & {m["expert"] for m in found}
    )
    assert run is DENSE or max(mesh["expert"] for mesh in found) > 1
    assert legal.refused(run, found[0] | {"fsdp": 3 * found[0]["fsdp"]}, 2048) == "a parameter unevenly"
    assert legal.refused(run, dict.fromkeys(sharding.MESH_AXES, 1) | {"context": 16}, 2040) == "rows unevenly"


def test_the_best_comes_first_and_the_same_each_time():
    on = topology.parse("v5p:2x2x4")
    found = search.search(DENSE, on, 2048)
    assert found == search.search(DENSE, on, 2048)
    assert found.best == found.ranked[0] and found.report is None and found.check() is found
    speeds = [choice.tokens_per_second for choice in found.ranked]
    assert speeds == sorted(speeds, reverse=True)
    assert all(choice.needed <= ROOM * choice.offered for choice in found.ranked)
    assert found.pruned["choices that need more memory than there is"] > 0
    best = found.best
    again = analysis.parts_of(search.plan(DENSE, on, best, 2048)).total
    assert again == best.needed and search.chosen(DENSE, best).settings.compute.remat == best.remat


def test_rows_asked_for_are_kept():
    found = search.search(MIXTURE, topology.parse("v6e:4x4"), 2048, rows=48)
    assert found.ranked and {choice.rows for choice in found.ranked} == {48}
    assert all(48 % math.prod(c.mesh[a] for a in ("data", "fsdp", "expert")) == 0 for c in found.ranked)


def test_of_a_mesh_only_what_computes_least_again_is_timed():
    """What it leaves out is slower."""
    on, length = topology.parse("v5p:2x2x2"), 2048
    found = search.search(DENSE, on, length, rows=16)
    best = found.best
    for remat, names in search.POLICIES:
        other = dataclasses.replace(best, remat=remat, names=names)
        plan = search.plan(DENSE, on, other, length)
        if analysis.parts_of(plan).total <= ROOM * on.chip.offered:
            flops, size = analysis.flops_of(plan), analysis.bytes_of(plan)
            step = analysis.estimate_of(plan, flops, size, analysis.exchanges_of(plan)).step
            assert step >= best.seconds * (1 - 1e-9), (remat, names)


def report_of(choice: search.Choice, length: int, peak: float):
    """What a compiler would say that needs `peak` of what is offered."""
    on = topology.parse(choice.topology)
    request = Request(
        config="llama3:8b", topology=choice.topology, chip=on.chip.name, devices=on.devices, chips=on.chips, slices=1,
        mesh=choice.mesh, kind="train", rows=choice.rows, length=length,
    )  # fmt: skip
    report = analysis.report(request, search.chosen(DENSE, choice))
    return dataclasses.replace(report, memory=dataclasses.replace(report.memory, peak=int(peak * choice.offered)))


def test_the_compiler_has_the_last_word():
    on, asked = topology.parse("v5p:2x2x2"), []

    def compile(choice):
        asked.append(choice)
        if len(asked) == 1:
            raise RuntimeError("RESOURCE_EXHAUSTED: too much")
        return report_of(choice, 2048, 1.1 if len(asked) == 2 else 0.9)

    found = search.search(DENSE, on, 2048, verify=compile)
    assert asked == list(found.ranked[:3]) and found.best == found.ranked[2]
    assert found.report.memory.peak <= found.best.offered
    (one, why), (other, size) = found.refused
    assert (one, other) == found.ranked[:2] and "RESOURCE_EXHAUSTED" in why and "needs 105.3 of 95.7 GiB" in size
    nothing = search.search(DENSE, on, 2048, verify=lambda choice: report_of(choice, 2048, 2.0), verified=2)
    assert nothing.best is None and len(nothing.refused) == 2
    with pytest.raises(
        DoesNotFit, match=r"search: nothing fits; the nearest is v5p:2x2x2.* the compiler refuses v5p:2x2x2"
    ):
        nothing.check()


def test_nothing_fits_and_the_nearest_is_told():
    found = search.search(run_of("llama3:70b"), topology.parse("v5e:2x2"), 2048)
    assert found.best is None and not found.ranked
    with pytest.raises(
        DoesNotFit, match=r"nothing fits; the nearest is v5e:2x2, .* of 15.\d GiB; the smallest slice that"
    ):
        found.check()
    largest = search.search(run_of("gpt3:175b"), topology.parse("v5e:16x16"), 2048, rows=1024)
    with pytest.raises(DoesNotFit, match="no larger slice of this chip holds it, either"):
        largest.check()


def test_moments_in_bfloat16_are_proposed_where_float32_ones_do_not_fit():
    """Llama 3 8B keeps 96 GB in float32, 64 GB with moments in bfloat16; four chips of v6e have 134 GB."""
    on = topology.parse("v6e:2x2")
    found = search.search(DENSE, on, 2048, rows=4)
    assert {choice.moments for choice in found.ranked} == {"bfloat16"} and "changes numerics" in found.lossy
    assert "holds it is v6e:2x4, mesh" in found.lossy and "moments in bfloat16" in found.best.words
    assert search.chosen(DENSE, found.best).settings.optimizer.moments_dtype == "bfloat16"
    held = search.smallest(DENSE, chips.CHIPS["v6e"], 2048, rows=8)
    assert held.best.topology == "v6e:2x4" and held.best.moments == "float32"
    assert "v6e:2x2" in held.lossy and "change numerics" in held.lossy
    assert search.search(DENSE, topology.parse("v6e:2x4"), 2048, rows=8).lossy is None


def test_rows_are_those_between_the_powers_of_two_as_well():
    found = search.search(DENSE, topology.parse("v5p:2x2x1"), 2048)
    counts = {c.rows // math.prod(c.mesh[a] for a in ("data", "fsdp", "expert")) for c in found.ranked}
    assert counts <= {*search.ROWS} and counts & {3, 6, 12}


def test_the_smallest_slice_that_fits():
    found = search.smallest(DENSE, chips.CHIPS["v5e"], 2048)
    on = topology.parse(found.best.topology)
    assert found.best.needed <= ROOM * on.chip.offered
    smaller = [t for t in topology.offered(on.chip) if t.chips < on.chips]
    below = search.search(DENSE, smaller[-1], 2048)
    assert {choice.moments for choice in below.ranked} <= {"bfloat16"}
    assert on.name in below.lossy and smaller[-1].name in found.lossy
    # Weights and moments alone take 96 GB.
    assert on.chips >= 8


def test_decoding_is_searched_without_remat():
    found = search.search(DENSE, topology.parse("v5e:2x4"), 2048, rows=32, kind="decode")
    assert found.best.remat == "none" and found.best.mesh["tensor"] > 1
    # One head of latents serves all.
    latent = search.search(run_of("deepseek_v2:lite"), topology.parse("v5p:2x2x1"), 2048, rows=32, kind="decode")
    assert latent.best.mesh["tensor"] == 1 and latent.pruned["meshes that split heads of a cache unevenly"]
