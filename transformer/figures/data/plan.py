"""What one device of a mesh holds, in training and in decoding, and what it sends in a training step."""

import functools
import math
from dataclasses import dataclass

import jax

from transformer import config, settings, sharding
from transformer.figures.data import published
from transformer.nn.model import Transformer
from transformer.planning import memory, serving, traffic
from transformer.planning.accounting import BYTES, parameters
from transformer.planning.chips import CHIPS, GIB
from transformer.planning.collectives import by_axes, collectives
from transformer.planning.report import Parts
from transformer.training.meshes import random_batch
from transformer.training.state import abstract_state
from transformer.training.step import compile_train_step

# GiB that a device of each chip has.
HBM = {chip.name: chip.capacity / chip.devices / GIB for chip in CHIPS.values()}
PARAMETER_BYTES = BYTES["float32"]  # of a parameter in training, whatever products are computed in
PARTS = ("parameters", "optimizer", "gradients", "activations", "cache", "buffers")


def training(reference: str, rows: int, length: int, remat: str = "full", **mesh: int) -> dict[str, int]:
    """Bytes of a device at the worst moment of a training step in bfloat16, by `PARTS` (`planning.memory`).

    Args:
      rows, length: of the step, on all devices.
      remat: of `settings.Compute`: what the backward pass computes again.
    """
    run = settings.Settings(compute=settings.Compute(dtype="bfloat16", remat=remat))
    return _parts(memory.train(published.model(reference), run, mesh, rows, length))


def decoding(reference: str, rows: int, length: int, **mesh: int) -> dict[str, int]:
    """Bytes of a device that decodes `rows` texts of `length` tokens in bfloat16, by `PARTS` (`planning.serving`)."""
    compute = settings.Compute(dtype="bfloat16", rules="decode")
    return _parts(serving.decode(published.model(reference), compute, mesh, rows, length))


def _parts(found: Parts) -> dict[str, int]:
    return {name: getattr(found, name) for name in PARTS} | {"activations": sum(found.activations.values())}


def count(reference: str) -> int:
    """Parameters of a model."""
    return parameters(published.model(reference)).total


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
