"""Which meshes of a topology can hold a model: by the checks of `sharding`, and by the torus."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from jax.sharding import AbstractMesh

from transformer import axes as ax
from transformer import sharding, spec
from transformer.config import Run
from transformer.planning import topology
from transformer.planning.leaves import leaves
from transformer.planning.report import Kind
from transformer.planning.topology import Topology
from transformer.sharding import MESH_AXES, ShardingError


def experts(model: spec.Model) -> int | None:
    """What `mesh.expert` must divide: the experts of every layer that has any; None where none has."""
    return math.gcd(*(b.ffn.num_experts for b in model.layers if isinstance(b.ffn, spec.MoE)), 0) or None


def refusal(model: spec.Model, sizes: Mapping[str, int], rules: str) -> str | None:
    """What of a model a mesh of these sizes, of all axes, can't split, in words; None if nothing."""
    return _uneven_parameter(model, sizes, rules) or (_uneven_cache(model, sizes) if rules == "decode" else None)


def _uneven_parameter(model: spec.Model, sizes: Mapping[str, int], rules: str) -> str | None:
    mesh = AbstractMesh(tuple(sizes[axis] for axis in MESH_AXES), MESH_AXES)
    try:
        for leaf in leaves(model):
            sharding.partition_spec(leaf.names, leaf.shape, mesh, rules, "/".join(leaf.path))
    except ShardingError as error:
        return str(error).split(";")[0]
    return None


def _uneven_cache(model: spec.Model, sizes: Mapping[str, int]) -> str | None:
    ways = math.prod(sizes[axis] for axis in sharding.RULES["decode"][ax.ACT_HEADS])
    heads = {block.mixer.cache_dims.heads for block in model.decoder.layers}
    uneven = next((n for n in sorted(heads) if n % ways), None)
    return None if uneven is None else f"the cache's {uneven} heads can't be split {ways} ways over mesh axis 'tensor'"


def meshes(run: Run, on: Topology, length: int, pruned: Counter[str], kind: Kind = "train") -> Iterator[dict[str, int]]:
    """Meshes of a topology that hold the model's parameters and rows of that length, and lie on its torus.

    Args:
      pruned: gets the number of meshes that were dropped, by reason.
    """
    many = experts(run.spec) or 1
    for sizes in _factors(on.devices // on.slices, ("data", "fsdp", "expert", "context", "tensor")):
        mesh = dict.fromkeys(MESH_AXES, 1) | sizes | {"slice": on.slices}
        if many % mesh["expert"]:
            pruned["meshes whose expert axis divides no experts"] += 1
        elif (reason := refused(run, mesh, length, kind)) is not None:
            pruned[f"meshes that split {reason}"] += 1
        elif not topology.lies(on, mesh):
            pruned["meshes that don't lie on the torus"] += 1
        else:
            yield mesh


def refused(run: Run, mesh: Mapping[str, int], length: int, kind: Kind = "train") -> str | None:
    """What of a model a mesh can't split evenly, by the checks of `sharding`; None if nothing."""
    rules = run.settings.compute.rules if kind == "train" else "decode"
    if _uneven_parameter(run.spec, mesh, rules):
        return "a parameter unevenly"
    if kind == "train":
        abstract = AbstractMesh(tuple(mesh.values()), tuple(mesh))
        try:
            sharding.check_length("data.seq_len", length, abstract, run.spec.trunk.uneven, rules)
        except ShardingError:
            return "rows unevenly"
    elif _uneven_cache(run.spec, mesh):
        return "heads of a cache unevenly"
    return None


def _factors(number: int, names: Sequence[str]) -> Iterator[dict[str, int]]:
    """All ways to write a number as a product with a factor for each name."""
    if len(names) == 1:
        yield {names[0]: number}
        return
    for size in (n for n in range(1, number + 1) if number % n == 0):
        yield from ({names[0]: size} | rest for rest in _factors(number // size, names[1:]))
