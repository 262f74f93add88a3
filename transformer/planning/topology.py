"""Slices of TPUs by name, and which meshes can be laid over them: all that can be known without a compiler.

    v5p:8x8x16      1,024 chips, a torus of three dimensions
    2*v5p:4x4x4     two slices of 64 chips, which a data centre's network joins along the mesh axis "slice"

Slices are those that Google Cloud offers: in two dimensions the listed ones; in three, some below a cube of 4x4x4, and
tori whose sizes are multiples of 4 (https://docs.cloud.google.com/tpu/docs/v4, …/v5e, …/v5p, …/v6e, …/tpu7x, read in
November 2026). Links go around in dimensions of whole rows (`Chip.row`): in three dimensions only where all are.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jax.experimental import mesh_utils

from transformer import settings
from transformer.planning import chips
from transformer.settings import SettingsError, check
from transformer.sharding import MESH_AXES, ShardingError

# Of one dimension less than three, all; of three, those below a cube.
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_SMALL = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
# Chips of the largest slice.
_MOST = {"v4": 4096, "v5p": 6144, "tpu7x": 9216}
# Chips whose two cores are one device only if asked.
_MEGACORE = ("v4", "v5p")
# Kinds of devices for which `jax.make_mesh` splits a physical axis over several of the mesh.
_SPLIT = ("TPU v5 lite",)


# Whether a mesh of these sizes, of all axes, can hold a model.
Holds = Callable[[Mapping[str, int]], bool]


@dataclass(frozen=True)
class Topology:
    """Equal slices of one kind of chip; `shape` and `chips` are of one slice, `devices` of all."""

    chip: chips.Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def name(self) -> str:
        """As `parse` reads it."""
        one = f"{self.chip.name}:{'x'.join(map(str, self.shape))}"
        return one if self.slices == 1 else f"{self.slices}*{one}"

    @property
    def chips(self) -> int:
        """Of one slice."""
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """Of all slices, as JAX counts them."""
        return self.chips * self.slices * self.chip.devices

    @property
    def accelerator(self) -> str:
        """Cloud's accelerator type of one slice: "v5p-128", "v6e-32"; other shapes of as many chips share it."""
        return f"{self.chip.accelerator}-{self.chips * self.chip.counted}"

    @property
    def wrap(self) -> tuple[bool, ...]:
        """Dimensions whose links go around."""
        whole = [size % self.chip.row == 0 for size in self.shape]
        return tuple(all(whole) for _ in whole) if len(whole) == 3 else tuple(whole)

    def places(self) -> list["Place"]:
        """Stand-ins for the devices of one slice, in the order in which JAX lists them."""
        coordinates = [tuple(reversed(at)) for at in itertools.product(*map(range, reversed((*self.shape, 1)[:3])))]
        pairs = itertools.product(coordinates, range(self.chip.devices))
        return [Place(i, self.chip.kind, at, core) for i, (at, core) in enumerate(pairs)]

    def describe(self) -> list[Any]:
        """The devices of this topology, from libtpu, which must be there (`compile.find_libtpu`)."""
        from jax.experimental import topologies

        options: dict[str, Any] = {"wrap": (*self.wrap, False)[:3]}
        if self.chip.name in _MEGACORE:
            options["chip_config_name"] = "megacore"
        if self.chips % 4 == 0:
            options["chips_per_host_bounds"] = (2, 2, 1)
        if self.slices > 1:
            options["num_slices"] = self.slices
        one = Topology(self.chip, self.shape).name
        return list(topologies.get_topology_desc(platform="tpu", topology_name=one, **options).devices)


@dataclass(frozen=True)
class Place:
    """What JAX asks of a device to lay a mesh over a torus."""

    id: int
    device_kind: str
    coords: tuple[int, ...]
    core_on_chip: int
    platform: str = "tpu"
    process_index: int = 0


def parse(name: str) -> Topology:
    """The topology of a name.

    Raises:
      SettingsError: an unknown chip, or a shape that isn't offered; the message has the nearest ones.
    """
    count, star, one = name.rpartition("*")
    check(not star or (count.isdigit() and int(count) > 0), "topology", name, "write slices as in 2*v5p:4x4x4")
    slices = int(count) if star else 1
    same = _of_accelerator(one, slices)
    check(not same, "topology", name, f"an accelerator type; name the shape of its torus: {' or '.join(same[:3])}")
    chip, shape = chips.of_topology(one)
    offered = list(_offered(chip))
    if shape not in offered:
        nearest = sorted(offered, key=lambda other: _far(shape, other))[:2]
        names = " or ".join(Topology(chip, other, slices).name for other in sorted(nearest, key=math.prod))
        raise SettingsError(f"topology={name!r}: no slice of {chip.name} has this shape; the nearest are {names}")
    return Topology(chip, shape, slices)


def _of_accelerator(name: str, slices: int) -> list[str]:
    """Slices that Cloud calls by this accelerator type; "v5e-16", as many say, is v5litepod-16."""
    kind, _, number = name.partition("-")
    of = [chip for chip in chips.CHIPS.values() if kind in (chip.name, chip.accelerator)]
    return [t.name for chip in of for t in offered(chip, slices) if t.accelerator == f"{chip.accelerator}-{number}"]


def _offered(chip: chips.Chip) -> Iterator[tuple[int, ...]]:
    if chip.dims == 2:
        yield from _FLAT
        return
    yield from _SMALL
    most = _MOST[chip.name] // 64
    for x, y in itertools.combinations_with_replacement(range(1, most + 1), 2):
        yield from ((4 * x, 4 * y, 4 * z) for z in range(y, most // (x * y) + 1))


def offered(chip: chips.Chip, slices: int = 1) -> list[Topology]:
    """All slices of a chip, the smallest first, those of a kind nearest to a cube first."""
    shapes = sorted(_offered(chip), key=lambda shape: (math.prod(shape), max(shape)))
    return [Topology(chip, shape, slices) for shape in shapes]


def _far(a: Sequence[int], b: Sequence[int]) -> float:
    """In chips before anything else, then in shape."""
    off = sum(abs(math.log2(x / y)) for x, y in zip(sorted(a), b, strict=True))
    return 4 * abs(math.log2(math.prod(a) / math.prod(b))) + off


def mesh_sizes(topology: Topology, asked: Mapping[str, int], holds: Holds = lambda sizes: True) -> dict[str, int]:
    """Sizes of all mesh axes: those asked for, the slices, 1 elsewhere; `data` takes what is left, or the axis of -1.

    Args:
      holds: what the nearest mesh must be, besides.

    Raises:
      SettingsError: an unknown axis, or a bad size.
      ShardingError: the sizes don't multiply to the devices, or can't be laid on the torus.
    """
    for axis in asked:
        check(axis in MESH_AXES, "mesh", dict(asked), f"{axis!r} is no axis; use some of {', '.join(MESH_AXES)}")
    check(asked.get("slice", topology.slices) == topology.slices, "mesh.slice", asked.get("slice"),
          f"{topology.name} has {topology.slices}")  # fmt: skip
    rest = {} if -1 in asked.values() or "data" in asked else {"data": -1}
    sizes = asdict(settings.Mesh(**{"data": 1, **asked, **rest, "slice": topology.slices}))
    known = math.prod(size for size in sizes.values() if size != -1)
    if topology.devices % known or (-1 not in sizes.values() and known != topology.devices):
        raise ShardingError(
            f"mesh={words(asked)}: sizes multiply to {known}, and {topology.name} has {topology.devices} devices; "
            f"{remedy(topology, asked, holds)}"
        )
    sizes = {axis: topology.devices // known if size == -1 else size for axis, size in sizes.items()}
    if not lies(topology, sizes):
        raise ShardingError(
            f"mesh={words(asked)}: each axis must be whole dimensions of the torus of {topology.name}"
            f"{' and its pairs of cores' * (topology.chip.devices > 1)}; {remedy(topology, asked, holds)}"
        )
    return sizes


def remedy(topology: Topology, asked: Mapping[str, int], holds: Holds) -> str:
    """Which mesh to take instead, in words."""
    near = nearest(topology, asked, holds)
    return f"the nearest mesh is {words(near)}" if near else f"no mesh of {topology.name} can hold this model"


def words(sizes: Mapping[str, int]) -> str:
    """Such as "fsdp=64,expert=16"."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "one device"


def lies(topology: Topology, sizes: Mapping[str, int]) -> bool:
    """True if JAX can lay a mesh of these sizes over each slice without splitting dimensions of its torus.

    JAX itself does not mind on v5e, nor on the smallest slices.
    """
    within = [sizes.get(axis, 1) for axis in MESH_AXES if axis != "slice"]
    if math.prod(within) * topology.slices != topology.devices or sizes.get("slice", 1) != topology.slices:
        return False
    if topology.chip.kind in _SPLIT:
        return True
    try:
        mesh_utils.create_device_mesh(within, topology.places())
    except NotImplementedError:
        return False
    return True


def meshes(topology: Topology, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """All meshes of a topology along some of the axes, `slice` apart, that lie on its torus."""

    def cut(devices: int, names: Sequence[str]) -> Iterator[dict[str, int]]:
        if not names:
            if devices == 1:
                yield {}
            return
        for size in (n for n in range(1, devices + 1) if devices % n == 0):
            yield from ({names[0]: size} | others for others in cut(devices // size, names[1:]))

    for sizes in cut(topology.devices // topology.slices, [axis for axis in axes if axis != "slice"]):
        whole = dict.fromkeys(MESH_AXES, 1) | sizes | {"slice": topology.slices}
        if lies(topology, whole):
            yield whole


def nearest(topology: Topology, asked: Mapping[str, int], holds: Holds) -> dict[str, int] | None:
    """The mesh that lies on the torus, `holds`, and whose sizes are closest to those asked for, if there is one."""
    wanted = [axis for axis in MESH_AXES if asked.get(axis, 1) != 1 and axis != "slice"]
    # One axis alone can take the whole torus; `data` and `fsdp` may take what those asked for leave.
    able = filter(holds, meshes(topology, dict.fromkeys(["data", "fsdp", *wanted])))
    return min(able, key=lambda sizes: far(sizes, asked), default=None)


def far(sizes: Mapping[str, int], asked: Mapping[str, int]) -> tuple[float, int]:
    """How many factors of two all axes are off together, those of -1 apart; and how many were added or left out."""
    pairs = [(sizes.get(axis, 1), asked.get(axis, 1)) for axis in MESH_AXES if axis != "slice"]
    off = sum(abs(math.log2(size / wanted)) for size, wanted in pairs if wanted != -1)
    return round(off, 6), sum((size == 1) != (wanted == 1) for size, wanted in pairs)
