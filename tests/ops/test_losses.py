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
from transformer.ops.losses import Call, cross_entropy, weighed_cross_entropy
from transformer.settings import Mesh
from transformer.sharding import ShardingError

B, T, D = 2, 5, 8
# (vocabulary, chunk): all positions at once, two columns of positions and a remainder, one column at a time.
CASES = [(40, 128), (41, 4), (264, 1)]


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
@pytest.mark.parametrize(("vocab", "chunk"), CASES)
def test_loss_is_that_of_the_full_softmax(vocab, chunk, biased, softcap):
    x, table, bias, targets = inputs(vocab)
    bias = bias if biased else None
    got = cross_entropy(Call(chunk, softcap), x, table, bias, targets).nats
    assert got.dtype == jnp.float32 and got.shape == (B, T)
    np.testing.assert_allclose(got, plain(x, table, bias, targets, softcap), atol=1e-5)


@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.3), (0.1, 0.3)])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("vocab", "chunk"), CASES)
def test_gradients_are_those_of_the_plain_formula(vocab, chunk, softcap, smoothing, z):
    """Of the sum of weighed losses by both functions, one of which makes them in its forward pass."""
    x, table, bias, targets = inputs(vocab)
    weights = np.random.default_rng(0).random((B, T)).astype(np.float32)
    call = Call(chunk, softcap, smoothing, z)

    def by_losses(x, table, bias, weights):
        losses = cross_entropy(call, x, table, bias, targets)
        return 3 * jnp.sum(weights * losses.trained), losses.nats

    def by_total(x, table, bias, weights):
        total, nats = weighed_cross_entropy(call, x, table, bias, targets, weights)
        return 3 * total, nats

    def formula(x, table, bias, weights):
        logits = jnp.einsum("btd,vd->btv", x, table) + bias
        logits = softcap * jnp.tanh(logits / softcap) if softcap else logits
        labels = optax.smooth_labels(jax.nn.one_hot(targets, vocab), smoothing)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        trained = optax.softmax_cross_entropy(logits, labels) + z * jax.nn.logsumexp(logits, axis=-1) ** 2
        return 3 * jnp.sum(weights * trained), nats

    of = [jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2, 3), has_aux=True)) for f in (formula, by_losses, by_total)]
    want, *found = (f(x, table, bias, weights) for f in of)
    for got in found:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5), got, want)


@pytest.mark.parametrize("sizes", [dict(fsdp=2), dict(data=2, tensor=4), dict(fsdp=2, context=2, tensor=2)])
def test_a_mesh_changes_nothing(sizes):
    """Each device has its rows, its part of their length and its part of the vocabulary."""
    x, table, bias, targets = inputs(40)
    x, targets = x[:, :4], targets[:, :4]
    weights = np.random.default_rng(0).random(targets.shape).astype(np.float32)

    def total(x, table, bias):
        return weighed_cross_entropy(Call(2, 3.0, 0.1, 0.2), x, table, bias, targets, weights)

    run = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)
    want = run(x, table, bias)
    count = np.prod(list(sizes.values()))
    with jax.set_mesh(sharding.make_mesh(Mesh(**{"data": 1} | sizes), jax.devices()[:count])):
        got = jax.jit(run)(x, table, bias)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def test_large_logits_neither_overflow_nor_lose_the_target():
    x, table, _, targets = inputs(41, scale=300.0)

    def loss(x):
        return cross_entropy(Call(4), x, table, None, targets).nats

    want = plain(x, table, None, targets, None)
    assert want.max() > 1000
    np.testing.assert_allclose(loss(x), want, rtol=1e-5, atol=1e-3)
    assert np.isfinite(jax.grad(lambda x: jnp.sum(loss(x)))(x)).all()


def test_bfloat16_features_give_a_float32_loss():
    """Products of bfloat16 inputs are summed in float32, in every chunk."""
    x, table, bias, targets = inputs(41)
    x = jnp.asarray(x, jnp.bfloat16)
    got = cross_entropy(Call(4), x, table, bias, targets).nats
    assert got.dtype == jnp.float32
    rounded = np.asarray(jnp.asarray(table, jnp.bfloat16), np.float32)
    np.testing.assert_allclose(got, plain(np.asarray(x, np.float32), rounded, bias, targets, None), atol=1e-5)


@pytest.mark.parametrize("chunk", [4, 128])
@pytest.mark.parametrize("vocab", [5, 41])
def test_bfloat16_features_give_the_gradients_of_float32(vocab, chunk):
    """Compiled, in one chunk and in several, for a table with more rows than features and with fewer."""
    x, table, bias, targets = inputs(vocab)
    rounded = [jnp.asarray(a, jnp.bfloat16) for a in (x, table)]
    weights = np.random.default_rng(0).random((B, T)).astype(np.float32)

    def total(x, table, bias):
        return weighed_cross_entropy(Call(chunk, 3.0, 0.1, 0.2, dtype="float32"), x, table, bias, targets, weights)[0]

    want = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*(a.astype(jnp.float32) for a in rounded), bias)
    got = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(rounded[0], rounded[1].astype(jnp.float32), bias)
    for a, b in zip(got, want, strict=True):
        assert np.linalg.norm(a.astype(np.float32) - b) < 0.02 * np.linalg.norm(b)


def test_a_vocabulary_that_does_not_divide_is_refused():
    x, table, _, targets = inputs(41)
    with (
        jax.set_mesh(sharding.make_mesh(Mesh(data=1, tensor=2), jax.devices()[:2])),
        pytest.raises(ShardingError, match="vocab=41 can't be split 2 ways"),
    ):
        jax.eval_shape(lambda x: cross_entropy(Call(4), x, table, None, targets), x)


def test_a_split_vocabulary_is_never_gathered():
    mesh = sharding.make_mesh(Mesh(data=1, fsdp=1, tensor=-1))
    place = NamedSharding(mesh, PartitionSpec("tensor", None))
    table = jax.ShapeDtypeStruct((512, D), jnp.float32, sharding=place)
    x, _, _, targets = inputs(41)

    def total(x, table):
        return weighed_cross_entropy(Call(4), x, table, None, targets, jnp.ones((B, T)))[0]

    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(total, argnums=1), out_shardings=place).lower(x, table).compile()
    text = program.as_text()
    assert "all-gather" not in text and "f32[512," not in text and "all-reduce" in text


@pytest.mark.parametrize("weighed", [False, True])
def test_memory_does_not_hold_the_logits(weighed):
    """No [B, T, V] array in the program, and its temporaries grow with the table and one chunk as V grows."""
    rows, length, dim, chunk = 4, 64, 16, 16

    def compiled(vocab: int):
        shapes = [(rows, length, dim), (vocab, dim)]
        arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
        targets = jax.ShapeDtypeStruct((rows, length), jnp.int32)

        def total(x, table, targets):
            if weighed:
                return weighed_cross_entropy(Call(chunk), x, table, None, targets, jnp.ones(targets.shape))[0]
            return jnp.sum(cross_entropy(Call(chunk), x, table, None, targets).nats)

        return jax.jit(jax.grad(total, argnums=(0, 1))).lower(*arrays, targets).compile()

    temporaries = {}
    for vocab in (8 * 1024, 64 * 1024):
        program = compiled(vocab)
        temporaries[vocab] = program.memory_analysis().temp_size_in_bytes
        sizes = [np.prod([int(n) for n in s.split(",")]) for s in re.findall(r"f32\[([\d,]+)\]", program.as_text())]
        assert max(sizes) <= vocab * max(dim, chunk), "an array beyond the table and one chunk"
    growth = (temporaries[64 * 1024] - temporaries[8 * 1024]) / (4 * (64 - 8) * 1024)
    assert growth <= 2 * dim + 2 * chunk < rows * length, f"{growth:.0f} numbers a word"
