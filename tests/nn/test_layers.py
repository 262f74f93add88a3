"""Projections, feed-forward layers, attention and blocks against their formulas."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer import spec
from transformer.nn.attention import Attention
from transformer.nn.block import Block
from transformer.nn.context import default_positions, make_context
from transformer.nn.feed_forward import FeedForward
from transformer.nn.parameter import parameter
from transformer.nn.projection import Projection
from transformer.ops.activations import activate
from transformer.ops.norms import normalize
from transformer.settings import Compute

ROWS, LENGTH, WIDTH = 2, 6, 16
COMPUTE = Compute(attention="reference")
RMS = spec.Norm(kind="rms", eps=1e-6, offset=0.0, bias=False, scale_in_float32=False)
ROPE = spec.Rope(theta=1e4, dim=4, interleaved=False)
MIXER = spec.Attention(
    num_heads=4, num_kv_heads=2, head_dim=8, mask=spec.Mask(causal=True), scale=0.3, rope=ROPE, qkv_bias=True,
    out_bias=True,
)  # fmt: skip
FFN = spec.FeedForward(d_ff=24, activation="silu", gated=True, bias=True)


def stream(dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((ROWS, LENGTH, WIDTH)), dtype)


def context(*ropes: spec.Rope):
    return make_context(ropes, default_positions(None, (ROWS, LENGTH)))


def run(module: nn.Module, *args):
    """Random parameters, and the module's output with them."""
    shapes = nn.meta.unbox(jax.eval_shape(module.init, jax.random.key(0), *args))["params"]
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda s: rng.standard_normal(s.shape).astype(np.float32) / 3, shapes)
    return params, module.apply({"params": params}, *args)


@pytest.mark.parametrize("bias", [False, True])
def test_projection_contracts_the_trailing_axes(bias):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 4, 5)), jnp.float32)
    params, y = run(Projection((4, 5), (6, 7), ("heads", "head_dim", "mlp", "embed"), bias, COMPUTE), x)
    assert set(params) == {"kernel", "bias"} if bias else {"kernel"}
    want = np.einsum("btij,ijkl->btkl", x, params["kernel"]) + (params["bias"] if bias else 0)
    np.testing.assert_allclose(y, want, atol=1e-5)


def test_projection_keeps_the_dtype_of_its_input():
    assert (
        run(Projection((WIDTH,), (3,), ("embed", "mlp"), True, COMPUTE), stream(jnp.bfloat16))[1].dtype == jnp.bfloat16
    )


def test_parameter_needs_a_name_for_each_axis():
    class Wrong(nn.Module):
        @nn.compact
        def __call__(self):
            return parameter(self, "w", nn.initializers.zeros_init(), (2, 3), ("embed",))

    with pytest.raises(ValueError, match="axis names"):
        Wrong().init(jax.random.key(0))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_feed_forward_is_the_formula(gated, activation):
    x = stream()
    p, y = run(FeedForward(dataclasses.replace(FFN, gated=gated, activation=activation), COMPUTE, 1.0), x)
    up = x @ p["up"]["kernel"] + p["up"]["bias"]
    gate = activate(activation, x @ p["gate"]["kernel"] + p["gate"]["bias"]) if gated else None
    hidden = gate * up if gated else activate(activation, up)
    np.testing.assert_allclose(y, hidden @ p["down"]["kernel"] + p["down"]["bias"], atol=1e-4)


def attention_by_hand(s: spec.Attention, p, x) -> np.ndarray:
    """Query head n reads key head n // 2; one query and one head at a time."""
    heads = {n: np.einsum("btd,dnh->btnh", x, p[n]["kernel"]) + p[n]["bias"] for n in ("query", "key", "value")}
    if s.qk_norm:
        for n in ("query", "key"):
            one = heads[n].reshape(ROWS, LENGTH, -1) if s.qk_norm_joint else heads[n]
            heads[n] = normalize(s.qk_norm, jnp.asarray(one), p[f"{n}_norm"]["scale"]).reshape(heads[n].shape)
    q, k = (np.asarray(context(s.rope).rotate(s.rope, jnp.asarray(heads[n]))) for n in ("query", "key"))
    mixed = np.zeros(q.shape)
    for b, t, n in np.ndindex(*q.shape[:3]):
        first = max(0, t + 1 - s.mask.window) if s.mask.window else 0
        scores = k[b, first : t + 1, n // 2] @ q[b, t, n] * s.scale
        if s.softcap:
            scores = s.softcap * np.tanh(scores / s.softcap)
        weights = np.exp(scores)
        total = weights.sum() + (np.exp(p["sinks"][n]) if s.sinks else 0)
        mixed[b, t, n] = weights / total @ heads["value"][b, first : t + 1, n // 2]
    return np.einsum("btnh,nhd->btd", mixed, p["out"]["kernel"]) + p["out"]["bias"]


@pytest.mark.parametrize("body", ["reference", "blockwise"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(mask=spec.Mask(causal=True, window=3)),
        dict(qk_norm=RMS),
        dict(qk_norm=RMS, qk_norm_joint=True),
        dict(sinks=True),
        dict(softcap=0.5),
        dict(mask=spec.Mask(causal=True, window=2), qk_norm=RMS, sinks=True, softcap=0.5),
    ],
    ids=lambda changes: "+".join(changes) or "plain",
)
def test_attention_is_the_formula(changes, body):
    s = dataclasses.replace(MIXER, **changes)
    x = stream()
    p, (y, cache) = run(Attention(s, Compute(attention=body), 1.0), x, context(ROPE), None)
    assert cache is None
    np.testing.assert_allclose(y, attention_by_hand(s, p, np.asarray(x)), atol=2e-5)


PLACED = {"pre": {"norm"}, "post": {"norm"}, "after": {"post_norm"}, "sandwich": {"norm", "post_norm"}}


@pytest.mark.parametrize("placement", PLACED)
def test_block_places_its_norms(placement):
    """pre: x + F(norm x); post: norm(x + F x); after: x + norm'(F x); sandwich: x + norm'(F(norm x))."""
    x, where = stream(), context(ROPE)
    s = spec.Block(mixer=MIXER, ffn=FFN, norm=RMS, placement=placement)
    p, (y, _) = run(Block(s, COMPUTE, 1.0), x, where, None)

    def norm(name, h):
        return normalize(RMS, h, p[name]["scale"])

    def branch(h, name, function):
        if placement == "pre":
            return h + function(norm(f"{name}_norm", h))
        if placement == "post":
            return norm(f"{name}_norm", h + function(h))
        if placement == "after":
            return h + norm(f"{name}_post_norm", function(h))
        return h + norm(f"{name}_post_norm", function(norm(f"{name}_norm", h)))

    attention, ffn = Attention(MIXER, COMPUTE, 1.0), FeedForward(FFN, COMPUTE, 1.0)
    h = branch(x, "attention", lambda h: attention.apply({"params": p["attention"]}, h, where, None)[0])
    h = branch(h, "ffn", lambda h: ffn.apply({"params": p["ffn"]}, h))
    np.testing.assert_allclose(y, h, atol=1e-5)
    norms = {f"{name}_{which}" for name in ("attention", "ffn") for which in PLACED[placement]}
    assert set(p) == {"attention", "ffn"} | norms
