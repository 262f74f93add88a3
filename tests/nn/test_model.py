"""Embedding, head and stack: mechanisms that no family of today combines, and the errors of the whole model."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import common
from transformer import sharding, spec
from transformer.nn import initial
from transformer.nn.model import Transformer
from transformer.ops import cache, rope
from transformer.settings import Compute, Mesh

NORM = spec.Norm(kind="layer", eps=1e-5, offset=0.0, bias=True, scale_in_float32=True)
MIXER = spec.Attention(
    num_heads=4, num_kv_heads=2, head_dim=8, mask=spec.Mask(causal=True, window=5), scale=0.35,
    rope=spec.Rope(theta=1e4, dim=4, interleaved=True), qkv_bias=True, out_bias=True, softcap=2.0, sinks=True,
)  # fmt: skip
WIDE = dataclasses.replace(MIXER, mask=spec.Mask(causal=True), rope=None, sinks=False, qk_norm=NORM, qk_norm_joint=True)
FFN = spec.FeedForward(d_ff=24, activation="gelu", gated=False, bias=True)
LOCAL = spec.Block(mixer=MIXER, ffn=FFN, norm=NORM, placement="post")
FULL = spec.Block(mixer=WIDE, ffn=FFN, norm=NORM, placement="after")
# Every part of a stack, norms after the sum and after the branch, a joint norm of q and k, partial and interleaved
# rotation, sinks, softcaps, sinusoids, a biased head.
EVERYTHING = spec.Model(
    vocab_size=152,
    d_model=16,
    max_length=64,
    embedding=spec.Embedding(scale=4.0, positions=spec.SinusoidalPositions(base=1e4, interleaved=True)),
    decoder=spec.Stack(head=(FULL,), body=(LOCAL, FULL), repeats=2, tail=(LOCAL,), final_norm=NORM),
    head=spec.Head(tied=False, bias=True, softcap=5.0),
)
# Where only the ends matter.
SMALL = dataclasses.replace(EVERYTHING, decoder=spec.Stack(body=(FULL,), repeats=1, final_norm=NORM))


def random_params(net: Transformer):
    rng = np.random.default_rng(0)
    shapes = nn.meta.unbox(initial.abstract_params(net))
    return jax.tree.map(lambda s: rng.standard_normal(s.shape).astype(np.float32) * 0.3, shapes)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("method", "mutable"))
def apply(net: Transformer, params, *args, **kwargs):
    return net.apply({"params": params}, *args, **kwargs)


def batch() -> common.Batch:
    tokens, targets = np.random.default_rng(1).integers(0, 152, (2, 4, 40))
    segments = np.repeat([[1, 2, 0]], [17, 20, 3], axis=1).repeat(4, axis=0)
    return common.Batch(tokens, targets, (segments > 0).astype(np.float32), None, segments)


def test_every_mechanism_at_once_runs_the_same_in_every_way():
    """By another body in blocks, with remat and small chunks, on a mesh that splits heads whose joint norm sees all."""
    base = Transformer(EVERYTHING, Compute(attention="reference"))
    params = random_params(base)
    want = jax.device_get(common.objective(base)(params, batch()))
    other = Transformer(EVERYTHING, Compute(attention="blockwise", attention_block=16, remat="dots", loss_chunk=128))
    mesh = sharding.make_mesh(Mesh(data=2, fsdp=2, tensor=2))
    placed = jax.device_put(params, common.shardings(other, mesh))
    with jax.set_mesh(mesh):
        got = common.objective(other)(placed, jax.device_put(batch(), sharding.batch_sharding(mesh)))
    common.assert_same(jax.device_get(got), want)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(want.gradients))
    logits = apply(base, params, batch().tokens, None, batch().segment_ids)
    assert np.abs(logits).max() <= 5.0
    losses = -np.take_along_axis(jax.nn.log_softmax(logits), batch().targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(want.losses, losses * batch().weights, atol=1e-5)


def test_decoding_every_mechanism_equals_the_full_forward():
    net = Transformer(EVERYTHING, Compute(attention="reference"))
    params, tokens = random_params(net), batch().tokens
    want = apply(net, params, tokens)
    positions = np.tile(np.arange(40), (4, 1))
    state = cache.init(EVERYTHING.decoder, 4, 40, jnp.float32)
    got = []
    for start, stop in ((0, 10), (10, 20), *((i, i + 1) for i in range(20, 40))):
        here = slice(start, stop)
        x, state = apply(net, params, tokens[:, here], positions[:, here], cache=state, method="features")
        got.append(apply(net, params, x, method="logits"))
    np.testing.assert_allclose(np.concatenate(got, axis=1), want, atol=1e-4)


def test_a_body_runs_like_the_same_layers_written_out():
    """Stacked parameters of head, body and tail, unstacked into one long head."""
    stack = EVERYTHING.decoder
    flat = dataclasses.replace(stack, head=stack.layers, body=(), repeats=0, tail=())
    scanned = Transformer(EVERYTHING, Compute(attention="reference"))
    written = Transformer(dataclasses.replace(EVERYTHING, decoder=flat), Compute(attention="reference"))
    params = random_params(scanned)
    blocks = common.layers(stack, params["decoder"])
    renamed = {f"head_{i}": block for i, block in enumerate(blocks)}
    moved = {**params, "decoder": {**renamed, "final_norm": params["decoder"]["final_norm"]}}
    tokens = batch().tokens
    want = apply(scanned, params, tokens)
    np.testing.assert_allclose(apply(written, moved, tokens), want, atol=2e-5)


def features_of(embedding: spec.Embedding, tokens, positions=None, dtype="float32"):
    """What enters the stack, and the token table."""
    net = Transformer(dataclasses.replace(SMALL, embedding=embedding), Compute(dtype=dtype))
    params = random_params(net)
    _, state = apply(net, params, tokens, positions, mutable="intermediates")
    return np.asarray(state["intermediates"]["embedded"], np.float32), params["embedding"]


def test_embedding_scales_tokens_then_adds_positions():
    tokens, positions = np.array([[3, 1, 4]]), np.array([[0, 1, 2]])
    learned = spec.Embedding(scale=4.0, positions=spec.LearnedPositions(max_length=8))
    x, table = features_of(learned, tokens)
    np.testing.assert_allclose(x[0], 4 * table["token"][[3, 1, 4]] + table["position"][:3], atol=1e-6)
    # The position decides, not the column.
    x, table = features_of(learned, tokens, np.array([[5, 0, 7]]))
    np.testing.assert_allclose(x[0], 4 * table["token"][[3, 1, 4]] + table["position"][[5, 0, 7]], atol=1e-6)
    x, table = features_of(EVERYTHING.embedding, tokens)
    waves = rope.sinusoids(EVERYTHING.embedding.positions, jnp.asarray(positions), 16)[0]
    np.testing.assert_allclose(x[0], 4 * table["token"][[3, 1, 4]] + waves, atol=1e-6)
    x, table = features_of(spec.Embedding(scale=None, positions=None), tokens)
    np.testing.assert_array_equal(x[0], table["token"][[3, 1, 4]])


def test_embedding_scale_is_rounded_to_the_activation_dtype():
    """sqrt(3072) is 55.4256, and 55.5 in bfloat16."""
    tokens = np.arange(100)[None]
    x, table = features_of(spec.Embedding(scale=3072**0.5, positions=None), tokens, dtype="bfloat16")
    vectors = jnp.asarray(table["token"][:100], jnp.bfloat16)
    np.testing.assert_array_equal(x[0], np.asarray(vectors * jnp.bfloat16(55.5), np.float32))
    unrounded = (vectors.astype(jnp.float32) * 3072**0.5).astype(jnp.bfloat16)
    assert (x[0] != np.asarray(unrounded, np.float32)).any()


def test_token_outside_the_table_gives_nan_not_another_token():
    x, _ = features_of(spec.Embedding(scale=None, positions=None), np.array([[3, 152, 4]]))
    assert np.isnan(x[0, 1]).all() and np.isfinite(x[0, [0, 2]]).all()


def test_head_is_tied_biased_and_capped_as_the_spec_says():
    tokens = batch().tokens[:, :5]
    for head in (spec.Head(tied=True, bias=False), spec.Head(tied=False, bias=True), EVERYTHING.head):
        net = Transformer(dataclasses.replace(SMALL, head=head), Compute())
        params = random_params(net)
        x, _ = apply(net, params, tokens, method="features")
        table = params["embedding"]["token"] if head.tied else params["head"]["kernel"]
        want = np.asarray(x) @ table.T + (params["head"]["bias"] if head.bias else 0)
        want = head.softcap * np.tanh(want / head.softcap) if head.softcap else want
        np.testing.assert_allclose(apply(net, params, tokens), want, atol=1e-4)


def test_calls_that_exclude_each_other_are_refused():
    learned = spec.Embedding(scale=None, positions=spec.LearnedPositions(max_length=8))
    net = Transformer(dataclasses.replace(EVERYTHING, embedding=learned), Compute())
    params = {"params": random_params(net)}
    tokens = np.zeros((1, 9), np.int32)
    with pytest.raises(ValueError, match="9 tokens: the learned position table ends at max_length=8"):
        net.apply(params, tokens)
    state = cache.init(EVERYTHING.decoder, 1, 8, jnp.float32)
    with pytest.raises(ValueError, match="explicit positions"):
        net.apply(params, tokens[:, :4], cache=state, method="features")
    with pytest.raises(ValueError, match="no segment_ids"):
        net.apply(params, tokens[:, :4], np.zeros((1, 4), np.int32), np.ones((1, 4)), cache=state, method="features")
