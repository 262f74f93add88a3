"""FLOPs of the matrix products that a traced function runs, exactly, without compiling it."""

import math
from collections.abc import Callable, Iterator

import jax
from jax.extend import core


def matmul_flops(function: Callable, *args) -> int:
    """FLOPs of every `dot_general` of `function(*args)`, two a multiply-add; loop bodies count once a trip.

    Args:
      args: arrays or `jax.ShapeDtypeStruct`s; nothing is computed.

    Raises:
      ValueError: a matrix product in a loop whose number of trips is unknown before it runs, or in branches that
        differ.
    """
    return _count(jax.make_jaxpr(function)(*args))


def _count(jaxpr: core.Jaxpr) -> int:
    return sum(_equation(equation) for equation in jaxpr.eqns)


def _equation(equation: core.JaxprEqn) -> int:
    name = equation.primitive.name
    if name == "dot_general":
        left = equation.invars[0].aval
        (contracted, _), _ = equation.params["dimension_numbers"]
        (out,) = equation.outvars
        return 2 * math.prod(out.aval.shape) * math.prod(left.shape[axis] for axis in contracted)
    inner = [_count(jaxpr) for jaxpr in _inner(equation)]
    if name == "scan":
        return equation.params["length"] * sum(inner)
    if name == "while" and any(inner):
        raise ValueError("a matrix product in a while loop: the number of trips isn't known before it runs")
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
