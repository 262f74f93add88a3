"""What a training step must send between devices, from the shapes of its parameters and its batch; and what it sends.

Bytes as in `collectives`: those that a device sends, by the least that a ring needs. What a step sends is of four
purposes:

- parameters: gathered over the axes that split both them and the batch, once forwards and once backwards;
- gradients: summed over all axes that split the batch, and scattered over those that split their parameter;
- activations: summed over the tensor axis, twice a layer forwards (behind each product whose summed axis is split) and
  as often backwards, and once each for the embedding and the head;
- tokens: change places with the features of the embedding, and travel to their experts.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax

from transformer import axes as ax
from transformer import sharding, spec
from transformer.nn import initial
from transformer.nn.model import Transformer
from transformer.nn.parameter import Named
from transformer.planning.accounting import BYTES
from transformer.planning.collectives import Collective

PURPOSES = ("parameters", "gradients", "activations", "tokens")


@dataclass(frozen=True)
class Compiler:
    """What a compiler makes of sums over devices.

    Attributes:
      scatters: a sum of which a device needs a part is a reduce-scatter; else an all-reduce, which sends twice as much.
      merges: the sum of sums over devices is one; else the products that share an input each have their own.
    """

    scatters: bool
    merges: bool


TPU = Compiler(scatters=True, merges=True)
CPU = Compiler(scatters=False, merges=False)


def measured(found: Iterable[Collective], rules: str = "default") -> dict[str, float]:
    """Bytes that a device sends for each purpose, told by the kind and the axes of each collective."""
    totals = dict.fromkeys(PURPOSES, 0.0)
    for c in found:
        if c.axes is None or not {*_of_batch(rules)}.issuperset(c.axes):
            purpose = "activations"
        elif c.kind in ("all-reduce", "reduce-scatter"):
            purpose = "gradients"
        else:
            # Ids of tokens are looked up by all that share a table.
            moves = c.kind in ("all-to-all", "ragged-all-to-all") or c.dtype.startswith(("s", "u"))
            purpose = "tokens" if moves else "parameters"
        totals[purpose] += c.total
    return totals


def expected(
    model: Transformer, rows: int, length: int, mesh: Mapping[str, int], compiler: Compiler = TPU
) -> dict[str, float]:
    """Bytes that a device sends for each purpose in a step on `rows` rows of `length` tokens, without accumulation.

    For decoders without remat and multi-token prediction; of mixtures, with `compute.experts="capacity"` and a tensor
    axis of 1.

    Args:
      mesh: sizes of the axes.
    """
    compute = model.compute
    size = {axis: mesh.get(axis, 1) for axis in sharding.MESH_AXES}
    of_rows = [axis for axis in _of_batch(compute.rules) if size[axis] > 1]
    totals = dict.fromkeys(PURPOSES, 0.0)
    for path, box in jax.tree_util.tree_leaves_with_path(initial.abstract_params(model), is_leaf=initial.is_named):
        for purpose, sent in _of_parameter(path[0].key, box, size, of_rows, model, compiler).items():
            totals[purpose] += sent
    tokens = rows * length / math.prod(size[axis] for axis in of_rows)
    numbers = tokens * model.spec.d_model
    tensor, item = size["tensor"], BYTES[compute.dtype]
    sums = sum(_sums(block, compiler) for block in model.spec.layers)
    totals["activations"] = numbers * (sums * item + 2 * BYTES["float32"]) * _ring(2, tensor)
    # The embedding's features, there and back, between those that share a table.
    shared = math.prod(size[a] for a in sharding.RULES[compute.rules][ax.EMBED] if a in of_rows)
    totals["tokens"] = 2 * numbers * item * _ring(1, shared) + tokens * BYTES["float32"] * (shared - 1)
    for block in model.spec.layers:
        if isinstance(block.ffn, spec.MoE):
            room = math.ceil(compute.expert_capacity * tokens * block.ffn.top_k / block.ffn.num_experts)
            slots = block.ffn.num_experts * min(room, tokens) * model.spec.d_model
            totals["tokens"] += 4 * slots * item * _ring(1, size["expert"])
    return totals


def _of_batch(rules: str) -> tuple[str, ...]:
    """Mesh axes along which devices have other tokens."""
    return sharding.RULES[rules][ax.BATCH] + sharding.RULES[rules][ax.LENGTH]


def _ring(times: int, ways: int) -> float:
    return times * (ways - 1) / ways


def _of_parameter(
    part: str, box: Named, size: Mapping[str, int], of_rows: list[str], model: Transformer, compiler: Compiler
) -> dict[str, float]:
    """Of one parameter: what its gathering sends and what summing its gradient does.

    Layers multiply, and sum, in the dtype of the activations; the table that is looked up isn't gathered at all, and
    what comes out of the loss is float32.
    """
    rules, item = model.compute.rules, BYTES[model.compute.dtype]
    splits = [axis for name in box.names for axis in sharding.RULES[rules][name] if size[axis] > 1]
    stays = [a for name in box.names if name == ax.EXPERTS for a in sharding.RULES[rules][name]]
    gathered = [axis for axis in splits if axis in of_rows and axis not in stays]
    summed = [axis for axis in of_rows if axis not in splits]
    here = box.value.size / math.prod(size[axis] for axis in splits)
    together, others = math.prod(size[a] for a in gathered), math.prod(size[a] for a in summed)
    in_stack = part in model.spec.stacks
    if part == "embedding":
        return {"gradients": here * BYTES["float32"] * _ring(2, others)}
    # What is gathered around experts is kept for the backward pass, as is the head, which the loss uses at once.
    gathers = here * (together - 1) * item * (2 if in_stack and not stays else 1)
    grad_item = item if in_stack else BYTES["float32"]
    # Around experts it is the code itself that gathers and scatters.
    if compiler.scatters or stays:
        scattered = here * (together - 1) + here * _ring(2, others)
    else:
        scattered = here * together * _ring(2, together * others)
    return {"parameters": gathers, "gradients": scattered * grad_item}


def _sums(block: spec.Block, compiler: Compiler) -> int:
    """All-reduces of a layer's activations over the tensor axis, forwards and backwards."""
    backwards = 2 if compiler.merges else 3 + (2 if getattr(block.ffn, "gated", False) else 1)
    return 2 + backwards
