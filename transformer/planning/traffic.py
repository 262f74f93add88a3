"""What a training step must send between devices, from the shapes of its parameters and its batch; and what it sends.

Bytes as in `collectives`: those that a device sends, by the least that a ring needs. What a step sends is of four
purposes:

- parameters: gathered over the axes that split both them and the batch, once forwards and once backwards;
- gradients: summed over all axes that split the batch, and scattered over those that split their parameter;
- activations: summed over the tensor axis, twice a layer forwards (behind each product whose summed axis is split) and
  as often backwards, and once each for the embedding and the head; keys and values that go round the context axis;
- tokens: change places with the features of the embedding, and travel to their experts.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from transformer import axes as ax
from transformer import sharding, spec
from transformer.nn.model import Transformer
from transformer.ops.experts import exchange
from transformer.planning.accounting import BYTES
from transformer.planning.collectives import Collective, sent
from transformer.planning.leaves import Leaf, leaves
from transformer.planning.report import PURPOSES, Exchange
from transformer.settings import Compute


@dataclass(frozen=True)
class Compiler:
    """What a compiler makes of sums over devices.

    Attributes:
      merges: the sum of sums over devices is one; else the products that share an input each have their own.
    """

    merges: bool


TPU = Compiler(merges=True)
CPU = Compiler(merges=False)


def measured(found: Iterable[Collective], rules: str = "default") -> dict[str, float]:
    """Bytes that a device sends for each purpose, told by the kind and the axes of each collective."""
    totals = dict.fromkeys(PURPOSES, 0.0)
    for c in found:
        totals[purpose(c, rules)] += c.total
    return totals


def purpose(c: Collective, rules: str = "default") -> str:
    """What a collective is for, told by its kind and axes."""
    of_keys = c.kind == "collective-permute" and c.axes == sharding.RULES[rules][ax.LENGTH]
    if c.axes is None or not {*_of_batch(rules)}.issuperset(c.axes) or of_keys:
        return "activations"
    if c.kind in ("all-reduce", "reduce-scatter"):
        return "gradients"
    # Ids of tokens are looked up by all that share a table.
    moves = c.kind in ("all-to-all", "ragged-all-to-all") or c.dtype.startswith(("s", "u"))
    return "tokens" if moves else "parameters"


def expected(
    model: Transformer, rows: int, length: int, mesh: Mapping[str, int], compiler: Compiler = TPU
) -> dict[str, float]:
    """Bytes that a device sends for each purpose: `exchanges`, summed."""
    totals = dict.fromkeys(PURPOSES, 0.0)
    for found in exchanges(model, rows, length, mesh, compiler=compiler):
        totals[found.purpose] += found.sent
    return totals


def exchanges(
    model: Transformer,
    rows: int,
    length: int,
    mesh: Mapping[str, int],
    accumulate: int = 1,
    compiler: Compiler = TPU,
    device_kind: str = "",
    training: bool = True,
) -> tuple[Exchange, ...]:
    """What a step on `rows` rows of `length` tokens must send, all of it while nothing else runs.

    Args:
      mesh: sizes of the axes.
      accumulate: microbatches, each of which gathers parameters and sums gradients for itself.
      device_kind: of the devices, which decides how tokens reach their experts.
      training: forwards and backwards; else forwards alone.
    """
    size = {axis: mesh.get(axis, 1) for axis in sharding.MESH_AXES}
    of_rows = [axis for axis in _of_batch(model.compute.rules) if size[axis] > 1]
    tokens = rows * length / accumulate / math.prod(size[axis] for axis in of_rows)
    found = []
    for leaf in leaves(model.spec):
        found += _of_parameter(leaf, size, of_rows, model, compiler, training)
    chunk = length / math.prod(size[axis] for axis in sharding.RULES[model.compute.rules][ax.LENGTH])
    found += _of_layers(model, tokens, size, compiler, device_kind, training)
    found += _of_keys(model, tokens, chunk, size, training)
    return _merged([replace(e, times=e.times * accumulate, operand=e.operand * accumulate) for e in found], size)


def _merged(found: Iterable[Exchange], size: Mapping[str, int]) -> tuple[Exchange, ...]:
    """One entry for each kind, axes and purpose, with what it sends; none of what is sent to nobody."""
    totals: dict[tuple, Exchange] = {}
    for e in found:
        ways = math.prod(size[axis] for axis in e.axes)
        if ways > 1 and e.operand:
            key, here = (e.kind, e.axes, e.purpose), sent(e.kind, e.operand, ways)
            old = totals.get(key, replace(e, times=0, operand=0.0, sent=0.0))
            totals[key] = replace(e, times=old.times + e.times, operand=old.operand + e.operand, sent=old.sent + here)
    return tuple(totals.values())


def _exchange(
    kind: str, axes: Iterable[str], purpose: str, operand: float, times: int = 1, pieces: int = 1
) -> Exchange:
    """`operand` bytes, `times` times, each in so many pieces; what is sent is filled in by `_merged`."""
    return Exchange(
        kind=kind, axes=tuple(axes), purpose=purpose, overlapped=False, times=times * pieces, operand=operand * times,
        sent=0.0,
    )  # fmt: skip


def _of_batch(rules: str) -> tuple[str, ...]:
    """Mesh axes along which devices have other tokens."""
    return sharding.RULES[rules][ax.BATCH] + sharding.RULES[rules][ax.LENGTH]


def _of_parameter(
    leaf: Leaf,
    size: Mapping[str, int],
    of_rows: list[str],
    model: Transformer,
    compiler: Compiler,
    training: bool,
) -> Iterator[Exchange]:
    """Of one parameter: what its gathering sends and what summing its gradient does.

    Layers and the loss multiply in the dtype of the activations, and sum in `compute.reduce_dtype`; for being looked
    up, a table isn't gathered at all.
    """
    rules, item, part = model.compute.rules, BYTES[model.compute.dtype], leaf.path[0]
    splits = [axis for name in leaf.names for axis in sharding.RULES[rules][name] if size[axis] > 1]
    stays = [a for name in leaf.names if name == ax.EXPERTS for a in sharding.RULES[rules][name]]
    gathered = [axis for axis in splits if axis in of_rows and axis not in stays]
    summed = [axis for axis in of_rows if axis not in splits]
    here = math.prod(leaf.shape) / math.prod(size[axis] for axis in splits)
    together, layers = math.prod(size[a] for a in gathered), leaf.shape[0] if ax.LAYERS in leaf.names else 1
    if not training:
        used = part not in ("embedding", "encoder", "mtp")
        yield _exchange("all-gather", gathered, "parameters", here * item * used, 1, layers)
        return
    if part == "embedding":
        yield from _summed(summed, here * BYTES["float32"])
        if not (model.spec.head and model.spec.head.tied and ax.VOCAB in leaf.names):
            return
        part = "head"
    in_stack = part not in ("head", "pooler")
    # Around experts it is the code itself that gathers, and keeps what it gathered unless it is told not to.
    twice = in_stack and (not stays or model.compute.remat != "none")
    depth = model.spec.mtp.depth if model.spec.mtp and part == "head" else 0
    yield _exchange("all-gather", gathered, "parameters", here * item, (1 + twice) * (1 + depth), layers)
    grad = here * BYTES[model.compute.reduce_dtype or model.compute.dtype]
    yield _exchange("reduce-scatter", gathered, "gradients", grad * together * (1 + depth), 1, layers)
    yield from _summed(summed, grad * (1 + depth), layers)


def _summed(axes: Iterable[str], operand: float, layers: int = 1) -> Iterator[Exchange]:
    """A sum that all devices of the axes get; within slices first, then between them."""
    for part in ([a for a in axes if a != "slice"], [a for a in axes if a == "slice"]):
        yield _exchange("all-reduce", part, "gradients", operand, 1, layers)


def _of_layers(
    model: Transformer,
    tokens: float,
    size: Mapping[str, int],
    compiler: Compiler,
    device_kind: str,
    training: bool,
) -> Iterator[Exchange]:
    """What is sent of the activations of `tokens` tokens, those of a device in a microbatch."""
    compute, item = model.compute, BYTES[model.compute.dtype]
    numbers, passes = tokens * model.spec.d_model, 1 if not training else 2 if compute.remat == "none" else 3
    further = model.spec.mtp.decoder.layers * model.spec.mtp.depth if model.spec.mtp and training else ()
    blocks = [*model.spec.layers, *further]
    sums = sum(_sums(block, compiler) if training else 2 + bool(block.cross) for block in blocks)
    yield _exchange("all-reduce", ["tensor"], "activations", numbers * item, sums)
    yield _exchange("all-reduce", ["tensor"], "activations", numbers * (BYTES["float32"] + training * item))
    # The embedding's features, there and back, between those that share a table; and before it the ids.
    of_batch = _of_batch(compute.rules)
    sharers = [a for a in sharding.RULES[compute.rules][ax.EMBED] if a in of_batch and size[a] > 1]
    along = [a for a in sharers if a in sharding.RULES[compute.rules][ax.LENGTH]]
    for axes in (along, [a for a in sharers if a not in along]):  # one dimension after the other
        yield _exchange("all-to-all", axes, "tokens", numbers * item, 1 + training)
    yield _exchange("all-gather", sharers, "tokens", tokens * BYTES["float32"])
    for block in blocks:
        if isinstance(block.ffn, spec.MoE):
            yield from _to_experts(block.ffn, model, tokens, size["expert"], passes, device_kind)


def _of_keys(
    model: Transformer, tokens: float, chunk: float, size: Mapping[str, int], training: bool
) -> Iterator[Exchange]:
    """Keys and values that go round the context axis, once a pass, and their gradients: which the ring sums in float32.

    A window that ends within the chunk before takes its tail alone (`ops.attention.context.plan`).
    """
    item, axes = BYTES[model.compute.dtype], sharding.RULES[model.compute.rules][ax.LENGTH]
    passes = 1 if not training else 2 if model.compute.remat == "none" else 3
    for block in model.spec.layers:
        window = block.mixer.mask.window
        tail = window is not None and window - 1 <= chunk
        hops = (window - 1) / chunk if tail else math.prod(size[axis] for axis in axes) - 1
        numbers = hops * tokens * _keys_and_values(block.mixer) / size["tensor"]
        back = numbers * BYTES[model.compute.dtype if tail else "float32"] * training
        yield _exchange("collective-permute", axes, "activations", numbers * item * passes + back)


def _keys_and_values(mixer: spec.Attention | spec.LatentAttention) -> int:
    """Numbers of a token that attention reads in training, which expands latents."""
    if isinstance(mixer, spec.LatentAttention):
        return mixer.num_heads * (mixer.nope_dim + mixer.rope_dim + mixer.v_dim)
    return mixer.cache_dims.numbers


def _to_experts(
    ffn: spec.MoE, model: Transformer, tokens: float, ways: int, passes: int, device_kind: str
) -> Iterator[Exchange]:
    """There and back in each pass."""
    compute, width = model.compute, model.spec.d_model * BYTES[model.compute.dtype]
    if compute.experts == "capacity":
        room = math.ceil(compute.expert_capacity * tokens * ffn.top_k / ffn.num_experts)
        slots = ffn.num_experts * min(room, tokens)
        yield _exchange("all-to-all", ["expert"], "tokens", slots * width, 2 * passes)
    elif expert_exchange(compute, tokens, ffn.top_k, ways, device_kind) == "all_gather":
        yield _exchange("all-gather", ["expert"], "tokens", tokens * width, passes)
        yield _exchange("reduce-scatter", ["expert"], "tokens", tokens * ways * width, passes)
    else:
        yield _exchange("ragged-all-to-all", ["expert"], "tokens", tokens * ffn.top_k * width, 2 * passes)


def expert_exchange(compute: Compute, tokens: float, top_k: int, ways: int, device_kind: str) -> str:
    """How tokens reach the experts of other devices: "all_to_all" or "all_gather"."""
    if compute.expert_exchange != "auto":
        return compute.expert_exchange
    without = device_kind in exchange.WITHOUT_RAGGED
    return "all_gather" if without else exchange.choose(math.ceil(tokens), top_k, ways)


def _sums(block: spec.Block, compiler: Compiler) -> int:
    """All-reduces of a layer's activations over the tensor axis, forwards and backwards."""
    backwards = 2 if compiler.merges else 3 + (2 if getattr(block.ffn, "gated", False) else 1)
    return 2 + backwards + (2 if block.cross else 0)
