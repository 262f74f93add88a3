"""Bytes of a device's memory, by part, from the spec, the settings and the sizes of the mesh; nothing is compiled.

The worst moment of a training step is looked for among those that can be it: the loss, the backward pass of each part
of a stack, and the end, when all gradients are there. What the TPU compiler made of such steps is in docs/estimates.md.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from transformer import axes as ax
from transformer import sharding, spec
from transformer.planning import layers
from transformer.planning.accounting import BYTES
from transformer.planning.leaves import leaves, padded
from transformer.planning.moments import kept
from transformer.planning.report import Parts
from transformer.settings import Settings

FLOAT32 = BYTES["float32"]
# A row of a batch: tokens, targets, the bytes they stand for, segments, positions, weights; and of a source: three.
BATCH, SOURCE = 6 * 4, 3 * 4
# Counts of steps (of the state, the moments and the schedule), and what is watched for steps to be skipped.
SCALARS = 8


def arguments(
    model: spec.Model, settings: Settings, mesh: Mapping[str, int], rows: int, length: int, source: int | None = None
) -> int:
    """Bytes of the state and the batch that a device holds before a training step, in the layouts that it has.

    Arguments as of `train`.
    """
    rules = settings.compute.rules
    total = SCALARS * padded(()) + _beside(model, settings, mesh)
    total += sum(padded(leaf.local(mesh, rules)) for leaf in leaves(model))
    ways = math.prod(mesh.get(a, 1) for a in sharding.RULES[rules][ax.BATCH])
    parts = math.prod(mesh.get(a, 1) for a in sharding.RULES[rules][ax.LENGTH])
    total += BATCH // 4 * padded((rows // ways, length // parts))
    return total + (SOURCE // 4 * padded((rows // ways, (source or length) // parts)) if model.trunk.crosses else 0)


def _beside(model: spec.Model, settings: Settings, mesh: Mapping[str, int]) -> int:
    """Bytes of what the optimiser keeps on a device."""
    return sum(k.bytes(mesh, settings.compute.rules) for k in kept(model, settings.optimizer))


def train(
    model: spec.Model,
    settings: Settings,
    mesh: Mapping[str, int],
    rows: int,
    length: int,
    source: int | None = None,
    device_kind: str = "",
) -> Parts:
    """What of a device's memory is for what at the worst moment of a training step.

    Args:
      mesh: sizes of the axes.
      rows, length: of the step, on all devices and in all microbatches.
      source: tokens of the rows that an encoder reads; by default as many.
    """
    return max(_moments(_Step(model, settings, dict(mesh), rows, length, source, device_kind)), key=lambda p: p.total)


class _Step:
    """The sizes that all moments share."""

    def __init__(self, model, settings: Settings, mesh: dict[str, int], rows, length, source, device_kind):
        compute, rules = settings.compute, sharding.RULES[settings.compute.rules]
        self.model, self.settings, self.mesh = model, settings, mesh
        split = math.prod(mesh.get(a, 1) for a in (*rules[ax.BATCH], *rules[ax.LENGTH]))
        tokens = rows * length / split / settings.train.accumulate
        self.item = BYTES[compute.dtype]
        self.share = layers.Share(
            tokens=tokens,
            source=tokens * (source or length) / length,
            width=model.d_model,
            tensor=mesh.get("tensor", 1),
            experts=mesh.get("expert", 1),
            context=mesh.get("context", 1),
            gathered=math.prod(mesh.get(a, 1) for a in rules[ax.EMBED]) > 1,
            compute=compute,
            device_kind=device_kind,
        )
        self.numbers: dict[tuple[str, ...], int] = {}
        for leaf in leaves(model):
            key = self._part(leaf.path)
            self.numbers[key] = self.numbers.get(key, 0) + padded(leaf.local(mesh, compute.rules), 1)
        self.batch = BATCH * rows * length / split + (SOURCE * rows * (source or length) / split) * (
            len(model.stacks) > 1
        )

    @staticmethod
    def _part(path: tuple[str, ...]) -> tuple[str, ...]:
        """Of a stack, which of its parts, without the number of the layer; of anything else the first name."""
        depth = 3 if path[0] == "mtp" else 1
        if len(path) <= depth or path[depth - 1] not in ("encoder", "decoder"):
            return path[:depth]
        return *path[:depth], path[depth].split("_")[0]

    def count(self, *path: str) -> int:
        """Numbers on a device of the parameters below a path."""
        return sum(n for key, n in self.numbers.items() if key[: len(path)] == path)

    @property
    def held(self) -> Parts:
        """What is there all the time."""
        train, own, moments = self.settings.train, self.count(), _beside(self.model, self.settings, self.mesh)
        summed = own * BYTES[train.accumulate_dtype] if train.accumulate > 1 else 0
        return Parts(parameters=own * FLOAT32, optimizer=moments, gradients=summed, buffers=math.ceil(self.batch))

    def stretches(self) -> Iterator["_Stretch"]:
        """The parts of all stacks in the order of the forward pass."""
        for name, stack in self.model.stacks.items():
            yield from self._of_stack((name,), stack, source=name == "encoder")
        if self.model.mtp is not None:
            for depth in range(self.model.mtp.depth):
                yield from self._of_stack(("mtp", f"depth_{depth}", "decoder"), self.model.mtp.decoder)

    def _of_stack(self, path: tuple[str, ...], stack: spec.Stack, source: bool = False) -> Iterator["_Stretch"]:
        share = replace(self.share, tokens=self.share.source) if source else self.share
        for block in stack.head:
            yield _Stretch((*path, "head"), (block,), 1, share)
        if stack.repeats:
            yield _Stretch((*path, "body"), stack.body, stack.repeats, share)
        for block in stack.tail:
            yield _Stretch((*path, "tail"), (block,), 1, share)


@dataclass(frozen=True)
class _Stretch:
    """Blocks that are computed again together, and how often they come."""

    path: tuple[str, ...]
    blocks: tuple[spec.Block, ...]
    repeats: int
    share: layers.Share

    def saved(self) -> dict[str, float]:
        """Bytes by point that are kept for the backward pass, the input under "residual"."""
        total = {"residual": self.share.stream * self.repeats}
        for block in self.blocks:
            for name, size in layers.saved(block, self.share).items():
                total[name] = total.get(name, 0) + size * self.repeats
        return total


def _moments(step: _Step) -> Iterator[Parts]:
    """What is held at each of the moments that may be the worst."""
    held, stretches = step.held, list(step.stretches())
    points_of = [stretch.saved() for stretch in stretches]
    # Weights of a body in the dtype of the products, of all repeats at once: made before the loop that uses them.
    cast = sum(step.count(*s.path) * step.item for s in stretches if s.repeats > 1 and step.item < FLOAT32)
    gradients, stream = _head_gradient(step), 3 * step.share.stream
    yield _with(held, gradients, _sum(points_of), head=_loss(step), buffers=cast)
    done = 0
    for index in reversed(range(len(stretches))):
        stretch = stretches[index]
        done += step.count(*stretch.path) * FLOAT32 // _shared(stretches, stretch)
        need = layers.pattern(stretch.blocks, stretch.share)
        again = _again(stretch, need)
        points = _sum(points_of[: index + 1])
        layer = stream + again + need.backward
        rows = need.rows + need.rows_backward
        yield _with(held, gradients + done, points, layer=layer, buffers=cast + need.weights + rows)
    rows = step.share.tokens * step.share.width * FLOAT32
    yield _with(held, step.count() * FLOAT32, {}, layer=2 * rows)


def _shared(stretches: list[_Stretch], stretch: _Stretch) -> int:
    """How many stretches have their parameters counted together."""
    return sum(other.path == stretch.path for other in stretches)


def _again(stretch: _Stretch, need: layers.Need) -> float:
    """Bytes that are made for the backward pass of a stretch, what was kept of it not among them."""
    there = stretch.saved()
    made = {name: size for name, size in need.kept.items() if not there.get(name)}
    if stretch.share.compute.remat == "none":
        return (sum(there.values()) - stretch.share.stream * stretch.repeats) / stretch.repeats
    return sum(made.values()) + need.other


def _with(held: Parts, gradients: float, points: dict[str, float], *, buffers: float = 0, **more: float) -> Parts:
    activations = {name: math.ceil(size) for name, size in {**points, **more}.items() if size}
    return replace(
        held,
        gradients=held.gradients + math.ceil(gradients),
        activations=activations,
        buffers=held.buffers + math.ceil(buffers),
    )


def _sum(points: list[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for some in points:
        for name, size in some.items():
            total[name] = total.get(name, 0) + size
    return total


def _table(step: _Step) -> int:
    """Numbers on a device of what is scored against."""
    head = step.model.head
    return 0 if head is None else step.count("embedding" if head.tied else "head")


def _head_gradient(step: _Step) -> float:
    """Of the table of the head, in the dtype of the products until it is used."""
    return _table(step) * step.item


def _loss(step: _Step) -> float:
    """A chunk of logits, the table and its gradient, which is summed in float32, and the stream.

    The chunk's gradient is made where it is multiplied: the compiler has no array of it.
    """
    share, compute = step.share, step.settings.compute
    if step.model.head is None:
        return 3 * share.stream
    part = -(-step.model.vocab_size // share.tensor)
    table = share.width * (FLOAT32 + step.item)
    return part * (min(share.tokens, compute.loss_chunk) * FLOAT32 + table) + 3 * share.stream
