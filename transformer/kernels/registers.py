"""What kernels do with blocks that lie in VMEM, in shapes that TPUs have registers for."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

LANES = 128
# Heads of a group laid out one after the other, so that products of one hide the softmax of another; a loop takes more.
UNROLLED_HEADS = 4


def of_each_head(group: int):
    """Runs a function for every head of a group."""
    together = max(n for n in range(1, UNROLLED_HEADS + 1) if group % n == 0)

    def run(body) -> None:
        def several(i, _) -> None:
            for n in range(together):
                body(i * together + n)

        if together == group:
            several(0, None)
        else:
            jax.lax.fori_loop(0, group // together, several, None)

    return run


def dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Float[Array, "r c"]:
    """A product over one axis each, in float32."""
    return jax.lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=jnp.float32)


def wide(x: Float[Array, "r LANES"], width: int) -> Float[Array, "r width"]:
    """More or fewer of columns that are all the same."""
    return jnp.tile(x, (1, -(-width // LANES)))[:, :width]


def rows(ref) -> list[Int[Array, "1 n"]]:
    """The fields of a block's tokens, along lanes."""
    return [ref[f] for f in range(ref.shape[0])]


def columns(ref, width: int) -> list[Int[Array, "n width"]]:
    """The fields of a block's tokens along sublanes, in so many equal columns."""
    return [wide(column(row), width) for row in rows(ref)]


def column(row: Shaped[Array, "1 n"]) -> Shaped[Array, "n LANES"]:
    """A row turned into equal columns, by a transpose of whole registers.

    A reshape to [n, 1] would gather along sublanes, which TPU v4 can't, and then copy a lane for every register.
    """
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def folded(x: Float[Array, "r c"], lanes: int) -> Float[Array, "r lanes"]:
    """Sums of every `lanes`-th column: additions of registers, where a sum over a row crosses lanes."""
    return functools.reduce(jnp.add, [x[:, i : i + lanes] for i in range(0, x.shape[1], lanes)])
