"""What an optimiser keeps of the parameters, as a mesh holds it: from the optimiser itself, whichever it is."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from transformer import axes as ax
from transformer import spec
from transformer.nn.model import Transformer
from transformer.planning.leaves import Leaf, leaves, padded
from transformer.settings import HOST_MEMORY, Compute, Optimizer, Settings
from transformer.training.optimizer import make_optimizer


@dataclass(frozen=True)
class Kept:
    """An array that is kept of a parameter; `leaf` has the parameter's path, and the axes that are left of it.

    Attributes:
      item: bytes of a number.
      host: rests in the memory of the host.
    """

    leaf: Leaf
    item: int
    host: bool

    def bytes(self, mesh: Mapping[str, int], rules: str) -> int:
        """Of a device's part, in its layout there; 0 where the host has it."""
        return 0 if self.host else padded(self.leaf.local(mesh, rules), self.item)


@functools.lru_cache(maxsize=64)
def kept(model: spec.Model, o: Optimizer) -> tuple[Kept, ...]:
    """All that rests between steps beside the parameters: moments, and the average of `optimizer.average_decay`."""
    net = Transformer(model, Compute(attention="reference", experts="dense"))
    of_path = {leaf.path: leaf for leaf in leaves(model)}
    params: dict = {}
    for path, leaf in of_path.items():
        place = params
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = jax.ShapeDtypeStruct(leaf.shape, "float32")
    state = jax.eval_shape(make_optimizer(net, _settings(o)).init, params)
    found = []
    for keys, x in jax.tree_util.tree_leaves_with_path(state):
        path = tuple(str(getattr(key, "key", key)) for key in keys)
        owner = next((of_path[path[i:]] for i in range(len(path)) if path[i:] in of_path), None)
        if owner is not None:
            names = _names_left(owner, x.shape)
            found.append(Kept(Leaf(owner.path, names, x.shape), x.dtype.itemsize, o.moments_memory == HOST_MEMORY))
    average = [Kept(leaf, 4, False) for leaf in of_path.values()] if o.average_decay else []
    return (*found, *average)


def update_bytes(model: spec.Model, o: Optimizer, mesh: Mapping[str, int], rules: str) -> int:
    """Read and written by an update: parameters and what is kept of them, both ways, and gradients that are read."""
    own = sum(math.prod(leaf.local(mesh, rules)) for leaf in leaves(model))
    beside = sum(math.prod(k.leaf.local(mesh, rules)) * k.item for k in kept(model, o))
    return 3 * 4 * own + 2 * beside


def host_bytes(model: spec.Model, o: Optimizer, mesh: Mapping[str, int], rules: str) -> float:
    """Of what rests with the host, for a device: fetched for an update, and as many sent back."""
    return sum(math.prod(k.leaf.local(mesh, rules)) * k.item for k in kept(model, o) if k.host)


def _settings(o: Optimizer) -> Settings:
    """A run with this optimiser; schedules keep nothing of a parameter."""
    plain = Settings()
    train = dataclasses.replace(plain.train, steps=max(plain.train.steps, o.warmup_steps + 1))
    return dataclasses.replace(plain, optimizer=o, train=train)


def _names_left(owner: Leaf, shape: tuple[int, ...]) -> tuple[str, ...]:
    """As `training.state` places it: split as its parameter, as that without one axis, or (as norms are) not at all."""
    if shape == owner.shape:
        return owner.names
    for axis in range(len(owner.shape)):
        if shape == owner.shape[:axis] + owner.shape[axis + 1 :]:
            return owner.names[:axis] + owner.names[axis + 1 :]
    return (ax.NORM,) * len(shape)
