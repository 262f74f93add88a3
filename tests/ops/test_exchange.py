"""How tokens reach experts on other devices: the emulated operation, and what "auto" stands for."""

import jax
import jax.numpy as jnp
import numpy as np

from transformer import sharding
from transformer.ops import experts
from transformer.ops.experts import exchange
from transformer.settings import Mesh


def test_emulation_moves_rows_as_the_operation_says():
    """Two devices: each keeps a part and sends a part; what nobody writes stays."""
    mesh = sharding.make_mesh(Mesh(data=1, expert=2), jax.devices()[:2])
    spec = jax.sharding.PartitionSpec("expert")
    operand = np.arange(8, dtype=np.float32).reshape(8, 1)  # device 0: 0…3, device 1: 4…7
    sizes = np.array([[1, 2], [2, 0]])  # from, to
    args = [
        a.reshape(-1).astype(np.int32) for a in (np.array([[0, 1], [1, 3]]), sizes, np.array([[3, 0], [0, 2]]), sizes.T)
    ]

    def move(operand, *args):
        return exchange.emulated(operand, jnp.full((5, 1), -1.0), *args, axis_name="expert")

    with jax.set_mesh(mesh):
        run = jax.jit(jax.shard_map(move, in_specs=(spec,) * 5, out_specs=spec))
        got = run(operand, *args)
        pulled = jax.grad(lambda x: jnp.sum(run(x, *args) * np.arange(10.0)[:, None]))(operand)
    np.testing.assert_array_equal(got[:, 0], [5, 6, -1, 0, -1, 1, 2, -1, -1, -1])
    np.testing.assert_array_equal(pulled[:, 0], [3, 5, 6, 0, 0, 0, 1, 0])


def test_auto_moves_the_fewer_rows():
    assert exchange.choose(4096, 8, 16) == "all_to_all"
    assert exchange.choose(4096, 8, 8) == "all_gather"
    assert exchange.choose(4, 8, 16) == "all_gather"


def test_auto_leaves_out_what_a_chip_refuses(monkeypatch):
    monkeypatch.setattr(exchange, "device_kind", lambda: "TPU v5 lite")
    assert exchange.choose(4096, 8, 16) == "all_gather"


def test_auto_computes_all_experts_only_where_most_are_picked_and_here():
    assert experts.choose(7, 4) == "dense" and experts.choose(8, 4) == "grouped"
    with jax.set_mesh(sharding.make_mesh(Mesh(data=4, expert=2))):
        assert experts.choose(7, 4) == "grouped"
