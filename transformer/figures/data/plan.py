"""What one device of a mesh holds, in training and in decoding, and what it sends in a training step."""

import dataclasses
import functools
import math
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from transformer import axes as ax
from transformer import config, settings, sharding
from transformer.figures.data import placement, published
from transformer.nn.model import Transformer
from transformer.ops import cache as caches
from transformer.planning import traffic
from transformer.planning.accounting import BYTES
from transformer.planning.collectives import by_axes, collectives
from transformer.training.meshes import random_batch
from transformer.training.state import abstract_state
from transformer.training.step import compile_train_step

# GiB of a device, as Google's pages of each chip say (cloud.google.com/tpu/docs); of TPU7x a device is half a chip.
HBM = {"v5e": 16, "v6e": 32, "v5p": 95, "TPU7x": 96}


def training(reference: str, moments_dtype: str = "float32", **mesh: int) -> dict[str, int]:
    """Bytes that a device holds between and during steps: parameters and gradients in float32, AdamW's two moments.

    Activations come on top; how many depends on the batch and on remat.

    Raises:
      ShardingError: the mesh can't split the model.
    """
    numbers = _parameters(reference, "default", mesh)
    held = {"parameters": "float32", "gradients": "float32", "first moment": moments_dtype}
    return {name: numbers * BYTES[dtype] for name, dtype in (held | {"second moment": moments_dtype}).items()}


def decoding(
    reference: str, rows: int, length: int, dtype: str = "bfloat16", cache_dtype: str = "bfloat16", **mesh: int
) -> dict[str, int]:
    """Bytes that a device holds to decode `rows` texts of `length` tokens: weights and cache.

    Raises:
      ShardingError: the mesh can't split the model, its heads or the rows.
    """
    stack, abstract = published.model(reference).decoder, _abstract(mesh)
    held = 0
    for layer in jax.tree.leaves(_cache(stack, rows, length, cache_dtype), is_leaf=_is_cache):
        for name in ("keys", "values", "key_scales", "value_scales"):
            if (array := getattr(layer, name)) is not None:
                lead = (ax.LAYERS,) * (layer.positions.ndim - 2)
                names = (*lead, ax.BATCH, ax.ACT_HEADS, *[None] * (array.ndim - len(lead) - 2))
                spec = sharding.partition_spec(names, array.shape, abstract, "decode", name)
                held += array.size * array.dtype.itemsize // _ways(spec, mesh)
    return {"weights": _parameters(reference, "decode", mesh) * BYTES[dtype], "cache": held}


def _cache(stack, rows: int, length: int, dtype: str):
    return jax.eval_shape(lambda: caches.init(stack, rows, length, dtype))


def _is_cache(x) -> bool:
    return isinstance(x, caches.KVCache)


def _parameters(reference: str, rules: str, mesh: dict[str, int]) -> int:
    """Numbers of the shards that a device has."""
    total, abstract = 0, _abstract(mesh)
    for path, (names, shape) in placement.arrays(reference).items():
        if path not in placement.ACTIVATIONS:
            spec = sharding.partition_spec(names, shape, abstract, rules, path)
            total += math.prod(shape) // _ways(spec, mesh)
    return total


def _abstract(mesh: dict[str, int]) -> AbstractMesh:
    sizes = dataclasses.asdict(settings.Mesh(**{"data": 1, **mesh}))
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def _ways(spec: PartitionSpec, mesh: dict[str, int]) -> int:
    axes = [axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)]
    return math.prod(mesh[axis] for axis in axes)


def sent(reference: str, rows: int, length: int, **mesh: int) -> dict[str, float]:
    """Bytes that a device must send in a training step in bfloat16, by purpose (`planning.traffic`)."""
    model = Transformer(published.model(reference), settings.Compute(dtype="bfloat16", experts="capacity"))
    return traffic.expected(model, rows, length, mesh)


@dataclass(frozen=True)
class Sent:
    """What a device sends in one training step, in bytes.

    Attributes:
      by_axis: of the compiled program, by mesh axes ("fsdp", "data, fsdp" …) and kind of collective.
      compiled: the same, by purpose.
      expected: by purpose, from shapes alone.
    """

    by_axis: dict[tuple[str, str], float]
    compiled: dict[str, float]
    expected: dict[str, float]


@functools.cache
def compiled(reference: str = "llama3:tiny", rows: int = 16, length: int = 64, **mesh: int) -> Sent:
    """What the compiled training step of a small model sends, on as many of the host's devices as `mesh` has.

    Raises:
      ValueError: the host has fewer.
    """
    count, devices = math.prod(mesh.values()), jax.devices("cpu")
    if len(devices) < count:
        told = f'jax.config.update("jax_num_cpu_devices", {count}) before JAX is used'
        raise ValueError(f"mesh={mesh}: {count} devices, and the host has {len(devices)}; call {told}")
    values = config.load_config(reference).to_dict()
    values["data"] |= dict(seq_len=length, batch_size=rows)
    values["compute"] |= dict(attention="reference", experts="capacity")
    values["mesh"] |= {"data": 1, **mesh}
    run = config.resolve(values)
    there = sharding.make_mesh(run.settings.mesh, devices[:count])
    model = Transformer(run.spec, run.settings.compute)
    state, place = abstract_state(model, run.settings, there), sharding.batch_sharding(there)
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for name, x in random_batch(run).items()}
    with jax.set_mesh(there):
        text = compile_train_step(model, run.settings).lower(state, batch).compile().as_text()
    found = collectives(text, there.shape)
    by_axis = {(", ".join(axes or ("?",)), kind): sent for (axes, kind), sent in by_axes(found).items()}
    return Sent(by_axis, traffic.measured(found), traffic.expected(model, rows, length, mesh, traffic.CPU))
