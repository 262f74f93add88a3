"""Whether what is called replicated is the same everywhere: a device whose memory or arithmetic errs is found out."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from transformer.ops.checksum import checksums


class ReplicaError(RuntimeError):
    """Devices hold different copies of one array; the message names the array and the devices."""


class ReplicaGuard:
    """Compares, over all devices of all processes, the parts of a tree of arrays that should be copies of each other.

    What a device sums up is what lies in its own memory: nothing is exchanged but a number an array and device.
    """

    def __init__(self, like: Any):
        """`like` has the tree's shapes and shardings, all on one mesh."""
        leaves = jax.tree_util.tree_leaves_with_path(like)
        self._names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
        self._specs = [x.sharding.spec for _, x in leaves]
        self._mesh = leaves[0][1].sharding.mesh
        self._devices = self._mesh.devices.ravel()
        self._sums = _summing(self._mesh, self._specs)

    def check(self, tree: Any, step: int) -> None:
        """Waits for the devices.

        Raises:
          ReplicaError: in every process; the first array whose copies differ.
        """
        sums = np.asarray(self._sums(jax.tree.leaves(tree)))
        for name, spec, column in zip(self._names, self._specs, sums.T, strict=True):
            odd = _odd_ones(_parts(self._mesh, spec), column)
            if odd.size:
                told = ", ".join(f"{d} (process {d.process_index})" for d in self._devices[odd[:8]])
                raise ReplicaError(
                    f"step {step}: copies of {name} differ: {odd.size} of {len(self._devices)} devices hold another "
                    f"than most: {told}. Their memory or arithmetic can't be trusted; nothing of this step is saved. "
                    "Leave their hosts out; the same command then resumes from the newest checkpoint"
                )


def _summing(mesh: jax.sharding.Mesh, specs: list[PartitionSpec]) -> Callable[[list[jax.Array]], jax.Array]:
    """A compiled function from arrays to [devices, arrays]: each device's checksum of its part of each."""

    def local(arrays: list[jax.Array]) -> jax.Array:
        return checksums(arrays)[None]

    everyone = PartitionSpec(mesh.axis_names)
    # Unchecked, since "replicated" is what is to be proved.
    one_each = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=everyone, check_vma=False)
    return jax.jit(one_each, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _parts(mesh: jax.sharding.Mesh, spec: PartitionSpec) -> np.ndarray:
    """[devices]: the number of the part that each device holds; those with one number hold copies."""
    used = [axis for entry in spec if entry is not None for axis in ((entry,) if isinstance(entry, str) else entry)]
    places = np.indices(mesh.devices.shape).reshape(mesh.devices.ndim, -1)
    number = np.zeros(mesh.devices.size, np.int64)
    for axis in used:
        number = number * mesh.shape[axis] + places[mesh.axis_names.index(axis)]
    return number


def _odd_ones(parts: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Indices of the devices that disagree with most holders of their part; with all of them where no sum is most."""
    order = np.lexsort((sums, parts))
    starts = np.flatnonzero(np.diff(parts[order], prepend=-1))
    odd = []
    for group in np.split(order, starts[1:]):
        values, counts = np.unique(sums[group], return_counts=True)
        if len(values) > 1:
            most = counts == counts.max()
            odd.append(group[sums[group] != values[most][0]] if most.sum() == 1 else group)
    return np.sort(np.concatenate(odd)) if odd else np.zeros(0, np.int64)


__all__ = ["ReplicaError", "ReplicaGuard"]
