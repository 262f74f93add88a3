"""The door to what a cache holds: the kernel and XLA give the same, on one device and on a mesh."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.shared_rows import shared
from transformer import settings, sharding
from transformer.ops import cached_attention
from transformer.ops.attention import Call, Extra, Where
from transformer.ops.cache import KVCache, quantize
from transformer.sharding import ShardingError
from transformer.spec import Mask, RelativeBias

RELATIVE = RelativeBias(num_buckets=6, max_distance=12, bidirectional=False)
CALL = Call(Mask(causal=True, window=20), 0.4, 3.0, relative=RELATIVE)
ROWS, SLOTS, HEADS, WIDTH = 4, 64, 4, 8


def arguments(kv_heads: int, value: int, width: int = WIDTH):
    """Two queries a row over an int8 cache of two layers, of which the second is in view."""
    rng = np.random.default_rng(0)

    def noise(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    keys, key_scales = quantize(noise(2, ROWS, kv_heads, SLOTS, width))
    values, value_scales = quantize(noise(2, ROWS, kv_heads, SLOTS, value))
    if width == 64:
        keys, values = shared(keys, 2), shared(values, 2)
    positions = jnp.asarray(np.where(rng.random((ROWS, SLOTS)) < 0.2, -1, np.arange(SLOTS)), jnp.int32)
    cache = KVCache(
        keys, values, jnp.stack([positions - positions - 1, positions]),
        key_scales, value_scales if value else None, jnp.int32(1),
    )  # fmt: skip
    where = Where(jnp.full((ROWS, 2), jnp.asarray([SLOTS - 2, SLOTS - 1]), jnp.int32), cache.held)
    return noise(ROWS, 2, HEADS, width), cache, where, Extra(noise(HEADS), noise(6, HEADS))


def attend(how: str, value_dim: int | None, *args):
    return jax.jit(partial(cached_attention.attend, how, "reference", CALL, value_dim=value_dim))(*args)


@pytest.mark.parametrize(("kv_heads", "value_dim", "width"), [(2, None, 64), (4, None, WIDTH), (1, 6, WIDTH)])
@pytest.mark.parametrize("sizes", [None, dict(data=2, fsdp=2, tensor=2), dict(data=1, tensor=2)])
def test_kernel_is_xla_on_every_mesh(kv_heads, value_dim, width, sizes):
    args = arguments(kv_heads, 0 if value_dim else width, width)
    want = attend("xla", value_dim, *args)
    if sizes is None:
        got = attend("kernel", value_dim, *args)
    else:
        devices = jax.devices()[: int(np.prod(list(sizes.values())))]
        with jax.set_mesh(sharding.make_mesh(settings.Mesh(**sizes), devices)):
            got = attend("kernel", value_dim, *args)
        assert len(got.sharding.device_set) == len(devices)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


def test_heads_that_the_mesh_can_not_split_are_refused():
    args = arguments(2, WIDTH)
    mesh = sharding.make_mesh(settings.Mesh(data=1, tensor=4), jax.devices()[:4])
    with jax.set_mesh(mesh), pytest.raises(ShardingError, match="cached attention: act_heads=2"):
        attend("kernel", None, *args)


def test_auto_is_xla_where_there_is_no_tpu():
    args = arguments(2, WIDTH)

    def program(how):
        return str(jax.make_jaxpr(partial(cached_attention.attend, how, "reference", CALL))(*args))

    assert "pallas_call" not in program("auto")
    assert "pallas_call" in program("kernel")


def test_many_queries_go_through_xla():
    """A later chunk of a prompt reads the cache, too."""
    q, cache, where, extra = arguments(2, WIDTH)
    many = cached_attention.MOST_QUERIES + 1
    q, where = jnp.tile(q[:, :1], (1, many, 1, 1)), dataclasses.replace(where, q_positions=jnp.full((ROWS, many), 9))
    attend = partial(cached_attention.attend, "kernel", "reference", CALL)
    assert "pallas_call" not in str(jax.make_jaxpr(attend)(q, cache, where, extra))


def test_what_the_kernel_can_not_serve_is_refused_by_name_and_left_to_xla_by_auto():
    q, cache, where, extra = arguments(2, WIDTH)
    where = dataclasses.replace(where, q_segments=jnp.ones((ROWS, 2), int), k_segments=jnp.ones((ROWS, SLOTS), int))
    with pytest.raises(ValueError, match=r'compute.decode_attention="kernel": .*segments.*use "auto"'):
        attend("kernel", None, q, cache, where, extra)
    np.testing.assert_array_equal(
        attend("auto", None, q, cache, where, extra), attend("xla", None, q, cache, where, extra)
    )
