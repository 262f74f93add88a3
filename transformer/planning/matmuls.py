"""FLOPs of the matrix products that a traced function runs, exactly, without compiling it."""

import math
from collections.abc import Callable, Iterator

import jax
from jax.extend import core


def matmul_flops(function: Callable, *args, trips: int | None = None) -> int:
    """FLOPs of every `dot_general` of `function(*args)`, two a multiply-add; loop bodies count once a trip.

    What each device of a mesh does by itself (`jax.shard_map`) counts on all of them. Kernels are left out.

    Args:
      args: arrays or `jax.ShapeDtypeStruct`s; nothing is computed.
      trips: how often loops run whose lengths depend on values, such as that over the tiles of experts.

    Raises:
      ValueError: a matrix product in a loop whose number of trips is neither known before it runs nor given, or in
        branches that differ.
    """
    return count(jax.make_jaxpr(function)(*args), trips)


def count(jaxpr: core.Jaxpr, trips: int | None = None) -> int:
    """`matmul_flops` of what is traced already."""
    return sum(_equation(equation, trips) for equation in jaxpr.eqns)


def _equation(equation: core.JaxprEqn, trips: int | None) -> int:
    name = equation.primitive.name
    if name == "dot_general":
        left = equation.invars[0].aval
        (contracted, _), _ = equation.params["dimension_numbers"]
        (out,) = equation.outvars
        return 2 * math.prod(out.aval.shape) * math.prod(left.shape[axis] for axis in contracted)
    if name == "pallas_call":
        return 0
    inner = [count(jaxpr, trips) for jaxpr in _inner(equation)]
    if name == "shard_map":
        return equation.params["mesh"].size * sum(inner)
    if name == "scan":
        return equation.params["length"] * sum(inner)
    if name == "while" and any(inner):
        if trips is None:
            raise ValueError("a matrix product in a while loop: how often it runs isn't known before; give trips")
        return trips * sum(inner)
    if name == "cond":
        if len(set(inner)) > 1:
            raise ValueError(f"branches of {inner} FLOPs: which one runs isn't known before")
        return inner[0]
    return sum(inner)


def _inner(equation: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """The jaxprs that an equation calls; a custom gradient's own functions are callables and not among them."""
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.Jaxpr):
                yield item
