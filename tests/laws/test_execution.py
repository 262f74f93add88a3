"""Laws of execution: how a model runs changes neither a loss nor a gradient."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import common
from transformer.nn import initial
from transformer.ops import attention

OTHER_BODIES = [body for body in attention.BODIES if body != "reference"]
# Kernels for other machines are interpreted, which is slow, and points are what most families have: by default of one
# with windows and sinks, and of one with two stacks and relative biases. What else there is, the kernels' tests show.
SELDOM, QUICK = {"splash", "remat names"}, {"gpt_oss", "t5"}
# Several settings at a time, which compile once: what one of them changed, the rest would not undo.
WAYS = {
    "unrolled, remat full": dict(unroll=8, remat="full"),
    "remat names": dict(
        remat="names", remat_names=("q", "attended", "ffn_up", "residual"), attention="blockwise", attention_block=16
    ),
    **{body: dict(attention=body, attention_block=16, remat="dots", loss_chunk=128) for body in OTHER_BODIES},
}
# Of mixtures of experts: bodies that drop nothing, in the scan, unrolled and under remat.
EXPERTS = {
    "grouped, remat dots": dict(experts="grouped", remat="dots"),
    "slots for all, unrolled, remat full": dict(experts="capacity", expert_capacity=64.0, remat="full", unroll=8),
}
# Of each kind of mixer and of feed-forward layer one, with either norm, and with two stacks.
ROUNDED = {"deepseek_v3", "gemma2", "gpt2", "gpt_oss", "t5"}


@pytest.mark.parametrize("way", EXPERTS)
@pytest.mark.parametrize("family", [family for family in common.FAMILIES if common.routes(family)])
def test_bodies_of_experts_change_no_loss_and_no_gradient(family, way):
    common.assert_same(common.packed_result(family, **EXPERTS[way]), common.packed_result(family))


def ways_of_families():
    for family, way in itertools.product(common.FAMILIES, WAYS):
        slow = way in SELDOM and family not in QUICK
        yield pytest.param(family, way, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("family", "way"), [*ways_of_families()])
def test_execution_changes_no_loss_and_no_gradient(family, way):
    common.assert_same(common.packed_result(family, **WAYS[way]), common.packed_result(family))


def test_remat_takes_effect():
    """Temporary memory falls from none to dots to full, and named points lie between."""
    family = min(common.FAMILIES, key=lambda f: len(common.tiny_spec(f).layers))
    memory = {}
    for remat in ("none", "dots", "names", "full"):
        net = common.model(family, remat=remat, remat_names=("q", "ffn_up") if remat == "names" else ())
        lowered = common.objective(net).lower(common.params(family), common.packed_batch(family))
        memory[remat] = lowered.compile().memory_analysis().temp_size_in_bytes
    assert memory["full"] < memory["dots"] < memory["none"], memory
    assert memory["full"] < memory["names"] < memory["none"], memory


def test_unroll_takes_effect():
    """Unrolled repeats leave no loop over layers."""
    deep = max(common.DECODERS, key=lambda f: common.tiny_spec(f).decoder.repeats)
    loops = {}
    for unroll in (1, 8):
        net = common.model(deep, unroll=unroll)
        text = common.objective(net).lower(common.params(deep), common.packed_batch(deep)).as_text()
        loops[unroll] = text.count("stablehlo.while")
    assert loops[8] < loops[1], loops


@pytest.mark.parametrize("family", common.FAMILIES)
def test_bfloat16_is_of_activations_alone(family):
    net = common.model(family, dtype="bfloat16")
    batch = common.packed_batch(family)
    features = partial(net.apply, method="features", **batch.options)
    x, _ = jax.eval_shape(lambda p: features({"params": p}, batch.tokens), common.params(family))
    assert x.dtype == jnp.bfloat16
    boxes = jax.tree.leaves(initial.abstract_params(net))
    assert {leaf.dtype for leaf in boxes} == {jnp.dtype("float32")}
    got = jax.eval_shape(common.objective(net), common.params(family), batch)
    assert {x.dtype for x in jax.tree.leaves(got)} == {np.dtype("float32")}


@pytest.mark.parametrize("family", common.often(ROUNDED))
def test_bfloat16_is_close(family):
    got, want = common.packed_result(family, dtype="bfloat16"), common.packed_result(family)
    away = np.abs(got.losses - want.losses)
    assert away.max() > 0, "float32 ran instead"
    if common.routes(family):
        # Rounding sends a few tokens to other experts, and those in their wake; most stay.
        assert np.mean(away < 0.25) > 0.9
        return
    assert away.max() < 0.25
    common.assert_same_gradients(got.gradients, want.gradients, rtol=0.15, atol=0.03)
