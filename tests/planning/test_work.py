"""Four counts of FLOPs agree: of the compiled program, scanned and unrolled, of the traced one, and of the spec."""

import jax
import jax.numpy as jnp
import pytest

from tests.common import FAMILIES, model, often, tiny_spec
from tests.planning.test_accounting import TOKENS, flops_of_all_scores, shapes_of, source_of
from transformer.planning.hlo import parse
from transformer.planning.matmuls import matmul_flops
from transformer.planning.work import work


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
