"""Rows of an expert layer: who sits where, how many are run, and what that costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.test_experts import KINDS, SPECS, D, E, F, routing_of, weights_of
from transformer.ops import experts
from transformer.ops.experts import products, slots
from transformer.planning.matmuls import matmul_flops


def test_padding_costs_no_slot():
    index = np.full((6, 2), E, np.int32)
    index[2] = 3, 5
    seats = slots.grouped(index, E, 4)
    assert list(np.asarray(seats.sizes)) == [0, 0, 0, 1, 0, 1, 0, 0] and int(seats.used) == 2
    assert np.sum(np.asarray(seats.source) < index.size) == 2
    assert (np.asarray(seats.row)[[0, 1, 3, 4, 5]] == seats.source.shape[0]).all()


@pytest.mark.parametrize(("tile", "room"), [(1, 0), (2, 0), (8, 0), (1, 3), (2, 16), (8, 24), (4, 288)])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_hold_every_assignment_once_with_its_expert(kind, tile, room):
    """And the first of each expert lie in its room, up to what it holds."""
    index = routing_of(kind, 3)[0].reshape(-1, 3)
    seats = jax.device_get(slots.grouped(index, E, tile, room=room))
    assert seats.tile == tile
    in_rooms = seats.source[: E * room].reshape(E, room) < index.size
    np.testing.assert_array_equal(np.sum(in_rooms, axis=1), np.minimum(seats.sizes, room))
    for (token, choice), row in np.ndenumerate(seats.row):
        expert = index[token, choice]
        if expert == E:
            assert row == len(seats.source)
            continue
        assert seats.source[row] == choice * len(index) + token
        assert seats.expert[row // tile] == expert and row // tile < seats.used
    assert np.sum(seats.source < index.size) == np.sum(index < E)


@pytest.mark.parametrize("loads", [(37, 0, 0), (9, 28, 0), (9, 9, 19), (13, 12, 12), (0, 0, 0)])
def test_the_buffer_has_room_for_all_loads(loads):
    """Of three experts, with rooms of two tiles."""
    index = np.full(37, 3, np.int32)
    index[: sum(loads)] = np.repeat(np.arange(3), loads)
    seats = slots.grouped(index[:, None], 3, 4, room=8)
    held = np.asarray(seats.source)[np.asarray(seats.row)[: sum(loads), 0]]
    assert list(held) == list(range(sum(loads)))
    assert sum(-(-max(load - 8, 0) // 4) for load in loads) + 6 == int(seats.used) <= len(seats.expert)


def rows_run(index: np.ndarray, num_experts: int) -> tuple[int, int, int]:
    """Rows that an expert layer multiplies at once, and tile by tile, and rows of one tile."""
    tile, room = products.tile_rows(index.size, num_experts), products.room(index.size, num_experts)
    together = num_experts * room
    return together, int(slots.grouped(index, num_experts, tile, room=room).used) * tile - together, tile


def picks(tokens: int, top_k: int, num_experts: int, skew: float = 0) -> np.ndarray:
    """Distinct experts of each token; the larger `skew`, the more often the first ones."""
    scores = np.random.default_rng(0).random((tokens, num_experts)) + skew * np.arange(num_experts)[::-1] / num_experts
    return np.argsort(-scores, axis=-1)[:, :top_k].astype(np.int32)


@pytest.mark.parametrize("real", [1, 0.25, 0])
@pytest.mark.parametrize("skew", [0, 1, 100])
@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts"), [(1, 1, 8), (7, 2, 4), (500, 1, 3), (512, 8, 128), (2048, 2, 8), (4096, 2, 5)]
)
def test_rows_beside_those_of_the_assignments(tokens, top_k, num_experts, skew, real):
    """Of M: rooms, whose empty rows are run, and what exceeds them, with last tiles that hold at most M / SHARE."""
    index = picks(tokens, top_k, num_experts, skew)
    index[int(real * tokens) :] = num_experts
    together, beyond, tile = rows_run(index, num_experts)
    assert tile == 1 or num_experts * tile * products.SHARE <= index.size
    room, share = together // num_experts, index.size // num_experts
    assert share - tile < room <= share if share >= products.LEAST_SHARE else room == 0
    loads = np.bincount(index.reshape(-1), minlength=num_experts + 1)[:num_experts]
    above = np.sum(np.maximum(loads - room, 0))
    assert above <= beyond <= above + num_experts * (tile - 1)
    assert room == 0 or together + beyond <= index.size * (2 - 1 / num_experts) + tile
    assert room or beyond <= np.sum(loads) * (1 + 1 / products.SHARE) + (tile == 1)
    if skew == 0 and real == 1 and room > 100:  # as even as by chance: nearly all rows are multiplied at once
        assert above < 0.08 * index.size


@pytest.mark.parametrize(("tokens", "few"), [(16384, 8), (65536, 16)])
def test_cost_follows_the_tokens_and_not_the_experts(tokens, few):
    """Large batches, two of 8 or of 16 experts a token and two of twice as many: within 3 %, forward and backward."""
    spec, top_k = SPECS["gated"], 2

    def flops(num_experts: int) -> int:
        index = jnp.asarray(picks(tokens, top_k, num_experts))
        together, beyond, tile = rows_run(index, num_experts)
        call, w = experts.Call(spec, num_experts), jax.eval_shape(lambda: weights_of(spec, num_experts))
        x, weight = (jax.ShapeDtypeStruct((1, tokens, n), jnp.float32) for n in (D, top_k))

        def loss(x, weight, w):
            return jnp.sum(experts.apply("grouped", call, x, index[None], weight, w)[0])

        counted = matmul_flops(jax.grad(loss, argnums=(0, 1, 2)), x, weight, w, trips=beyond // tile)
        # Forward and two gradients, of the experts and of the sums over each token's; tiles enter once more.
        assert counted == 2 * (D * F * (9 * together + 11 * beyond) + 3 * D * tokens * top_k)
        return counted

    assert 0 < flops(2 * few) / flops(few) - 1 < 0.03


def test_tiles_that_hold_nothing_are_not_run():
    """A buffer for many rows costs nothing where few come: the loop ends at the last tile that holds any."""
    spec, index = SPECS["gated"], np.array([[0, 3]], np.int32)
    seats, pad = slots.grouped(index, E, 1, most=2), 14
    seats = seats._replace(
        source=jnp.pad(seats.source, (0, pad), constant_values=2),
        expert=jnp.pad(seats.expert, (0, pad), constant_values=7),
    )
    w = jax.tree.map(lambda k: k.at[7].set(jnp.nan), jax.tree.map(jnp.asarray, weights_of(spec)))
    assert not np.isnan(products.tiled(spec, jnp.zeros((16, D)), seats, w)).any()
    assert np.isnan(products.tiled(spec, jnp.zeros((16, D)), seats._replace(used=jnp.int32(16)), w)).any()


def test_products_of_many_rows_are_one_batch():
    """Where loads are even, no tile is run: what is beyond the rooms has no part in the result."""
    spec, index = SPECS["gated"], np.arange(8 * E, dtype=np.int32).reshape(-1, 2) % E
    tile, room = products.tile_rows(index.size, E), products.room(index.size, E)
    assert (tile, room) == (2, 8)
    seats = slots.grouped(index, E, tile, room=room)
    assert int(seats.used) * tile == index.size
    w = jax.tree.map(jnp.asarray, weights_of(spec))
    x = jnp.ones((len(seats.source), D))
    got = products.tiled(spec, x, seats, w, room)
    assert np.any(got[: index.size], axis=1).all() and not np.any(got[index.size :])
    two_more = seats._replace(used=seats.used + 2)
    assert np.any(products.tiled(spec, x, two_more, w, room)[index.size :], axis=1).sum() == 2 * tile
