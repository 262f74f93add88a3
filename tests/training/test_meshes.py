"""Law: a training step gives the same on any mesh. `transformer.training.meshes` states it; here are its cases."""

import copy
import math

import jax
import numpy as np
import pytest

from tests import common
from transformer.training import meshes

# Of each shape and mechanism one; `python -m transformer.check_mesh` runs all.
CASES = [
    ("deepseek_v3", dict(fsdp=2, expert=2, tensor=2)),
    ("t5", dict(data=2, fsdp=2, tensor=2)),
    ("gpt2", dict(fsdp=4, tensor=2)),
]


@pytest.mark.parametrize(("family", "sizes"), CASES, ids=lambda x: x if isinstance(x, str) else meshes.name_of(x))
def test_a_step_is_the_same_on_a_mesh(family, sizes):
    verdict = meshes.check_family(family, [sizes], jax.devices())
    assert verdict.passed and not verdict.refused, verdict
    assert all(verdict.worst[kind].name for kind in ("metrics", "gradients"))
    corrected = any(m.router.correction for m in meshes._mixtures(common.tiny_spec(family)))
    assert bool(verdict.worst["corrections"].name) == corrected


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("family", common.FAMILIES)
def test_a_step_is_the_same_on_every_mesh(family, accumulate):
    devices = jax.devices()
    verdict = meshes.check_family(family, meshes.meshes_for(family, len(devices)), devices, accumulate)
    assert verdict.passed, verdict


def test_factorisations_are_all_and_each_once():
    """Of a power of two, as many as there are ways to give its factors to the axes."""
    for axes in (("a",), ("a", "b"), ("a", "b", "c", "d")):
        found = list(meshes.factorisations(8, axes))
        assert all(math.prod(sizes.values()) == 8 and 1 not in sizes.values() for sizes in found)
        assert len({tuple(sizes.items()) for sizes in found}) == len(found) == math.comb(3 + len(axes) - 1, 3)
    assert list(meshes.factorisations(6, ("a", "b"))) == [{"a": 6}, {"a": 3, "b": 2}, {"a": 2, "b": 3}, {"b": 6}]


def test_experts_have_their_axis_and_every_other_is_for_all():
    of_mixture, of_dense = (meshes.meshes_for(family, 8) for family in ("mixtral", "gpt2"))
    assert {"expert": 8} in of_mixture and {"fsdp": 2, "expert": 2, "tensor": 2} in of_mixture
    assert of_dense == [sizes for sizes in of_mixture if "expert" not in sizes]


def an_outcome() -> meshes.Outcome:
    large, small = np.array([4.0, -8.0]), np.array([1e-4])
    return {
        "metrics": {"loss": np.array(2.0)},
        "gradients": {"large": large, "small": small},
        "corrections": {"router/correction": np.array([0.01, -0.01])},
    }


@pytest.mark.parametrize(
    ("kind", "name", "change", "size"),
    [
        ("metrics", "loss", 2e-3, 1e-3),
        ("gradients", "large", 8e-3, 8e-3 / 8.2),
        ("gradients", "small", 2e-4, 2e-4 / 0.2001),  # counts as large as a fortieth of the largest leaf
        ("corrections", "router/correction", 0.02, 2.0),
        ("gradients", "large", math.nan, math.inf),
        ("metrics", "loss", math.inf, math.inf),
    ],
)
def test_differences_are_found_where_they_are(kind, name, change, size):
    want, got = an_outcome(), copy.deepcopy(an_outcome())
    assert all(size == 0 for size, _ in meshes.differences(got, want).values())
    got[kind][name] = got[kind][name] + change
    found = meshes.differences(got, want)
    assert found.pop(kind) == (pytest.approx(size), name)
    assert all(size == 0 for size, _ in found.values())


def test_a_leaf_that_is_missing_differs():
    got = an_outcome()
    del got["gradients"]["small"]
    assert meshes.differences(got, an_outcome())["gradients"] == (math.inf, "small")


def test_a_step_that_differs_and_a_mesh_that_does_not_fit_are_told(monkeypatch):
    def one_step(run, params, batch, devices):
        outcome = an_outcome()
        if run.settings.mesh.tensor == 8:
            raise meshes.ShardingError("heads=4 can't be split 8 ways")
        if run.settings.mesh.fsdp == 8:
            outcome["gradients"]["large"][1] += 8 * 3e-4
        return outcome

    monkeypatch.setattr(meshes, "one_step", one_step)
    verdict = meshes.check_family("gpt2", [{"data": 8}, {"fsdp": 8}, {"tensor": 8}], jax.devices())
    assert (verdict.same, verdict.wrong) == (["data=8"], ["fsdp=8"]) and not verdict.passed
    assert verdict.refused == {"tensor=8": "heads=4 can't be split 8 ways"}
    worst = verdict.worst["gradients"]
    assert (worst.name, worst.mesh) == ("large", "fsdp=8") and worst.size > meshes.TOLERANCE
    assert not meshes.check_family("gpt2", [{"tensor": 8}], jax.devices()).passed
