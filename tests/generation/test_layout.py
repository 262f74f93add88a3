"""Laws of the forms that a model takes for decoding: layers apart, and weights of eight bits."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import common
from tests.generation.common import GREEDY, NEW, assert_close, generate, greedy, prompts
from transformer.generation.layout import quantize, turn, unroll
from transformer.nn import initial
from transformer.ops import products

families = pytest.mark.parametrize("family", common.DECODERS)
# Every kind of weight of a product: grouped heads, biases, latents, experts in either layout, tied heads and not.
WEIGHTS = {"deepseek_v3", "gemma3", "gpt2", "gpt_oss", "llama3"}
kinds = pytest.mark.parametrize("family", common.often(WEIGHTS, common.DECODERS))


@families
def test_layers_apart_are_the_same_function(family):
    model, params = unroll(common.model(family), common.params(family))
    assert model.spec.decoder.repeats == 0 and model.spec.decoder.layers == common.tiny_spec(family).decoder.layers
    shapes = jax.tree.map(lambda x: x.shape, params)
    assert shapes == jax.tree.map(lambda x: x.shape, nn.unbox(common.abstract_params(model)))
    done = generate(model, params, prompts(family), max_new_tokens=NEW, sampling=GREEDY)
    assert [c.tokens for c in done] == [c.tokens for c in greedy(family)]


def is_turned(x) -> bool:
    return isinstance(x, products.Turned)


def is_narrow(x) -> bool:
    return isinstance(x, products.Quantized)


@kinds
def test_eight_bit_weights_are_the_rounded_ones(family):
    """Logits equal those of a model whose weights were rounded beforehand: scales are applied where they belong."""
    model, params = common.model(family), common.params(family)
    narrow = quantize(model, params)
    found = [x for x in jax.tree.leaves(narrow, is_leaf=is_narrow) if is_narrow(x)]
    stored = sum(x.size for x in jax.tree.leaves(params))
    assert sum(x.size for x in found) > 0.8 * stored, "most numbers of a model are weights of products"
    rounded = jax.tree.map(lambda x: x.astype(jnp.float32) if is_narrow(x) else x, narrow, is_leaf=is_narrow)
    tokens = common.random_tokens(family, 2, 24)
    forward = jax.jit(lambda params: model.apply({"params": params}, tokens))
    assert_close(np.asarray(forward(narrow)), np.asarray(forward(rounded)), "logits")


@kinds
@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "int8"])
def test_turned_weights_are_the_same_function(family, narrow):
    """Also that the laws of eight bits hold for them: to quantize and to turn go together."""
    model, params = unroll(common.model(family), common.params(family))
    params = quantize(model, params) if narrow else params
    turned = turn(model, params)
    found = [x for x in jax.tree.leaves(turned, is_leaf=is_turned) if is_turned(x)]
    boxes = jax.tree_util.tree_leaves_with_path(common.abstract_params(model), is_leaf=initial.is_named)
    maps = [box for path, box in boxes if path[-1].key == "kernel" and box.summed and path[0].key == "decoder"]
    assert len(found) >= len(maps) > 0, "every linear map of the decoder"
    tokens = common.random_tokens(family, 2, 24)
    forward = jax.jit(lambda params: model.apply({"params": params}, tokens))
    assert_close(np.asarray(forward(turned)), np.asarray(forward(params)), "logits")


@pytest.mark.parametrize("count", [1, 2])
def test_a_turned_weight_stands_where_it_would(count):
    w = jax.random.normal(jax.random.key(0), (6, 4, 10))
    for weight in (w, products.quantize(w, tuple(range(-3, count - 3)))):
        turned = products.turn(weight, count)
        assert turned.shape == w.shape and turned.size == w.size and turned.weight.shape != w.shape
        np.testing.assert_array_equal(turned.astype(jnp.float32), weight.astype(jnp.float32))


@pytest.mark.parametrize(("dtype", "bits"), [(jnp.float32, 24), (jnp.bfloat16, 16)])
@pytest.mark.parametrize("rows", [1, 5])
def test_only_weights_are_rounded_in_a_product_with_eight_bits(rows, dtype, bits):
    """It differs from the product with the rounded weights by what so many bits of x's largest number allow."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, w = (jax.random.normal(k, s) for k, s in zip(keys, [(rows, 1, 4, 8), (4, 8, 24)], strict=True))
    x = x.at[0, 0, 0, 0].mul(1e3).at[-1].mul(1e-20).astype(dtype)
    narrow = products.quantize(w, (-3, -2))
    wide, exact = np.asarray(narrow.astype(jnp.float32), np.float64), np.asarray(x, np.float64)
    got = np.asarray(products._product(x, narrow, (0, 1), jnp.float32), np.float64)
    want = np.einsum("btnh,nhd->btd", exact, wide)
    allowed = np.abs(exact).max((2, 3))[..., None] * 2.0**-bits * np.abs(wide).sum((0, 1))
    assert got.shape == want.shape
    assert (np.abs(got - want) <= allowed + 1e-6 * np.abs(want)).all()
    assert not products.product(jnp.zeros_like(x), narrow, 2).any(), "nothing but zeros has no step"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_products_of_any_number_of_rows_are_products(rows, dtype):
    """One row of bfloat16 takes another way."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, w = (jax.random.normal(k, s, dtype) for k, s in zip(keys, [(rows, 1, 4, 8), (4, 8, 24)], strict=True))
    want = np.einsum("btnh,nhd->btd", np.asarray(x, np.float64), np.asarray(w, np.float64))
    got = products.product(x, w, 2)
    assert got.dtype == dtype and got.shape == (rows, 1, 24)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=0.06 if dtype == jnp.bfloat16 else 1e-5)


def test_eight_bits_are_within_half_a_step_of_each_output_feature():
    w = jax.random.normal(jax.random.key(0), (6, 4, 10)) * jnp.arange(10)
    narrow = products.quantize(w, (-3, -2))
    assert narrow.values.dtype == jnp.int8 and narrow.scales.shape == (1, 1, 10)
    step = np.abs(w).max((0, 1)) / 127
    assert (np.abs(narrow.astype(jnp.float32) - w) <= 0.501 * step).all()


def test_rows_of_an_eight_bit_table():
    table = jax.random.normal(jax.random.key(0), (7, 5))
    narrow = products.quantize(table, (-1,))
    rows = products.rows(narrow, jnp.array([[3, 6, 7]]))
    np.testing.assert_allclose(rows[0, :2], narrow.astype(jnp.float32)[jnp.array([3, 6])])
    assert np.isnan(rows[0, 2]).all(), "an id outside the table is no other token"
