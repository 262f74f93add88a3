"""The counter of matrix products on functions whose products are known."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from tests.common import model
from transformer.nn.initial import abstract_params
from transformer.planning.matmuls import matmul_flops

A = jax.ShapeDtypeStruct((3, 5), jnp.float32)
B = jax.ShapeDtypeStruct((5, 7), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((4, 4), jnp.float32)
ONCE = 2 * 4 * 4 * 4
TOKENS = jax.ShapeDtypeStruct((2, 16), jnp.int32)


def shapes(net):
    return nn.meta.unbox(abstract_params(net))


def test_a_product_is_two_flops_a_multiply_add():
    assert matmul_flops(jnp.matmul, A, B) == 2 * 3 * 5 * 7


def test_batch_axes_multiply():
    def many(a, b):
        return jnp.einsum("xij,xjk->xik", jnp.stack([a] * 6), jnp.stack([b] * 6))

    assert matmul_flops(many, A, B) == 6 * 2 * 3 * 5 * 7


def test_work_on_elements_is_not_counted():
    assert matmul_flops(lambda x: jnp.tanh(x) + jnp.sum(x * x), SQUARE) == 0


def test_a_scan_counts_every_trip_and_nests():
    def inner(x):
        return jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=5)[0]

    outer = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, c: inner(c), x))
    assert matmul_flops(outer, SQUARE) == 15 * ONCE


def test_what_remat_computes_again_counts_again():
    def loss(x, remat):
        def layer(y):
            return jnp.tanh(jnp.tanh(y @ x) @ x)

        return jnp.sum(jax.checkpoint(layer)(x) if remat else layer(x))

    plain, again = (matmul_flops(jax.grad(lambda x, r=r: loss(x, r)), SQUARE) for r in (False, True))
    assert (plain, again) == (6 * ONCE, 8 * ONCE)


def test_remat_of_a_model_adds_one_forward_of_its_layers():
    flops = {}
    for remat in ("none", "full"):
        net = model("llama3", remat=remat)

        def loss(params, tokens, net=net):
            return net.apply({"params": params}, tokens, tokens, method="token_losses").mean()

        flops[remat] = matmul_flops(jax.grad(loss), shapes(net), TOKENS)
    forward = matmul_flops(lambda p, t: net.apply({"params": p}, t, method="features")[0], shapes(net), TOKENS)
    assert flops["none"] < flops["full"] <= flops["none"] + forward


def test_a_loop_of_unknown_length_is_refused():
    def endless(x):
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 1, lambda c: c @ c, x)

    with pytest.raises(ValueError, match="while loop"):
        matmul_flops(endless, SQUARE)


def test_branches_that_differ_are_refused():
    with pytest.raises(ValueError, match="branches"):
        matmul_flops(lambda x: jax.lax.cond(x[0, 0] > 0, lambda c: c @ c, lambda c: c, x), SQUARE)
    assert matmul_flops(lambda x: jax.lax.cond(x[0, 0] > 0, lambda c: c @ c, lambda c: c @ c.T, x), SQUARE) == ONCE


def test_remat_computes_no_named_point_again():
    """What is kept by name costs no second forward: the attention body, a projection, a feed-forward's two."""
    rows, length, block = 2, 64, 16
    flops, kept = {}, {"nothing": (), "body": ("attended",), "query": ("q",), "hidden": ("ffn_up", "ffn_gate")}
    for case, names in kept.items():
        how = dict(remat="names", remat_names=names) if names else dict(remat="full")
        net = model("llama3", attention="blockwise", attention_block=block, **how)

        def loss(params, tokens, net=net):
            return net.apply({"params": params}, tokens, tokens, method="token_losses").mean()

        tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
        flops[case] = matmul_flops(jax.grad(loss), shapes(net), tokens)
    layers, mixer, ffn = len(net.spec.layers), net.spec.layers[0].mixer, net.spec.layers[0].ffn
    heads, products = mixer.num_heads * mixer.head_dim, 2 * rows * length * net.spec.d_model
    pairs = (length // block) * (length // block + 1) // 2
    assert flops["nothing"] - flops["body"] == layers * pairs * 2 * (2 * rows * heads * block * block)
    assert flops["nothing"] - flops["query"] == layers * products * heads
    assert flops["nothing"] - flops["hidden"] == layers * products * 2 * ffn.d_ff
