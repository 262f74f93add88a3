"""Where an array lies on a mesh: which device holds which part of it."""

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from transformer import api, settings, sharding
from transformer import axes as ax
from transformer.nn import initial

# Activations by name: their logical axes; sizes that a config does not say are `BATCH` rows of `LENGTH` tokens.
ROWS, LENGTH = 64, 4096
ACTIVATIONS = {
    "activation/features": (ax.BATCH, ax.LENGTH, ax.ACT_EMBED),
    "activation/heads": (ax.BATCH, ax.LENGTH, ax.ACT_HEADS, None),
    "activation/logits": (ax.BATCH, ax.LENGTH, ax.ACT_VOCAB),
}


@dataclass(frozen=True)
class Placement:
    """An array on a mesh.

    Attributes:
      names: logical axis of each dimension.
      mesh: size of each mesh axis, those of size 1 left out.
      spec: mesh axes that split each dimension.
      parts: of each device, in the mesh's order, the (start, stop) that it holds of every dimension.
    """

    what: str
    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    mesh: dict[str, int]
    spec: PartitionSpec
    parts: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def shares(self) -> dict[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """The distinct parts, and the devices that hold each."""
        found: dict = {}
        for device, part in enumerate(self.parts):
            found.setdefault(part, []).append(device)
        return {part: tuple(devices) for part, devices in found.items()}

    @property
    def copies(self) -> int:
        """How many devices hold each element."""
        return len(self.parts) // len(self.shares)


@functools.cache
def arrays(reference: str) -> dict[str, tuple[tuple[str | None, ...], tuple[int, ...]]]:
    """(logical axes, shape) of every parameter of a model, by path, and of some activations; nothing is made."""
    model = api.build(reference)
    boxes = jax.tree.leaves_with_path(initial.abstract_params(model), is_leaf=initial.is_named)
    found = {
        jax.tree_util.keystr(path, simple=True, separator="/"): (tuple(box.names), tuple(box.value.shape))
        for path, box in boxes
    }
    heads, built = model.spec.layers[-1].mixer.num_heads, model.spec
    sizes = {ax.BATCH: ROWS, ax.LENGTH: LENGTH, ax.ACT_EMBED: built.d_model, ax.ACT_HEADS: heads}
    sizes |= {ax.ACT_VOCAB: built.vocab_size, None: getattr(built.layers[-1].mixer, "head_dim", None) or 128}
    return found | {name: (axes, tuple(sizes[axis] for axis in axes)) for name, axes in ACTIVATIONS.items()}


def place(reference: str, what: str, **mesh: int) -> Placement:
    """Where `what` of a model lies on a mesh of `mesh` axes (data=2, fsdp=4, tensor=2 …), by the one table of rules.

    Raises:
      ValueError: no such parameter or activation.
      ShardingError: the mesh can't split it.
    """
    known = arrays(reference)
    if what not in known:
        raise ValueError(f"what={what!r}: {reference} has {', '.join(known)}")
    (names, shape), sizes = known[what], dataclasses.asdict(settings.Mesh(**{"data": 1, **mesh}))
    abstract = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    spec = sharding.partition_spec(names, shape, abstract, what=what)
    parts = parts_of(spec, shape, sizes)
    return Placement(what, shape, names, {name: n for name, n in sizes.items() if n > 1}, spec, parts)


def parts_of(spec: PartitionSpec, shape: tuple[int, ...], mesh: dict[str, int]) -> tuple:
    """What each device holds, devices in row-major order of the mesh: as `jax.sharding.NamedSharding` divides."""
    parts = []
    for place in itertools.product(*(range(size) for size in mesh.values())):
        at = dict(zip(mesh, place, strict=True))
        part = []
        for entry, size in zip(spec, shape, strict=True):
            split = (entry,) if isinstance(entry, str) else entry or ()
            index = 0
            for axis in split:
                index = index * mesh[axis] + at[axis]
            length = size // math.prod(mesh[axis] for axis in split)
            part.append((index * length, (index + 1) * length))
        parts.append(tuple(part))
    return tuple(parts)
