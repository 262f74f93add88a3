"""The chunked cross-entropy against the plain log-softmax: values, gradients and memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from transformer import sharding
from transformer.ops.losses import cross_entropy, smoothed_cross_entropy
from transformer.settings import Mesh

B, T, D = 2, 5, 8
# (vocabulary, chunk, shards): one chunk, an exact multiple, a remainder, shards with and without a remainder.
CASES = [(40, 128, 1), (40, 20, 1), (41, 16, 1), (40, 12, 2), (40, 16, 4), (264, 100, 8)]


@functools.cache
def inputs(vocab: int, scale: float = 1.0):
    rng = np.random.default_rng(vocab)
    x = rng.standard_normal((B, T, D)).astype(np.float32) * scale
    table, bias = rng.standard_normal((vocab, D)).astype(np.float32), rng.standard_normal(vocab).astype(np.float32)
    targets = rng.integers(0, vocab, (B, T))
    # Both ends of the vocabulary, where a padded or shifted chunk would show.
    targets[0, 0], targets[0, 1] = 0, vocab - 1
    return x, table, bias, targets


def plain(x, table, bias, targets, softcap):
    """The formula in numpy float64."""
    logits = np.einsum("btd,vd->btv", x.astype(np.float64), table.astype(np.float64))
    logits = logits + (0 if bias is None else bias)
    logits = softcap * np.tanh(logits / softcap) if softcap else logits
    top = logits.max(-1)
    norm = top + np.log(np.exp(logits - top[..., None]).sum(-1))
    return norm - np.take_along_axis(logits, targets[..., None], -1)[..., 0]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("vocab", "chunk", "shards"), CASES)
def test_loss_is_that_of_the_full_softmax(vocab, chunk, shards, biased, softcap):
    x, table, bias, targets = inputs(vocab)
    bias = bias if biased else None
    got = cross_entropy(x, table, targets, bias=bias, softcap=softcap, chunk=chunk, shards=shards)
    assert got.dtype == jnp.float32 and got.shape == (B, T)
    np.testing.assert_allclose(got, plain(x, table, bias, targets, softcap), atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("vocab", "chunk", "shards"), CASES)
def test_gradients_are_those_of_the_plain_formula(vocab, chunk, shards, softcap):
    x, table, bias, targets = inputs(vocab)
    weights = np.random.default_rng(0).random((B, T)).astype(np.float32)

    def chunked(x, table, bias):
        return jnp.sum(
            weights * cross_entropy(x, table, targets, bias=bias, softcap=softcap, chunk=chunk, shards=shards)
        )

    def formula(x, table, bias):
        logits = jnp.einsum("btd,vd->btv", x, table) + bias
        logits = softcap * jnp.tanh(logits / softcap) if softcap else logits
        return -jnp.sum(weights * jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0])

    got, want = (jax.jit(jax.grad(f, argnums=(0, 1, 2)))(x, table, bias) for f in (chunked, formula))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("vocab", "chunk", "shards"), [CASES[0], CASES[2], CASES[4]])
def test_smoothed_loss_is_that_of_smoothed_labels(vocab, chunk, shards, softcap):
    x, table, bias, targets = inputs(vocab)
    weights = np.random.default_rng(0).random((B, T)).astype(np.float32)
    how = dict(softcap=softcap, chunk=chunk, shards=shards)

    def chunked(x, table, bias):
        nats, smoothed = smoothed_cross_entropy(x, table, targets, 0.1, bias=bias, **how)
        return jnp.sum(weights * smoothed), (nats, smoothed)

    def formula(x, table, bias):
        logits = jnp.einsum("btd,vd->btv", x, table) + bias
        logits = softcap * jnp.tanh(logits / softcap) if softcap else logits
        smoothed = optax.softmax_cross_entropy(logits, optax.smooth_labels(jax.nn.one_hot(targets, vocab), 0.1))
        return jnp.sum(weights * smoothed), smoothed

    got, (nats, smoothed) = jax.jit(jax.grad(chunked, argnums=(0, 1, 2), has_aux=True))(x, table, bias)
    want, expected = jax.jit(jax.grad(formula, argnums=(0, 1, 2), has_aux=True))(x, table, bias)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)
    np.testing.assert_allclose(smoothed, expected, atol=1e-5)
    np.testing.assert_allclose(nats, cross_entropy(x, table, targets, bias=bias, **how), rtol=2e-7)


def test_large_logits_neither_overflow_nor_lose_the_target():
    x, table, _, targets = inputs(41, scale=300.0)
    loss = functools.partial(cross_entropy, table=table, targets=targets, chunk=16)
    want = plain(x, table, None, targets, None)
    assert want.max() > 1000
    np.testing.assert_allclose(loss(x), want, rtol=1e-5, atol=1e-3)
    assert np.isfinite(jax.grad(lambda x: jnp.sum(loss(x)))(x)).all()


def test_bfloat16_features_give_a_float32_loss():
    """Products of bfloat16 inputs are summed in float32, in every chunk."""
    x, table, bias, targets = inputs(41)
    x = jnp.asarray(x, jnp.bfloat16)
    got = cross_entropy(x, table, targets, bias=bias, chunk=16)
    assert got.dtype == jnp.float32
    rounded = np.asarray(jnp.asarray(table, jnp.bfloat16), np.float32)
    np.testing.assert_allclose(got, plain(np.asarray(x, np.float32), rounded, bias, targets, None), atol=1e-5)


def test_shards_that_do_not_divide_are_refused():
    x, table, _, targets = inputs(41)
    with pytest.raises(ValueError, match="vocab_size=41: the mesh splits it 2 ways"):
        cross_entropy(x, table, targets, chunk=16, shards=2)


def test_sharded_table_is_never_gathered():
    """`shards` cuts each chunk along the mesh; without it every device would fetch the others' rows."""
    mesh = sharding.make_mesh(Mesh(data=1, fsdp=1, tensor=-1))
    table = jax.ShapeDtypeStruct((512, D), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("tensor", None)))
    x, _, _, targets = inputs(41)

    def gathers(shards: int) -> bool:
        def total(x, table):
            return jnp.sum(cross_entropy(x, table, targets, chunk=128, shards=shards))

        program = jax.jit(jax.grad(total, argnums=1), out_shardings=table.sharding).lower(x, table).compile()
        return "all-gather" in program.as_text()

    assert not gathers(8)
    assert gathers(1), "this test sees nothing"


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_memory_does_not_hold_the_logits(smoothing):
    """No [B, T, V] array in the program, and its temporaries grow with the table alone as V grows eightfold."""
    rows, length, dim, chunk = 4, 64, 16, 1024

    def compiled(vocab: int):
        shapes = [(rows, length, dim), (vocab, dim)]
        arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
        targets = jax.ShapeDtypeStruct((rows, length), jnp.int32)

        def total(x, table, targets):
            if smoothing:
                return jnp.sum(smoothed_cross_entropy(x, table, targets, smoothing, chunk=chunk)[1])
            return jnp.sum(cross_entropy(x, table, targets, chunk=chunk))

        return jax.jit(jax.grad(total, argnums=(0, 1))).lower(*arrays, targets).compile()

    temporaries = {}
    for vocab in (8 * 1024, 64 * 1024):
        program = compiled(vocab)
        temporaries[vocab] = program.memory_analysis().temp_size_in_bytes
        sizes = [np.prod([int(n) for n in s.split(",")]) for s in re.findall(r"f32\[([\d,]+)\]", program.as_text())]
        assert max(sizes) <= max(vocab * dim, rows * length * chunk), "an array beyond the table and one chunk"
    table_growth = 4 * dim * (64 - 8) * 1024
    logits_growth = 4 * rows * length * (64 - 8) * 1024
    growth = temporaries[64 * 1024] - temporaries[8 * 1024]
    assert growth <= 2 * table_growth < logits_growth, f"{growth:,} bytes"
