"""Attention on a mesh that splits rows along their length: what one device computes, and the bytes that theory asks."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from transformer import sharding
from transformer.ops import zigzag
from transformer.ops.attention import Call, Extra, Where, attend
from transformer.settings import Mesh
from transformer.sharding import ShardingError
from transformer.spec import Mask, RelativeBias

ROWS, LENGTH, HEADS, DIM = 2, 64, 4, 8
CAUSAL, BOTH_WAYS = Mask(causal=True), Mask(causal=False)
BUCKETS = RelativeBias(num_buckets=6, max_distance=12, bidirectional=False)


def mesh_of(**sizes: int) -> jax.sharding.Mesh:
    sizes = Mesh(**{"data": 1, **sizes})
    return sharding.make_mesh(sizes, jax.devices()[: int(np.prod(list(dataclasses.asdict(sizes).values())))])


def layout_of(name: str) -> Where:
    """Positions, segments and orders of rows that all differ; "packed" and "prefix" end in padding."""
    if name == "plain":
        positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
        return Where(positions, positions)
    lengths = ((9, 30, 22), (41, 3, 12))
    segments, positions = np.zeros((ROWS, LENGTH), np.int32), np.full((ROWS, LENGTH), -1, np.int32)
    for row in range(ROWS):
        at = np.cumsum((0, *lengths[row]))
        for i, (start, stop) in enumerate(itertools.pairwise(at)):
            segments[row, start:stop], positions[row, start:stop] = i + 1, np.arange(stop - start)
    orders = np.where(positions < 0, -1, np.maximum(positions, 6)) if name == "prefix" else None
    return Where(positions, positions, segments, segments, orders, orders)


# Mask, layout, key heads, dim of values, softcap, learned sinks, relative bias.
MECHANISMS = {
    "causal": (CAUSAL, "plain", 4, 8, None, False, None),
    "both-ways": (BOTH_WAYS, "packed", 2, 8, None, False, None),
    "packed-softcap-values": (CAUSAL, "packed", 1, 12, 1.5, False, None),
    "prefix-sinks-bias": (CAUSAL, "prefix", 2, 8, None, True, BUCKETS),
    "window-sinks": (Mask(causal=True, window=5), "plain", 2, 8, None, True, None),
    "window-prefix-bias": (Mask(causal=True, window=4), "prefix", 2, 8, None, False, BUCKETS),
    "one": (Mask(causal=True, window=1), "plain", 4, 8, None, True, None),
    "wide-window": (Mask(causal=True, window=20), "packed", 2, 5, 2.0, False, None),
    "band": (Mask(causal=False, window=4), "packed", 4, 8, None, False, None),
    "streaming": (Mask(causal=True, window=4, sinks=2), "plain", 2, 8, None, True, None),
}
INPUTS = ("q", "k", "v", "extra", "d_out")


def draw(name: str, dtype=jnp.float32) -> tuple[Call, Where, dict]:
    """The call, where the tokens are, and `INPUTS`."""
    mask, layout, kv_heads, v_dim, softcap, sinks, relative = MECHANISMS[name]
    rng = np.random.default_rng(0)
    shapes = (HEADS, DIM), (kv_heads, DIM), (kv_heads, v_dim), (HEADS, v_dim)
    q, k, v, d_out = (rng.standard_normal((ROWS, LENGTH, *shape)).astype(dtype) for shape in shapes)
    sinks = rng.standard_normal(HEADS).astype(np.float32) if sinks else None
    table = relative and rng.standard_normal((relative.num_buckets, HEADS)).astype(np.float32)
    call = Call(mask, 0.4, softcap, aligned=True, relative=relative, block=16)
    return call, layout_of(layout), dict(zip(INPUTS, (q, k, v, Extra(sinks, table), d_out), strict=True))


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(body: str, call: Call, where: Where, given: dict):
    """The output and the gradients of q, k, v and the learned terms, in the rows' own order."""
    order = zigzag.spread if where.zigzag else lambda x: x
    back = zigzag.collect if where.zigzag else lambda x: x

    def output(q, k, v, extra):
        q, k, v, there = jax.tree.map(order, (q, k, v, where))
        return back(attend(body, call, q, k, v, there, extra))

    d_out = given["d_out"]
    out, pull = jax.vjp(output, *(given[name] for name in INPUTS[:-1]))
    return out, pull(d_out)


@functools.cache
def alone(name: str):
    """What one device makes of it."""
    call, where, given = draw(name)
    return jax.device_get(run("reference", call, where, given))


def on_mesh(body: str, exchange: str, order: str, name: str, **sizes: int):
    call, where, given = draw(name)
    where = dataclasses.replace(where, zigzag=order == "zigzag")
    with jax.set_mesh(mesh_of(**sizes)):
        return jax.device_get(run(body, dataclasses.replace(call, exchange=exchange), where, given))


def assert_close(got, want, tolerance: float) -> None:
    scale = np.max(np.abs(want), initial=0)
    error = np.max(np.abs(np.asarray(got, np.float64) - want), initial=0)
    assert error <= tolerance * scale, f"{error:.1e} of {scale:.1e}"


def check(body: str, exchange: str, order: str, name: str, **sizes: int) -> None:
    (out, grads), (want, want_grads) = on_mesh(body, exchange, order, name, **sizes), alone(name)
    assert_close(out, want, 5e-7)
    for got, expected in zip(*map(jax.tree.leaves, (grads, want_grads)), strict=True):
        assert_close(got, expected, 5e-6)


WAYS_TO_SPLIT = [dict(context=4), dict(context=2), dict(context=2, tensor=2), dict(context=8)]
BY = [(exchange, order) for exchange in ("auto", "gather", "ring") for order in ("zigzag", "rows")]


def cases():
    """Each mechanism by every exchange and in both orders, on 2 to 8 devices and beside other axes, by both bodies.

    By default, each mechanism as "auto" has it in one order, and every exchange.
    """
    for i, name in enumerate(MECHANISMS):
        for j, (exchange, order) in enumerate(BY):
            sizes = WAYS_TO_SPLIT[(i + j) % 4] if MECHANISMS[name][2] > 1 else dict(context=2)
            often = j == i % 2 or (name == "prefix-sinks-bias" and order == "zigzag")
            case = ("blockwise", "reference")[(i + j // 2) % 2], exchange, order, name, sizes
            ident = "-".join([*case[:-1], *(f"{axis}{size}" for axis, size in sizes.items())])
            yield pytest.param(*case, marks=[] if often else [pytest.mark.slow], id=ident)
    # Kernels, interpreted.
    for name, exchange, order in (("window-sinks", "auto", "zigzag"), ("prefix-sinks-bias", "ring", "zigzag")):
        case = "splash", exchange, order, name, dict(context=4)
        yield pytest.param(*case, marks=pytest.mark.slow, id=f"splash-{name}")


@pytest.mark.parametrize(("body", "exchange", "order", "name", "sizes"), [*cases()])
def test_any_mesh_is_one_device(body, exchange, order, name, sizes):
    check(body, exchange, order, name, **sizes)


@pytest.mark.parametrize("ways", [2, 4, 8])
def test_zigzag_gives_each_device_an_early_and_a_late_chunk(ways):
    x = np.arange(ROWS * LENGTH * 3).reshape(ROWS, LENGTH, 3)
    chunks = np.split(np.arange(LENGTH), 2 * ways)
    order = np.concatenate([np.concatenate([chunks[i], chunks[2 * ways - 1 - i]]) for i in range(ways)])
    with jax.set_mesh(mesh_of(context=ways)):
        spread = jax.jit(zigzag.spread)(x)
        np.testing.assert_array_equal(spread, x[:, order])
        np.testing.assert_array_equal(jax.jit(zigzag.collect)(spread), x)
        with pytest.raises(ShardingError, match=f"length=6: .* into {2 * ways} chunks; use a multiple of"):
            zigzag.spread(x[:, :6])


WAYS, WIDTH = 4, 64
KEYS = ROWS * LENGTH // WAYS * HEADS * WIDTH * 4  # bytes of a device's keys, and of its values


def moved_bytes(exchange: str, order: str, mask: Mask, backward: bool) -> dict[str, int]:
    """Bytes that reach a device by each kind of collective, as compiled for `WAYS` devices."""
    call, mesh = Call(mask, 0.4, aligned=True, exchange=exchange, block=16), mesh_of(context=WAYS)
    place = NamedSharding(mesh, PartitionSpec(None, "context"))
    x = jax.device_put(np.zeros((ROWS, LENGTH, HEADS, WIDTH), np.float32), place)
    where = dataclasses.replace(layout_of("plain"), zigzag=order == "zigzag")
    where = jax.tree.map(lambda row: jax.device_put(row, place), where)

    def forward(q, k, v):
        return attend("reference", call, q, k, v, where)

    with jax.set_mesh(mesh):
        if not backward:
            return collective_bytes(jax.jit(forward).lower(x, x, x).compile().as_text())
        # Compiled by itself, as where layers are many: else it would use the keys that the forward pass received.
        out, pull = jax.jit(lambda *x: jax.vjp(forward, *x))(x, x, x)
        return collective_bytes(jax.jit(lambda pull, d: pull(d)).lower(pull, out).compile().as_text())


def collective_bytes(text: str) -> dict[str, int]:
    """By kind: the results of a program's collectives, those in a loop as often as it runs."""
    trips = dict(re.findall(r'body=%?([\w.-]+).*?known_trip_count":\{"n":"(\d+)"', text))
    found: dict[str, int] = {}
    for part in re.split(r"\n(?=%|ENTRY)", text):
        times = int(trips.get(re.match(r"(?:ENTRY )?%?([\w.-]*)", part)[1], 1))
        for shapes, kind in re.findall(r" = (.*?) (all-[a-z-]+|reduce-scatter|collective-permute)(?:-start)?\(", part):
            sizes = [np.prod(shape.split(","), dtype=int) for shape in re.findall(r"[sf]32\[([\d,]+)\]", shapes)]
            found[kind] = found.get(kind, 0) + 4 * int(sum(sizes)) * times
    return found


@pytest.mark.parametrize("order", ["rows", "zigzag"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_ring_moves_each_key_to_every_other_device(order, backward):
    """Forward, keys and values n - 1 times; backward the same, and their gradients as often."""
    moved = moved_bytes("auto", order, CAUSAL, backward)
    rounds = 2 if backward else 1
    assert set(moved) == {"collective-permute"}
    assert moved["collective-permute"] == pytest.approx(rounds * (WAYS - 1) * 2 * KEYS, rel=0.1)


@pytest.mark.parametrize(("order", "chunks"), [("rows", 1), ("zigzag", 2)])
@pytest.mark.parametrize("backward", [False, True])
def test_a_window_moves_the_tails_of_chunks(order, chunks, backward):
    """window - 1 rows of keys and values a chunk; backward the same, and their gradients."""
    window = 7
    moved = moved_bytes("auto", order, Mask(causal=True, window=window), backward)
    tail = KEYS // (LENGTH // WAYS) * (window - 1)
    assert set(moved) == {"collective-permute"}
    assert moved["collective-permute"] == pytest.approx((2 if backward else 1) * chunks * 2 * tail, rel=0.1)


def test_a_ring_ends_where_a_window_does():
    moved = moved_bytes("ring", "rows", Mask(causal=True, window=LENGTH // WAYS + 2), backward=False)
    assert moved["collective-permute"] == pytest.approx(2 * 2 * KEYS, rel=0.1)


def test_gathered_keys_are_there_at_once():
    """And their gradients are scattered back."""
    moved = moved_bytes("gather", "rows", CAUSAL, backward=False)
    assert set(moved) == {"all-gather"}
    assert moved["all-gather"] == pytest.approx(WAYS * 2 * KEYS, rel=0.1)
    moved = moved_bytes("gather", "rows", CAUSAL, backward=True)
    assert set(moved) == {"all-gather", "reduce-scatter"}
    assert moved["reduce-scatter"] == pytest.approx(2 * KEYS, rel=0.1)
