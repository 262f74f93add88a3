"""Which meshes of a topology can hold a model: by the checks of `sharding`, and by the torus."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from jax.sharding import AbstractMesh

from transformer import sharding, spec
from transformer.config import Run
from transformer.planning import topology
from transformer.planning.leaves import leaves
from transformer.planning.report import Kind
from transformer.planning.topology import Topology
from transformer.sharding import MESH_AXES, ShardingError


def meshes(run: Run, on: Topology, length: int, pruned: Counter[str], kind: Kind = "train") -> Iterator[dict[str, int]]:
    """Meshes of a topology that hold the model's parameters and rows of that length, and lie on its torus.

    Args:
      pruned: gets the number of meshes that were dropped, by reason.
    """
    built = run.spec
    experts = math.gcd(*(b.ffn.num_experts for b in built.layers if isinstance(b.ffn, spec.MoE)), 0) or 1
    for sizes in _factors(on.devices // on.slices, ("data", "fsdp", "expert", "context", "tensor")):
        mesh = dict.fromkeys(MESH_AXES, 1) | sizes | {"slice": on.slices}
        if experts % mesh["expert"]:
            pruned["meshes whose expert axis divides no experts"] += 1
        elif (reason := refused(run, mesh, length, kind)) is not None:
            pruned[f"meshes that split {reason}"] += 1
        elif not topology.lies(on, mesh):
            pruned["meshes that don't lie on the torus"] += 1
        else:
            yield mesh


def refused(run: Run, mesh: Mapping[str, int], length: int, kind: Kind = "train") -> str | None:
    """What of a model a mesh can't split evenly, by the checks of `sharding`; None if nothing."""
    abstract = AbstractMesh(tuple(mesh.values()), tuple(mesh))
    rules = run.settings.compute.rules if kind == "train" else "decode"
    try:
        for leaf in leaves(run.spec):
            sharding.partition_spec(leaf.names, leaf.shape, abstract, rules, "/".join(leaf.path))
    except ShardingError:
        return "a parameter unevenly"
    if kind == "train":
        try:
            sharding.check_length("data.seq_len", length, abstract, run.spec.trunk.uneven, rules)
        except ShardingError:
            return "rows unevenly"
    elif any(block.mixer.cache_dims.heads % mesh["tensor"] for block in run.spec.decoder.layers):
        return "heads of a cache unevenly"
    return None


def _factors(number: int, names: Sequence[str]) -> Iterator[dict[str, int]]:
    """All ways to write a number as a product with a factor for each name."""
    if len(names) == 1:
        yield {names[0]: number}
        return
    for size in (n for n in range(1, number + 1) if number % n == 0):
        yield from ({names[0]: size} | rest for rest in _factors(number // size, names[1:]))
