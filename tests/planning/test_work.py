"""Four counts of FLOPs agree: of the compiled program, scanned and unrolled, of the traced one, and of the spec."""

import re

import jax
import jax.numpy as jnp
import pytest

from tests.common import FAMILIES, model, often, tiny_spec
from tests.planning.test_accounting import TOKENS, flops_of_all_scores, shapes_of, source_of
from transformer import sharding
from transformer.planning.hlo import parse
from transformer.planning.matmuls import matmul_flops
from transformer.planning.work import work
from transformer.settings import Mesh


def counted(family: str, unroll: int) -> tuple[float, float]:
    """FLOPs of the training loss's gradient: as compiled, and as traced."""
    built = tiny_spec(family)
    net = model(family, unroll=unroll)

    def loss(params, tokens):
        more = source_of(built, tokens) | dict(mtp_weight=1.0 if built.mtp else 0.0)
        ones = jnp.ones(tokens.shape)
        return net.apply({"params": params}, ones, tokens, tokens, **more, method="weighed_losses").total

    function = jax.jit(jax.grad(loss))
    text = function.lower(shapes_of(net), TOKENS).compile().as_text()
    return work(parse(text), 1).flops, matmul_flops(function, shapes_of(net), TOKENS)


@pytest.mark.parametrize("family", often(["llama3"]))
def test_compiled_traced_and_analytic_flops_agree(family):
    scanned, traced = counted(family, unroll=1)
    assert scanned == pytest.approx(traced, rel=0.01)
    assert scanned == pytest.approx(flops_of_all_scores(tiny_spec(family), training=True), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_loop_is_counted_once(family):
    scanned, unrolled = (counted(family, unroll=unroll)[0] for unroll in (1, 64))
    assert unrolled == pytest.approx(scanned, rel=0.01)


def test_a_loop_that_counts_by_two_runs_half_as_often():
    """So do those that TPU compilers make of a product whose operand is gathered in parts."""

    def function(x, w):
        return jax.lax.while_loop(lambda c: c[0] < 8, lambda c: (c[0] + 2, jnp.tanh(c[1] @ w)), (0, x))[1]

    square = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    text = jax.jit(function).lower(square, square).compile().as_text()
    untold = re.sub(r'"known_trip_count":\{"n":"\d+"\},?', "", text)
    assert work(parse(untold), 1).flops == 4 * 2 * 16**3


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_a_mesh_multiplies_nothing_again_that_one_device_does_not(remat):
    """What a policy keeps is found within products whose gradients are summed by hand, too."""
    net = model("llama3", remat=remat)

    def loss(params, tokens):
        ones = jnp.ones(tokens.shape)
        return net.apply({"params": params}, ones, tokens, tokens, method="weighed_losses").total

    alone = matmul_flops(jax.grad(loss), shapes_of(net), TOKENS)
    with jax.set_mesh(sharding.make_mesh(Mesh(data=1, fsdp=2), jax.devices()[:2])):
        assert matmul_flops(jax.grad(loss), shapes_of(net), TOKENS) == alone


def test_dots_keeps_the_products_of_weights():
    """They have a gradient of their own, into which a policy must be able to look."""

    def multiplied(remat):
        net = model("llama3", remat=remat)

        def loss(params, tokens):
            ones = jnp.ones(tokens.shape)
            return net.apply({"params": params}, ones, tokens, tokens, method="weighed_losses").total

        return matmul_flops(jax.grad(loss), shapes_of(net), TOKENS)

    none, dots, full = (multiplied(remat) for remat in ("none", "dots", "full"))
    flops = flops_of_all_scores(tiny_spec("llama3"), training=False)
    assert none <= dots < none + 0.2 * (full - none) < full < none + flops
