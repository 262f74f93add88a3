"""One suite that every attention body inherits: the formula in float64, forward and backward."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from tests.ops.attention_formula import formula
from transformer.ops.attention import BODIES, REFUSALS, Call, Extra, Where, attend
from transformer.settings import Mesh
from transformer.sharding import make_mesh
from transformer.spec import Mask, RelativeBias

# Kernels for other machines are interpreted: what they share with the quick ones is tested on fewer cases by default.
INTERPRETED = {"splash"}
MASKS = {
    "full": Mask(causal=False),
    "band": Mask(causal=False, window=4),
    "causal": Mask(causal=True),
    "window": Mask(causal=True, window=5),
    "streaming": Mask(causal=True, window=4, sinks=2),
}
ONE_WAY = RelativeBias(num_buckets=6, max_distance=12, bidirectional=False)
BOTH_WAYS = RelativeBias(num_buckets=8, max_distance=12, bidirectional=True)
# Query heads, kv heads, softcap, sinks, v dim (q and k have 8), relative bias.
HEADS = {
    "mha": (3, 3, None, False, 8, None),
    "gqa-softcap": (4, 2, 1.5, False, 8, None),
    "mqa-sinks": (3, 1, None, True, 5, None),
    "gqa-softcap-sinks-bias": (4, 2, 1.5, True, 12, ONE_WAY),
    "mha-bias": (2, 2, None, False, 8, BOTH_WAYS),
}
LAYOUTS = ("plain", "packed", "left-padded", "prefix", "ring")
# Every mask meets every layout, and every kind of heads meets every mask and every layout.
CASES = [
    (mask, layout, list(HEADS)[(i + j) % len(HEADS)], 8)
    for i, mask in enumerate(MASKS)
    for j, layout in enumerate(LAYOUTS)
]
CASES += [
    ("window", "decode", "gqa-softcap-sinks-bias", 8),
    *(("window", "plain", "mha", block) for block in (1, 5, 64)),
]
# Of interpreted bodies: each mask, each layout and each kind of heads once.
QUICK = {("full", "prefix"), ("band", "ring"), ("causal", "packed"), ("window", "left-padded"), ("streaming", "plain")}


def with_bodies(cases, quick):
    """Every case for every body; those of interpreted bodies that aren't `quick` are slow."""
    for body in BODIES:
        for case in cases:
            marks = [pytest.mark.slow] if body in INTERPRETED and not quick(*case) else []
            yield pytest.param(body, *case, marks=marks)


def layout_of(name, batch=2) -> tuple[Where, bool]:
    """Positions and segments, and whether the call is aligned; lengths are multiples of no block."""

    def rows(x):
        return jnp.asarray(np.broadcast_to(x, (batch, len(x))), jnp.int32)

    if name == "plain":
        return Where(rows(np.arange(37)), rows(np.arange(37))), True
    if name == "packed":
        segments = np.repeat([0, 1, 2], [9, 18, 14])
        positions = np.concatenate([np.arange(9), np.arange(18), np.arange(14)])
        return Where(rows(positions), rows(positions), rows(segments), rows(segments)), True
    if name == "left-padded":
        positions = np.stack([np.arange(21) - 13, np.arange(21) - 2])
        positions = jnp.asarray(np.where(positions < 0, -1, positions), jnp.int32)
        return Where(positions, positions), True
    if name == "prefix":
        # Two documents of which the first 11 and 5 tokens see each other.
        segments = np.repeat([1, 2], [23, 14])
        positions = np.concatenate([np.arange(23), np.arange(14)])
        orders = rows(np.maximum(positions, np.where(segments == 1, 10, 4)))
        positions, segments = rows(positions), rows(segments)
        return Where(positions, positions, segments, segments, orders, orders), True
    # A cache of 27 slots, written round and round up to position 40, a few slots of it still empty.
    slots = np.array([max(p for p in range(41) if p % 27 == slot) for slot in range(27)])
    slots[[3, 20, 21]] = -1
    return Where(rows(np.arange(40 if name == "decode" else 34, 41)), rows(slots)), False


def draw(heads, where, dtype=jnp.float32, seed=0):
    """q, k, v, the learned terms and a cotangent."""
    num_heads, kv_heads, _, sinks, v_dim, relative = HEADS[heads]
    (batch, queries), keys = where.q_positions.shape, where.k_positions.shape[1]
    shapes = [(queries, num_heads, 8), (keys, kv_heads, 8), (keys, kv_heads, v_dim), (queries, num_heads, v_dim)]
    rng = np.random.default_rng(seed)
    q, k, v, d_out = (jnp.asarray(rng.standard_normal((batch, *shape)), dtype) for shape in shapes)
    sinks = jnp.asarray(rng.standard_normal(num_heads), jnp.float32) if sinks else None
    table = relative and jnp.asarray(rng.standard_normal((relative.num_buckets, num_heads)), jnp.float32)
    return q, k, v, Extra(sinks, table), d_out


def call_of(mask, heads, aligned, block=8):
    _, _, softcap, _, _, relative = HEADS[heads]
    return Call(mask=MASKS[mask], scale=0.4, softcap=softcap, aligned=aligned, relative=relative, block=block)


@partial(jax.jit, static_argnums=(0, 1))
def run(body, call, where, q, k, v, extra, d_out):
    """The output and the gradients of q, k, v and the learned terms."""
    out, pull = jax.vjp(lambda q, k, v, extra: attend(body, call, q, k, v, where, extra), q, k, v, extra)
    return out, pull(d_out)


def serve(body, call):
    if reason := REFUSALS[body](call):
        pytest.skip(reason)


def assert_close(actual, expected, tolerance):
    expected = np.asarray(expected)
    error = np.max(np.abs(np.asarray(actual, np.float64) - expected), initial=0)
    assert error <= tolerance * np.max(np.abs(expected), initial=0), f"error {error:.2e}"


def check(body, call, where, q, k, v, extra, d_out, forward, backward):
    out, grads = run(body, call, where, q, k, v, extra, d_out)
    expected, expected_grads = formula(call, q, k, v, where, extra, d_out)
    assert out.dtype == q.dtype
    assert_close(out, expected, forward)
    for actual, wanted, x in zip(*map(jax.tree.leaves, (grads, expected_grads, (q, k, v, extra))), strict=True):
        assert actual.dtype == x.dtype
        assert_close(actual, wanted, backward)


@pytest.mark.parametrize("heads", HEADS)
def test_formula_has_the_gradients_of_its_output(heads):
    where, _ = layout_of("ring")
    call = call_of("window", heads, aligned=False)
    *inputs, d_out = jax.tree.map(lambda x: np.asarray(x, np.float64), draw(heads, where))
    leaves, structure = jax.tree.flatten(inputs)

    def value(leaves):
        q, k, v, extra = jax.tree.unflatten(structure, leaves)
        return (formula(call, q, k, v, where, extra, d_out)[0] * d_out).sum()

    _, grads = formula(call, *inputs[:3], where, inputs[3], d_out)
    for i, (x, grad) in enumerate(zip(leaves, jax.tree.leaves(grads), strict=True)):
        step = 1e-5 * np.random.default_rng(i).standard_normal(x.shape)
        up, down = (value([*leaves[:i], x + sign * step, *leaves[i + 1 :]]) for sign in (1, -1))
        np.testing.assert_allclose((up - down) / 2, (grad * step).sum(), rtol=1e-6)


def is_quick(mask, layout, heads, block):
    return (mask, layout) in QUICK and block == 8


@pytest.mark.parametrize(("body", "mask", "layout", "heads", "block"), with_bodies(CASES, is_quick))
def test_formula(body, mask, layout, heads, block):
    where, aligned = layout_of(layout)
    call = call_of(mask, heads, aligned, block)
    serve(body, call)
    check(body, call, where, *draw(heads, where), forward=5e-7, backward=1e-6)


ROUNDED = [("plain", "gqa-softcap-sinks-bias"), ("ring", "mha")]


@pytest.mark.parametrize(("body", "layout", "heads"), with_bodies(ROUNDED, lambda layout, heads: heads == "mha"))
def test_formula_in_bfloat16(body, layout, heads):
    where, aligned = layout_of(layout)
    call = call_of("window", heads, aligned)
    serve(body, call)
    check(body, call, where, *draw(heads, where, jnp.bfloat16), forward=1e-2, backward=1.5e-2)


def numbers(low, high, length):
    row = st.lists(st.integers(low, high), min_size=length, max_size=length)
    return st.lists(row, min_size=2, max_size=2).map(lambda rows: jnp.asarray(rows, jnp.int32))


def anywhere(queries, keys):
    """Unordered positions, empty slots and segments."""
    positions, segments = partial(numbers, -2, 25), partial(numbers, 0, 1)
    return st.builds(Where, *(draw(length) for draw in (positions, segments, positions) for length in (queries, keys)))


ANYWHERE = [("band", 1), ("window", 1), ("window", 4), ("streaming", 3)]


@pytest.mark.parametrize(("body", "mask", "block"), with_bodies(ANYWHERE, lambda mask, block: block == 3))
@settings(max_examples=25, deadline=None, derandomize=True)
@given(where=anywhere(10, 19), seed=st.integers(0, 9))
def test_formula_at_any_positions(body, mask, block, where, seed):
    """Orders, too."""
    call = call_of(mask, "mqa-sinks", aligned=False, block=block)
    serve(body, call)
    check(body, call, where, *draw("mqa-sinks", where, seed=seed), forward=1e-6, backward=2e-6)


@pytest.mark.parametrize(
    ("body", "heads"), with_bodies([("gqa-softcap",), ("mqa-sinks",)], lambda heads: heads == "gqa-softcap")
)
def test_rows_that_see_nothing_are_zero(body, heads):
    where, _ = layout_of("ring")
    where = dataclasses.replace(where, q_positions=where.q_positions.at[0, 2].set(-1).at[1].set(-1))
    call = call_of("window", heads, aligned=False, block=4)
    serve(body, call)
    out, grads = run(body, call, where, *draw(heads, where))
    assert np.all(out[0, 2] == 0) and np.all(out[1] == 0)
    assert np.all(grads[0][0, 2] == 0) and all(np.all(grad[1] == 0) for grad in grads[:3])
    assert np.all(out[0, 3] != 0) and all(np.all(np.isfinite(grad)) for grad in jax.tree.leaves(grads))


@pytest.mark.parametrize(("body", "layout"), with_bodies([("plain",), ("packed",)], lambda layout: layout == "packed"))
def test_layers_in_a_scan_with_remat(body, layout):
    where, aligned = layout_of(layout)
    call = call_of("window", "gqa-softcap", aligned)
    serve(body, call)
    q, k, v, _, d_out = draw("gqa-softcap", where)
    scales = jnp.array([1.0, 0.5])

    def layer(x, scale):
        return x + attend(body, call, x * scale, k, v, where), None

    def scanned(q):
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), q, scales)[0] * d_out)

    def unrolled(q):
        for scale in scales:
            q, _ = layer(q, scale)
        return jnp.sum(q * d_out)

    assert_close(jax.jit(jax.grad(scanned))(q), jax.jit(jax.grad(unrolled))(q), 1e-6)


@pytest.mark.parametrize(("body", "layout"), with_bodies([("plain",), ("ring",)], lambda layout: layout == "ring"))
def test_batch_and_heads_on_a_mesh(body, layout):
    where, aligned = layout_of(layout, batch=4)
    call = call_of("window", "gqa-softcap-sinks-bias", aligned)
    serve(body, call)
    mesh = make_mesh(Mesh(data=4, tensor=2))
    by_head = PartitionSpec("data", None, "tensor")
    extra = Extra(PartitionSpec("tensor"), PartitionSpec(None, "tensor"))
    specs = PartitionSpec("data"), by_head, by_head, by_head, extra, by_head
    whole = (where, *draw("gqa-softcap-sinks-bias", where))
    places = jax.tree.map(partial(NamedSharding, mesh), specs)
    sharded = jax.device_put(whole, places)
    with jax.set_mesh(mesh):
        out, grads = run(body, call, *sharded)
        text = run.lower(body, call, *sharded).compile().as_text()
    for actual, wanted in zip(*map(jax.tree.leaves, ((out, grads), run(body, call, *whole))), strict=True):
        assert_close(actual, wanted, 1e-6)
    assert out.sharding.spec == by_head
    assert "all-gather" not in text
