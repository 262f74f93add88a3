"""Bodies of an expert layer: the same values and gradients, whatever the router does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer import sharding
from transformer.ops import experts
from transformer.ops.experts import dense, exchange, products, slots
from transformer.settings import Mesh
from transformer.spec import ClampedGate, FeedForward

E, D, F, ROWS, LENGTH = 8, 16, 24, 8, 12
SPECS = {
    "gated": FeedForward(d_ff=F, activation="silu", gated=True, bias=False),
    "plain, biased": FeedForward(d_ff=F, activation="gelu", gated=False, bias=True),
    "clamped, biased": FeedForward(
        d_ff=F, activation="silu", gated=True, bias=True, clamp=ClampedGate(limit=1.0, alpha=1.7, offset=1.0)
    ),
}
MESHES = {
    "2 devices": dict(data=1, expert=2),
    "4 devices": dict(data=1, expert=4),
    "8 devices": dict(data=1, expert=8),
    "with fsdp": dict(data=1, fsdp=2, expert=2),
    "with all": dict(data=1, fsdp=2, expert=2, tensor=2),
    "without experts": dict(data=4, tensor=2),
}
KINDS = ("random", "collapsed", "some empty")
# Bodies on a mesh, and the same ones squeezed: a buffer that overflows.
WAYS = {
    "all_gather": dict(exchange="all_gather"),
    "all_to_all": dict(exchange="all_to_all", buffer=8.0),
    "crowded": dict(exchange="all_to_all", buffer=0.25),
}


def weights_of(spec: FeedForward, num_experts: int = E) -> experts.ExpertWeights:
    shapes = dict(up=(D, F), gate=(D, F), down=(F, D), up_bias=(F,), gate_bias=(F,), down_bias=(D,))
    rng = np.random.default_rng(1)

    def draw(name):
        missing = (name.startswith("gate") and not spec.gated) or (name.endswith("bias") and not spec.bias)
        return None if missing else rng.standard_normal((num_experts, *shapes[name])).astype(np.float32) / 4

    return experts.ExpertWeights(*map(draw, experts.ExpertWeights._fields))


def routing_of(kind: str, top_k: int, num_experts: int = E) -> tuple[np.ndarray, np.ndarray]:
    """Distinct experts of every token, and their weights; a tail of each row is padding, sent nowhere."""
    rng = np.random.default_rng(top_k)
    scores = rng.random((ROWS, LENGTH, num_experts))
    if kind == "collapsed":  # the same experts for all tokens
        scores = np.broadcast_to(np.arange(num_experts)[::-1] / num_experts, scores.shape)
    if kind == "some empty":  # experts 0 and 5 are never picked, unless all are
        scores = scores - np.isin(np.arange(num_experts), (0, 5))
    index = np.argsort(-scores, axis=-1, kind="stable")[..., :top_k].astype(np.int32)
    index[np.arange(ROWS)[:, None] + np.arange(LENGTH) > LENGTH + 2] = num_experts
    weight = rng.random((ROWS, LENGTH, top_k)).astype(np.float32)
    return index, weight


def inputs(num_experts: int = E) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ROWS, LENGTH, D)).astype(np.float32)


@functools.cache
def program(body: str, call: experts.Call, devices: str = ""):
    """Jitted (x, index, weight, w) -> (y, dropped) and the gradients of x, weight and w."""

    def loss(x, weight, w, index):
        y, dropped = experts.apply(body, call, x, index, weight, w)
        return jnp.sum(jnp.sin(y)), (y, dropped)

    both = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    if not devices:
        return lambda x, index, weight, w: both(x, weight, w, index)
    sizes = MESHES[devices]
    mesh = sharding.make_mesh(Mesh(**sizes), jax.devices()[: int(np.prod(list(sizes.values())))])

    def run(x, index, weight, w):
        with jax.set_mesh(mesh):
            return both(x, weight, w, index)

    return run


def compare(got, want, dropped: float = 0):
    (grads, (y, drops)), (want_grads, (want_y, _)) = jax.device_get((got, want))
    assert drops == dropped
    np.testing.assert_allclose(y, want_y, atol=2e-5)

    def close(path, a, b):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max()), err_msg=jax.tree_util.keystr(path))

    jax.tree.map_with_path(close, grads, want_grads)


@pytest.mark.parametrize(("spec", "top_k"), [*((spec, 2) for spec in SPECS), ("gated", 1), ("gated", 5), ("gated", 8)])
def test_every_body_equals_the_reference(spec, top_k):
    w, x, call = weights_of(SPECS[spec]), inputs(), experts.Call(SPECS[spec], E, capacity=E)
    for kind in KINDS:
        index, weight = routing_of(kind, top_k)
        want = program("dense", call)(x, index, weight, w)
        for body in ("grouped", "capacity"):
            compare(program(body, call)(x, index, weight, w), want)
        unused = np.setdiff1d(np.arange(E), index)
        assert len(unused) or kind == "random" or top_k == 8
        for leaf in jax.tree.leaves(want[0][2]):
            assert not np.any(leaf[unused])


@pytest.mark.parametrize("spec", ["gated", "plain, biased"])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_the_reference_rounded(kind, spec):
    """Its gradients of weights have forms of their own."""
    spec = SPECS[spec]
    call, (index, weight) = experts.Call(spec, E), routing_of(kind, 2)
    half = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), (inputs(), weights_of(spec)))
    x, w = jax.tree.map(lambda a: a.astype(jnp.float32), half)
    want = jax.device_get(program("dense", call)(x, index, weight, w))
    got = jax.device_get(program("grouped", call)(half[0], index, weight, half[1]))

    def close(path, a, b):
        error = np.linalg.norm(a.astype(np.float32) - b) / max(np.linalg.norm(b), 1e-6)
        assert error < 0.03, (jax.tree_util.keystr(path), error)

    jax.tree.map_with_path(close, got, want)


def on_a_mesh(body: str, devices: str, top_k: int, **way):
    spec = SPECS["clamped, biased"]
    w, x, call = weights_of(spec), inputs(), experts.Call(spec, E, capacity=E, **way)
    for kind in KINDS:
        index, weight = routing_of(kind, top_k)
        want = program("dense", experts.Call(spec, E))(x, index, weight, w)
        compare(program(body, call, devices)(x, index, weight, w), want)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("devices", "top_k"), [("2 devices", 2), ("with all", 3)])
def test_expert_parallel_equals_the_reference(devices, top_k, way):
    on_a_mesh("grouped", devices, top_k, **WAYS[way])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("devices", ["4 devices", "8 devices", "with fsdp"])
def test_expert_parallel_equals_the_reference_on_more_meshes(devices, top_k, way):
    on_a_mesh("grouped", devices, top_k, **WAYS[way])


@pytest.mark.parametrize("devices", ["4 devices", "with all"])
def test_slots_of_other_devices_equal_the_reference(devices):
    on_a_mesh("capacity", devices, 2)


def test_a_mesh_without_experts_needs_no_exchange():
    on_a_mesh("grouped", "without experts", 2)


def test_dense_runs_on_a_mesh_of_experts():
    w, (index, weight), x = weights_of(SPECS["gated"]), routing_of("random", 2), inputs()
    call = experts.Call(SPECS["gated"], E)
    compare(program("dense", call, "with all")(x, index, weight, w), program("dense", call)(x, index, weight, w))


@pytest.mark.parametrize(("kind", "crowded"), [("random", False), ("collapsed", True)])
def test_a_full_buffer_takes_the_other_path(kind, crowded, monkeypatch):
    """All tokens of a group on one device are more than twice an even share of four."""
    monkeypatch.setattr(exchange, "_there_and_back", lambda call, rows, *rest: jnp.full_like(rows, jnp.nan))
    call = experts.Call(SPECS["gated"], E, exchange="all_to_all", buffer=2.0)
    w, (index, weight), x = weights_of(SPECS["gated"]), routing_of(kind, 2), inputs()
    _, (y, _) = program.__wrapped__("grouped", call, "4 devices")(x, index, weight, w)
    assert np.isnan(y).any() != crowded


def test_capacity_drops_the_latest_choices_and_says_how_many():
    call = experts.Call(SPECS["gated"], E, capacity=0.5)
    w, (index, weight), x = weights_of(SPECS["gated"]), routing_of("random", 2), inputs()
    room = index.size // E // 2
    kept = np.zeros(index.shape, bool)
    taken = np.zeros(E, int)
    for choice in range(2):
        for place in np.ndindex(ROWS, LENGTH):
            expert = index[(*place, choice)]
            if expert < E and taken[expert] < room:
                taken[expert] += 1
                kept[(*place, choice)] = True
    dropped = np.sum((index < E) & ~kept)
    assert dropped > 0
    want = program("dense", call)(x, index, np.where(kept, weight, 0), w)
    grads, out = program("capacity", call)(x, index, weight, w)
    compare(
        ((grads[0], grads[1] * kept, grads[2]), out), ((want[0][0], want[0][1] * kept, want[0][2]), want[1]), dropped
    )
    # Each device has room for its own tokens: the sum of their drops.
    _, (_, everywhere) = program("capacity", call, "4 devices")(x, index, weight, w)
    parts = [program("capacity", call)(*(a[i : i + 2] for a in (x, index, weight)), w)[1][1] for i in range(0, ROWS, 2)]
    assert everywhere == sum(parts) > 0


@pytest.mark.parametrize(("tile", "room"), [(4, 0), (4, 12), (1, 36)])
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_products_equal_the_tiled_ones(kind, tile, room):
    """What accelerators run, on a CPU."""
    spec = SPECS["clamped, biased"]
    w, (index, _), x = weights_of(spec), routing_of(kind, 3), inputs()
    index, x = jnp.asarray(index.reshape(-1, 3)), x.reshape(-1, D)

    def run(product, tile, room=0):
        def loss(x, w):
            seats = slots.grouped(index, E, tile, room=room)
            return jnp.sum(jnp.sin(slots.collect(product(spec, slots.spread(x, seats), seats, w), seats)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, w)

    got, want = run(products.ragged, 1), run(functools.partial(products.tiled, room=room), tile, room)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), got, want)


def test_every_expert_everywhere_is_its_own_sum():
    """The reference itself: with all experts picked, the plain weighted sum."""
    spec = SPECS["gated"]
    w, x = weights_of(spec), inputs()
    index, weight = routing_of("random", E)
    y = dense.apply(experts.Call(spec, E), x, index, weight, w)
    gate, up = (np.einsum("btd,edf->ebtf", x, kernel) for kernel in (w.gate, w.up))
    parts = np.einsum("ebtf,efd->ebtd", gate / (1 + np.exp(-gate)) * up, w.down)
    share = np.zeros((*x.shape[:2], E + 1), np.float32)
    np.put_along_axis(share, index, weight, axis=-1)
    real = index[..., 0] < E
    np.testing.assert_allclose(y[real], np.einsum("ebtd,bte->btd", parts, share[..., :E])[real], atol=1e-5)
    assert not np.any(np.asarray(y)[~real])
