"""How fast the links of a slice carry what goes along mesh axes: a roofline, which no collective beats."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jax.experimental import mesh_utils

from transformer.planning.report import Exchange
from transformer.planning.topology import Topology
from transformer.settings import SettingsError
from transformer.sharding import MESH_AXES

ALL_TO_ALL = ("all-to-all", "ragged-all-to-all")


@dataclass(frozen=True)
class Line:
    """Devices of a mesh axis along one dimension of the torus: how many, and whether their links go around."""

    size: int
    wraps: bool


def lines(topology: Topology, mesh: Mapping[str, int]) -> dict[str, tuple[Line, ...]]:
    """Where each axis of a mesh within a slice lies on its torus, as JAX lays it.

    Devices that share a chip lie along a dimension of their own. The mesh must be one that `topology.lies` accepts.
    """
    return dict(_lines(topology, tuple(mesh.get(axis, 1) for axis in MESH_AXES if axis != "slice")))


@functools.lru_cache(maxsize=1024)
def _lines(topology: Topology, sizes: tuple[int, ...]) -> tuple[tuple[str, tuple[Line, ...]], ...]:
    laid = mesh_utils.create_device_mesh(sizes, topology.places(), allow_split_physical_axes=True)
    wrap, found = (*topology.wrap, *[False] * 3)[:3], []
    for number, axis in enumerate(name for name in MESH_AXES if name != "slice"):
        others = tuple(slice(None) if i == number else 0 for i in range(laid.ndim))
        places = np.array([(*device.coords, device.core_on_chip) for device in laid[others]])
        counts = [len(set(places[:, dimension])) for dimension in range(places.shape[1])]
        whole = [*topology.shape, *[1] * 3][:3]
        along = [
            Line(count, dimension < 3 and wrap[dimension] and count == whole[dimension])
            for dimension, count in enumerate(counts)
            if count > 1
        ]
        found.append((axis, tuple(along)))
    return tuple(found)


def seconds(topology: Topology, mesh: Mapping[str, int], exchange: Exchange) -> float:
    """How long the links of a device take for what it sends, by the best algorithm of a torus.

    A ring goes both ways round where links do, and along all dimensions at once. In an all-to-all, bytes go past a
    quarter of the devices of a ring on average, and half of those of a line go through its middle. Devices of one chip
    share its links.

    Raises:
      SettingsError: something goes between slices of a chip whose network is not published.
    """
    chip = topology.chip
    if exchange.axes is not None and "slice" in exchange.axes:
        if chip.device_network is None:
            network = f"no bandwidth of {chip.name}'s data centre network is published"
            raise SettingsError(f"topology={topology.name!r}: {network}; use one slice")
        return exchange.sent / chip.device_network
    axes = [axis for axis in mesh if axis != "slice"] if exchange.axes is None else exchange.axes
    along = [line for axis in axes for line in lines(topology, mesh)[axis]]
    if not along:
        return 0.0
    link = chip.link / chip.devices
    ring = exchange.sent / (link * sum(2 if line.wraps else 1 for line in along))
    if exchange.kind not in ALL_TO_ALL:
        return ring
    group = math.prod(line.size for line in along)
    whole = exchange.sent * group / max(group - 1, 1)
    return max(ring, *(whole * line.size / (8 if line.wraps else 4) / link for line in along))
