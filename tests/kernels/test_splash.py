"""Splash attention as kernels: imitated with a TPU's memory, and beside the one that JAX ships.

What it computes is tested in tests/ops/test_attention.py, with all bodies; interpreted as plain operations there.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as shipped
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as shipped_masks

from transformer.ops.attention import Call, Extra, Where, splash
from transformer.spec import Mask, RelativeBias

ROWS, HEADS, KV_HEADS, LENGTH, DIM = 2, 4, 2, 40, 16


def draw(dtype=jnp.float32, length=LENGTH, dim=DIM, v_dim=DIM):
    """q, k, v and a cotangent."""
    rng = np.random.default_rng(0)
    shapes = (HEADS, dim), (KV_HEADS, dim), (KV_HEADS, v_dim), (HEADS, v_dim)
    return [jnp.asarray(rng.standard_normal((ROWS, length, *shape)), dtype) for shape in shapes]


def positions(length=LENGTH):
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (ROWS, length))


def with_gradients(f, *inputs, d_out):
    out, pull = jax.vjp(f, *inputs)
    return out, *pull(d_out)


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
def test_no_races_and_nothing_read_before_it_is_written(backward):
    """Two cores, memory that starts as NaN, and an error for each race: packed rows, sinks, softcap and biases."""
    relative = RelativeBias(num_buckets=6, max_distance=12, bidirectional=False)
    call = Call(Mask(causal=True, window=12), 0.3, softcap=5.0, aligned=True, relative=relative, block=8)
    segments = jnp.asarray(np.stack([np.repeat([0, 1], [11, 13]), np.repeat([0, 1], [20, 4])]), jnp.int32)
    where = Where(positions(24), positions(24), segments, segments)
    q, k, v, d_out = draw(length=24, v_dim=8)
    extra = Extra(jnp.linspace(-1, 1, HEADS), jnp.asarray(np.random.default_rng(1).standard_normal((6, HEADS))))

    def run(q, k, v, extra):
        return splash.attend(call, q, k, v, where, extra)

    f = functools.partial(with_gradients, run, d_out=d_out) if backward else run
    want = jax.jit(f)(q, k, v, extra)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)):
        got = jax.jit(lambda *inputs: f(*inputs))(q, k, v, extra)
    for actual, expected in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


def shipped_attention(mask, segments, q, k, v, block):
    """JAX's kernel on arrays [B, T, N, H], which wants queries scaled and blocks of 128."""
    sizes = {name: block for name in shipped.BlockSizes.__dataclass_fields__ if name.startswith("block_")}
    kernel = shipped.make_splash_mha(
        shipped_masks.MultiHeadMask([mask] * HEADS),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=shipped.BlockSizes(**sizes),
        interpret=True,
    )
    ids = shipped.SegmentIds(segments, segments)
    out = jax.vmap(kernel)(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v)), ids)
    return jnp.swapaxes(out, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 100])
def test_as_exact_as_the_kernel_that_jax_ships(window):
    """Each against float32 arithmetic of the same bfloat16 numbers: packed, grouped heads, keys wider than values.

    Theirs gives the product with values float32 weights, which interpretation does not round as an MXU does by default;
    ours rounds them itself. So the output may be off by an eighth more here; gradients have no such excuse.
    """
    length, scale, block = 256, 0.25, 128
    mask = shipped_masks.CausalMask((length, length))
    if window is not None:
        mask = shipped_masks.LocalMask((length, length), (window - 1, 0), 0)
    segments = jnp.asarray(np.stack([np.repeat([0, 1], [100, 156]), np.repeat([0, 1], [201, 55])]), jnp.int32)
    where = Where(positions(length), positions(length), segments, segments)
    *inputs, d_out = draw(jnp.bfloat16, length, dim=48, v_dim=32)
    call = Call(Mask(causal=True, window=window), scale, aligned=True, block=block)

    def ours(q, k, v):
        return splash.attend(call, q, k, v, where)

    def theirs(q, k, v):
        return shipped_attention(mask, segments, q * scale, k, v, block)

    exact = with_gradients(ours, *(x.astype(jnp.float32) for x in inputs), d_out=d_out.astype(jnp.float32))
    errors = {}
    for name, f in {"ours": ours, "theirs": theirs}.items():
        got = jax.jit(functools.partial(with_gradients, f))(*inputs, d_out=d_out)
        errors[name] = [
            float(jnp.linalg.norm((a.astype(jnp.float32) - b).ravel()) / jnp.linalg.norm(b.ravel()))
            for a, b in zip(got, exact, strict=True)
        ]
    for mine, other, slack in zip(errors["ours"], errors["theirs"], (1.2, 1.05, 1.05, 1.05), strict=True):
        assert mine < slack * other and other < 1e-2, errors


def test_blocks_of_other_than_whole_registers_are_refused_on_tpus(monkeypatch):
    call = Call(Mask(causal=True), 1.0, block=144)
    assert splash.refuse(call) is None
    monkeypatch.setattr(splash, "platform", lambda: "tpu")
    assert "multiple of 128" in splash.refuse(call)
    assert splash.refuse(Call(Mask(causal=True), 1.0)) is None
