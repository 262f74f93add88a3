"""Bytes of a device's memory while it reads prompts or decodes, by part; nothing is compiled.

Parameters and the cache are in the dtype of the activations, as `transformer.programs` has them.
"""

import math
from collections.abc import Mapping

from transformer import axes as ax
from transformer import sharding, spec
from transformer.planning import layers
from transformer.planning.accounting import BYTES
from transformer.planning.caches import CacheNumbers, cache_numbers
from transformer.planning.leaves import leaves, padded
from transformer.planning.report import Parts
from transformer.settings import Compute


def decode(
    model: spec.Model, compute: Compute, mesh: Mapping[str, int], rows: int, length: int, device_kind: str = ""
) -> Parts:
    """While one token of each row is decoded over a cache of `length` slots.

    Args:
      compute: its `rules` are those of decoding.
      mesh: sizes of the axes.
    """
    return _held(model, compute, mesh, rows, length, 1, device_kind)


def prefill(
    model: spec.Model, compute: Compute, mesh: Mapping[str, int], rows: int, length: int, device_kind: str = ""
) -> Parts:
    """While prompts of `length` tokens are read into a cache of as many slots. Arguments as of `decode`."""
    return _held(model, compute, mesh, rows, length, length, device_kind)


def _held(
    model: spec.Model, compute: Compute, mesh: Mapping[str, int], rows: int, length: int, new: int, device_kind: str
) -> Parts:
    rules, item = sharding.RULES[compute.rules], BYTES[compute.dtype]
    here = rows / math.prod(mesh.get(a, 1) for a in rules[ax.BATCH])
    share = layers.Share(
        tokens=here * new,
        source=here * length,
        width=model.d_model,
        tensor=mesh.get("tensor", 1),
        experts=mesh.get("expert", 1),
        context=1,
        gathered=math.prod(mesh.get(a, 1) for a in rules[ax.EMBED]) > 1,
        compute=compute,
        device_kind=device_kind,
    )
    needs = [layers.need(block, share) for block in set(model.decoder.layers)]
    columns = 0 if model.head is None else model.vocab_size / share.tensor
    # Multi-token prediction isn't asked, and its parameters don't come to the device.
    used = [leaf for leaf in leaves(model) if leaf.path[0] != "mtp"]
    weights = max(layers.gathered_weights(block, share) for block in set(model.decoder.layers))
    table = columns * model.d_model * item if share.gathered else 0
    return Parts(
        parameters=sum(padded(leaf.local(mesh, compute.rules), item) for leaf in used),
        activations={
            "layer": math.ceil(max(sum(n.kept.values()) + n.other for n in needs) + 2 * share.stream),
            "head": math.ceil(2 * here * columns * BYTES["float32"]),
        },
        cache=math.ceil(here * _cache(cache_numbers(model, length), model, share, compute.dtype)),
        buffers=math.ceil(max(weights, table) + max(n.rows for n in needs)),
    )


def _cache(numbers: CacheNumbers, model: spec.Model, share: layers.Share, dtype: str) -> float:
    """Bytes of a row, and of its slots' positions; heads are split over the tensor axis, the one of latents isn't."""
    latent = any(isinstance(block.mixer, spec.LatentAttention) for block in model.decoder.layers)
    return numbers.bytes(dtype) / (1 if latent else share.tensor) + sum(numbers.slots) * BYTES["float32"]
