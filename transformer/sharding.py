"""Where arrays lie: the device mesh, and the one table from logical axis names to mesh axes."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from transformer import axes as ax
from transformer import settings

MESH_AXES = tuple(f.name for f in dataclasses.fields(settings.Mesh))

_TRAINING: dict[str, tuple[str, ...]] = {
    ax.VOCAB: ("tensor",),
    ax.POSITION: (),
    ax.BUCKETS: (),
    ax.TYPES: (),
    ax.CLASSES: (),
    ax.EMBED: ("fsdp", "expert", "context"),
    ax.EMBED_OUT: (),
    ax.HEADS: ("tensor",),
    ax.KV_HEADS: ("tensor",),
    ax.HEAD_DIM: (),
    ax.MLP: ("tensor",),
    ax.EXPERTS: ("expert",),
    ax.EXPERT_EMBED: ("fsdp", "context"),
    ax.ROUTES: (),
    ax.LATENT: ("fsdp", "context"),
    ax.LATENT_OUT: (),
    ax.LAYERS: (),
    ax.NORM: (),
    ax.BATCH: ("slice", "data", "fsdp", "expert"),
    ax.LENGTH: ("context",),
    ax.STREAM_LENGTH: ("context",),
    ax.ACT_EMBED: (),
    ax.ACT_HEADS: ("tensor",),
    ax.ACT_MLP: ("tensor",),
    ax.ACT_VOCAB: ("tensor",),
}

# One preset serves data parallelism, FSDP, expert, context and tensor parallelism and their products: the sizes of the
# mesh choose. What is no expert's is split over the expert axis as over fsdp, and everything over the context axis too.
# Latents have too few features for that: 512, where a slice for such models has 1,024 devices.
# "sequence" splits the residual stream and its norms over the tensor axis as well, along the length: what a layer's
# devices add up is scattered, and gathered before the next layer (Korthikanti et al. 2022, arXiv:2205.05198, 4.2.2).
# Decoding has one token a row and no length to split: its rows are split over the context axis instead.
RULES: dict[str, dict[str, tuple[str, ...]]] = {
    "default": _TRAINING,
    "sequence": _TRAINING | {ax.STREAM_LENGTH: (*_TRAINING[ax.LENGTH], "tensor")},
    "decode": _TRAINING
    | {ax.BATCH: (*_TRAINING[ax.BATCH], *_TRAINING[ax.LENGTH]), ax.LENGTH: (), ax.STREAM_LENGTH: ()},
}


class ShardingError(ValueError):
    """A mesh can't be made or doesn't fit; the message names the axis, the sizes and the remedy."""


def make_mesh(sizes: settings.Mesh, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """A mesh over all devices (or the given ones) with axes `MESH_AXES`; -1 takes what is left.

    Several slices of TPUs are joined along the axis `slice`, which is the only one whose collectives leave a slice.
    On devices that know of no slices it is an axis like any other.

    Raises:
      ShardingError: the sizes don't multiply to the number of devices, or `slice` isn't the number of TPU slices.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = dataclasses.asdict(sizes)
    known = math.prod(size for size in shape.values() if size != -1)
    total = len(devices)
    if total % known:
        raise ShardingError(
            f"mesh={shape}: sizes multiply to {known}, which doesn't divide {total} devices; choose sizes that do"
        )
    shape = {name: total // known if size == -1 else size for name, size in shape.items()}
    if math.prod(shape.values()) != total:
        raise ShardingError(f"mesh={shape}: uses {math.prod(shape.values())} of {total} devices; set one axis to -1")
    slices, kinds = len({getattr(device, "slice_index", 0) for device in devices}), (AxisType.Auto,) * len(shape)
    if devices[0].platform == "tpu" and slices not in (1, shape["slice"]):
        raise ShardingError(f"mesh.slice={shape['slice']}: the devices are of {slices} slices; use mesh.slice={slices}")
    if 1 < slices == shape["slice"]:
        within, between = [1, *list(shape.values())[1:]], [slices] + [1] * (len(shape) - 1)
        joined = mesh_utils.create_hybrid_device_mesh(within, between, devices)
        return jax.sharding.Mesh(joined, tuple(shape), axis_types=kinds)
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=kinds, devices=devices)


def mesh_axes(
    name: str, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, rules: str = "default"
) -> tuple[str, ...]:
    """The mesh axes, those of size 1 left out, that split a logical axis."""
    return tuple(axis for axis in RULES[rules][name] if mesh.shape[axis] > 1)


def partition_spec(
    names: Sequence[str | None],
    shape: Sequence[int],
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    rules: str = "default",
    what: str = "array",
    reserved: Sequence[str] = (),
) -> PartitionSpec:
    """The mesh axes of an array whose dimensions carry logical `names`; mesh axes of size 1 are left out.

    Args:
      reserved: logical names; the mesh axes of the first split no dimension of another name, those of the second none
        of a name that is not before it, and so on.

    Raises:
      ShardingError: an unknown name, one mesh axis used for two dimensions, or a size that doesn't divide.
    """
    taken, entries = {}, []
    owners = {axis: owner for owner in reversed(reserved) for axis in RULES[rules][owner]}
    if len(names) != len(shape):
        raise ShardingError(f"{what}: {len(names)} axis names {tuple(names)} for shape {tuple(shape)}")
    for name, size in zip(names, shape, strict=True):
        if name is not None and name not in ax.ALL:
            raise ShardingError(f"{what}: unknown logical axis {name!r}; axes.py lists {sorted(ax.ALL)}")
        used = mesh_axes(name, mesh, rules) if name else ()
        used = tuple(axis for axis in used if owners.get(axis, name) == name)
        for axis in used:
            if axis in taken:
                raise ShardingError(f"{what}: axes {taken[axis]!r} and {name!r} both want mesh axis {axis!r}")
            taken[axis] = name
        ways = math.prod(mesh.shape[axis] for axis in used)
        if size % ways:
            raise ShardingError(
                f"{what}: {name}={size} can't be split {ways} ways over mesh axes {used}; "
                f"change mesh.{used[-1]} or the model's size"
            )
        entries.append(used if len(used) > 1 else used[0] if used else None)
    return PartitionSpec(*entries)


def constrain(
    x: jax.Array, names: Sequence[str | None], rules: str = "default", reserved: Sequence[str] = ()
) -> jax.Array:
    """Pins an activation to the mesh; the identity only where no mesh is set. `reserved` as of `partition_spec`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(names, x.shape, mesh, rules, "activation", reserved))


_WHOLE, _STREAM = (ax.BATCH, ax.LENGTH, ax.ACT_EMBED), (ax.BATCH, ax.STREAM_LENGTH, ax.ACT_EMBED)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def into_branch(x: jax.Array, rules: str = "default") -> jax.Array:
    """[B, T, D] of the residual stream, laid out for a branch that needs every token; gradients go the other way."""
    return constrain(x, _WHOLE, rules)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def into_stream(x: jax.Array, rules: str = "default") -> jax.Array:
    """[B, T, D] that a branch returns, laid out as the residual stream is; gradients go the other way."""
    return constrain(x, _STREAM, rules)


# The gradient of a constraint is laid out as its value: sums to be scattered would be kept whole on every device.
into_branch.defvjp(lambda x, rules: (into_branch(x, rules), None), lambda rules, _, d: (into_stream(alone(d), rules),))
into_stream.defvjp(lambda x, rules: (into_stream(x, rules), None), lambda rules, _, d: (into_branch(d, rules),))


def alone(x: jax.Array) -> jax.Array:
    """x, which TPU compilers make by itself: fused with sums and activations behind it, a product takes up to twice
    its time by their own estimates (docs/step.md)."""
    return jax.lax.optimization_barrier(x) if platform() == "tpu" else x


def varying_axes(x: jax.Array) -> tuple[str, ...]:
    """The mesh axes along which devices of a `jax.shard_map` hold different values, as far as is known.

    Sorted: JAX keeps a set of names, whose order is another in every Python process. Processes whose programs name axes
    in different orders are different programs, and wait for each other forever.
    """
    return tuple(sorted(jax.typeof(x).manual_axis_type.varying))


def ways(name: str, rules: str = "default") -> int:
    """Into how many parts the mesh in force splits a logical axis (1 where no mesh is set)."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in RULES[rules][name])


def token_axes(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, rules: str = "default") -> tuple[str, ...]:
    """The mesh axes, those of size 1 left out, along which devices have other tokens."""
    return (*mesh_axes(ax.BATCH, mesh, rules), *mesh_axes(ax.LENGTH, mesh, rules))


def platform() -> str:
    """Platform of the devices that the mesh in force spans, else of JAX's default ones."""
    device = _device_in_force()
    return jax.default_backend() if device is None else device.platform


def device_kind() -> str:
    """What `jax.Device.device_kind` is of the devices that the mesh in force spans, else of JAX's default ones."""
    device = _device_in_force()
    return jax.devices()[0].device_kind if device is None else device.device_kind


def _device_in_force():
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh.abstract_device


def batch_sharding(mesh: jax.sharding.Mesh, rules: str = "default") -> NamedSharding:
    """Sharding of [B, T] arrays of a batch."""
    rows, columns = (mesh_axes(name, mesh, rules) for name in (ax.BATCH, ax.LENGTH))
    return NamedSharding(mesh, PartitionSpec(rows or None, columns or None))


def check_length(name: str, length: int, mesh: jax.sharding.Mesh, halves: bool = False, rules: str = "default") -> None:
    """Raises `ShardingError` if rows of so many tokens, those of setting `name`, can't be split over the mesh.

    Args:
      halves: each device's part is made of two (`ops.zigzag`).
    """
    whole, stream = (math.prod(mesh.shape[axis] for axis in RULES[rules][n]) for n in (ax.LENGTH, ax.STREAM_LENGTH))
    parts = math.lcm(2 * whole if halves and whole > 1 else whole, stream)
    if length % parts:
        sizes = ", ".join(f"mesh.{axis}={mesh.shape[axis]}" for axis in mesh_axes(ax.STREAM_LENGTH, mesh, rules))
        raise ShardingError(
            f"{name}={length}: {sizes} cuts rows into {parts} parts; use a multiple of {parts} tokens or a smaller mesh"
        )


def check_batch(rows: int, mesh: jax.sharding.Mesh, rules: str = "default") -> None:
    """Raises `ShardingError` if a (micro)batch of `rows` can't be split over the mesh."""
    parts = int(np.prod([mesh.shape[axis] for axis in RULES[rules][ax.BATCH]]))
    if rows % parts:
        raise ShardingError(
            f"data.batch_size / train.accumulate={rows}: must divide over {parts} devices of mesh axes "
            f"{RULES[rules][ax.BATCH]}; use a multiple of {parts}"
        )
