"""What doesn't fit is told with ways that do: each of them, asked for, fits."""

import shlex

import pytest

from transformer import plan
from transformer.planning import analysis, fit, topology
from transformer.planning.chips import CHIPS
from transformer.planning.request import ask

RUNS = [
    "--config llama3:8b --topology v5e:2x4",
    "--config qwen3_moe:30b-a3b --topology v6e:4x4 --mesh fsdp=4,expert=4",
    "--config llama3:8b --topology v6e:2x4 --batch 256 --set compute.remat=none",
    "--config llama3:70b --topology v6e:16x16 --mesh data=16,fsdp=16",
    "--config llama3:70b --topology v5e:2x2 --decode --batch 64",
    "--config gpt2:small --topology v5e:2x2 --batch 8",
]


def asked_for(*options: str):
    return plan.asked_for(plan._arguments([word for text in options for word in shlex.split(text)]))


def needed(asked) -> float:
    """Of what is offered."""
    r = asked.request
    found = analysis.Plan(asked.run, asked.topology, asked.mesh, r.kind, r.rows, r.length)
    return analysis.parts_of(found).total / asked.topology.chip.offered


@pytest.mark.parametrize("run", RUNS)
def test_every_way_that_is_told_fits_as_it_is_told(run):
    asked = asked_for(run)
    ways = fit.instead(asked)
    assert ways
    for way in ways:
        options, lossy = way.name.removesuffix(" (changes numerics)"), way.name.endswith(")")
        other = asked_for(run, options)
        assert needed(other) <= fit.ROOM and other.request != asked.request, way.name
        assert needed(other) * other.topology.chip.offered == way.bytes
        moments = (asked.run.settings.optimizer.moments_dtype, other.run.settings.optimizer.moments_dtype)
        assert lossy == (moments[0] != moments[1]), "what changes numerics says so"


def test_a_refusal_is_one_sentence_with_figures_and_the_nearest():
    asked = asked_for(RUNS[0])
    error = fit.refusal(asked)
    assert "\n" not in str(error) and "(by analysis), which offers 15.75; the nearest that fits is --" in str(error)
    assert f"{needed(asked) * 15.75:.2f} GiB" in str(error) and error.instead[0].name in str(error)
    assert sum(part.bytes for part in error.parts) == round(needed(asked) * asked.topology.chip.offered)
    sizes = [part.bytes for part in error.parts]
    assert sizes == sorted(sizes, reverse=True) and not error.largest


def test_what_a_compiler_refused_is_scaled_by_what_it_said():
    """Analysis was wrong about the run, so that it is taken to be as wrong about its neighbours."""
    asked = asked_for(RUNS[-1])
    told = {way.name: way.bytes for way in fit.instead(asked)}
    once = asked.topology.chip.offered * needed(asked)
    much = round(1.5 * asked.topology.chip.offered)
    error = fit.refusal(asked, compiled=much)
    assert "needs 23.62 GiB of a device (as compiled)" in str(error)
    assert error.instead and all(w.bytes * much / once <= fit.ROOM * asked.topology.chip.offered for w in error.instead)
    assert not any("remat=none" in way.name for way in error.instead) and any("remat=none" in name for name in told)


def test_a_state_that_fits_nowhere_is_refused_before_compiling():
    with pytest.raises(
        fit.DoesNotFit, match=r"llama3:70b on v5e:2x4, .* GiB of a device \(by analysis\), .* --topology"
    ):
        fit.check_state(ask("llama3:70b", "v5e:2x4"))
    fit.check_state(ask("llama3:8b", "v5p:4x4x4"))


def test_the_smallest_slice_is_the_first_that_holds_it():
    asked = ask("llama3:8b", "v6e:2x2")
    slices = topology.offered(CHIPS["v6e"])
    held = fit.smallest(asked.run, slices, 4096, 1, "train")
    assert topology.lies(held.topology, held.mesh) and held.needed <= fit.ROOM * held.topology.chip.offered
    smaller = [t for t in slices if t.chips < held.topology.chips]
    assert smaller and fit.smallest(asked.run, smaller, 4096, 1, "train") is None
