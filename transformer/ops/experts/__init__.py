"""Expert layers: every token through the experts that its router picked; one door, several bodies.

`dense` is the reference, `grouped` costs what the assignments cost (on CPUs, padding included), `capacity` has a fixed
number of slots an expert and drops what overflows. Where the mesh splits the experts, tokens travel to them
(`exchange.py`).
"""

import functools
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float, Int

from transformer import axes as ax
from transformer.ops.experts import dense, exchange
from transformer.ops.experts.call import AXES, Call, ExpertWeights
from transformer.ops.products import Quantized
from transformer.ops.sums import gathered
from transformer.sharding import mesh_axes, partition_spec, platform, varying_axes, ways

log = logging.getLogger(__name__)

# What runs on each device, on its own tokens; `dense` is left to the compiler to spread over a mesh.
SPARSE: dict[str, Callable] = {"grouped": exchange.grouped, "capacity": exchange.capacity}
BODIES = ("dense", *SPARSE)


def apply(
    body: str,
    call: Call,
    x: Float[Array, "B T D"],
    index: Int[Array, "B T k"],
    weight: Float[Array, "B T k"],
    w: ExpertWeights,
) -> tuple[Float[Array, "B T D"], Float[Array, ""]]:
    """The weighted sum of what each token's experts make of it, and how many assignments were dropped.

    Args:
      body: one of `BODIES`, or "auto", which chooses an exact one and logs its choice once.
      index: experts picked; `call.num_experts` and above: none. Such assignments add nothing.
      weight: of each pick, float32.
    """
    name = choose(call.num_experts, index.shape[-1], call.rules) if body == "auto" else body
    mesh = jax.sharding.get_abstract_mesh()
    alone = mesh.empty or mesh.size == 1
    # Whatever the body, a mesh that can't split the experts is refused.
    places = None if alone else _places(call, w, mesh)
    if name == "dense":
        return dense.apply(call, x, index, weight, w), jnp.zeros(())
    # Weights of eight bits are widened, all experts of them; `dense` alone multiplies them as they are.
    w = jax.tree.map(lambda k: k.astype(x.dtype), w, is_leaf=lambda k: isinstance(k, Quantized))
    run = functools.partial(_on_device, SPARSE[name], call)
    if alone:
        return run(None, x, index, weight, w)
    tokens = partition_spec((ax.BATCH, ax.LENGTH, None), x.shape, mesh, call.rules, "tokens")
    run = jax.shard_map(
        functools.partial(run, mesh),
        in_specs=(tokens, tokens, tokens, places),
        out_specs=(tokens, PartitionSpec()),
    )
    return run(x, index, weight, w)


def choose(num_experts: int, top_k: int, rules: str = "default") -> str:
    """The body that "auto" stands for."""
    # Picking half of the experts pays already (benchmarks/experts.py), and experts on other devices always.
    here = ways(ax.EXPERTS, rules) == 1
    name = "dense" if here and num_experts < 2 * top_k else "grouped"
    _log_choice(name, platform(), num_experts, top_k)
    return name


@functools.cache
def _log_choice(name: str, platform: str, num_experts: int, top_k: int) -> None:
    log.info("experts=auto: %s for %d experts, %d a token, on %s", name, num_experts, top_k, platform)


def _places(call: Call, w: ExpertWeights, mesh: AbstractMesh) -> ExpertWeights:
    """How the mesh splits the weights.

    Raises:
      ShardingError: it can't.
    """

    def place(names, k) -> PartitionSpec:
        return partition_spec(names, k.shape, mesh, call.rules, "experts")

    return jax.tree.map(place, _axes(w), w, is_leaf=_is_names)


def _axes(w: ExpertWeights) -> ExpertWeights:
    """Logical axes of the parts that there are."""
    return ExpertWeights(*(None if k is None else names for names, k in zip(AXES, w, strict=True)))


def _is_names(x) -> bool:
    return isinstance(x, tuple) and not isinstance(x, ExpertWeights)


def _on_device(body: Callable, call: Call, mesh: AbstractMesh | None, x, index, weight, w: ExpertWeights):
    """What each device does with its tokens and its part of the weights; without a mesh, with all of them."""

    def split(name: str) -> tuple[str, ...]:
        return () if mesh is None else mesh_axes(name, mesh, call.rules)

    hidden, embed = split(ax.MLP), split(ax.EXPERT_EMBED)
    (axis,) = split(ax.EXPERTS) or (None,)
    flat = (a.reshape(-1, a.shape[-1]) for a in (x, index, weight))
    # Weights vary before they are gathered: what is summed over further devices are then parts of their gradients.
    *flat, w = _varying((*flat, w))
    if mesh is not None:
        whole = functools.partial(_whole, embed, x.dtype, call.reduce_dtype)
        w = jax.tree.map(whole, _axes(w), w, is_leaf=_is_names)
    if hidden and w.down_bias is not None:
        # Each device of the hidden axes adds a part of the sum; the bias is in one of them.
        w = w._replace(down_bias=jnp.where(jax.lax.axis_index(hidden) == 0, w.down_bias, 0))
    y, dropped = body(call, *flat, w, axis)
    if hidden:
        y = jax.lax.psum(y, hidden)
    if mesh is not None:
        # Devices that hold the same tokens count the same drops.
        everyone = varying_axes(x)
        dropped = jax.lax.psum(jax.lax.pmax(dropped, hidden) if hidden else dropped, everyone)
    return y.reshape(x.shape), dropped


def _whole(axes: tuple[str, ...], dtype: jnp.dtype, sums: str | None, names: tuple[str, ...], k: Array) -> Array:
    """A part of the weights, whole along the model dimension."""
    if ax.EXPERT_EMBED not in names:
        return k.astype(dtype)
    return gathered(k, axes, names.index(ax.EXPERT_EMBED), dtype, sums)


def _varying(tree):
    """All leaves marked as different on every device on which any of them is.

    Custom gradients need it: what they return must vary as the inputs do. The transpose of the mark is a sum.
    """
    everywhere = {name for leaf in jax.tree.leaves(tree) for name in varying_axes(leaf)}

    def mark(leaf):
        missing = tuple(sorted(everywhere.difference(varying_axes(leaf))))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


__all__ = ["AXES", "BODIES", "Call", "ExpertWeights", "apply", "choose"]
