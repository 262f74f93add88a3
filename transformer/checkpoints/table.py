"""A checkpoint's layout as a two-way table: a row is (our path, their name, einops pattern).

Read left to right a row imports, read right to left it exports; nothing is said twice.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from transformer.spec import Model, Stack


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tensor of theirs, one or more leaves of ours.

    Attributes:
      paths: our leaves, "/"-separated and relative to the table's `inside`; several where theirs is fused.
      name: their tensor, with {e} for an expert's number where they keep experts apart (our leaf stacks them first).
      pattern: einops pattern from their axes to ours; of a fused tensor, our leaves concatenated along `axis`.
      sizes: axis lengths that the pattern needs.
      axis, parts: where and into which lengths a fused tensor is cut, one part a path.
      experts: number of experts that {e} counts; 0 where the name has none.
    """

    paths: tuple[str, ...]
    name: str
    pattern: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    axis: int = 0
    parts: tuple[int, ...] = ()
    experts: int = 0

    def __post_init__(self):
        if len(self.paths) > 1 and len(self.parts) != len(self.paths):
            raise ValueError(f"row {self.name}: {len(self.paths)} paths need as many parts, got {self.parts}")


@dataclass(frozen=True)
class Spelling:
    """Another way in which some files write all names.

    Attributes:
      usual, other: the beginning that is replaced, and by what.
      endings: the same of endings.
    """

    usual: str = ""
    other: str = ""
    endings: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, name: str) -> str:
        """A name in this spelling."""
        if name.startswith(self.usual):
            name = self.other + name.removeprefix(self.usual)
        for usual, other in self.endings.items():
            if name.endswith(usual):
                return name.removesuffix(usual) + other
        return name


@dataclass(frozen=True, kw_only=True)
class Table:
    """All rows of a model.

    Attributes:
      around: rows outside the layers; paths from the root of the parameters.
      layers: rows of each layer in the order in which they run (encoder, decoder, multi-token prediction); paths within
        the block, {i} in names is its number in its stack.
      copies: tensors that repeat another one, by its name: equal or absent when read, and written.
      echoes: the same of those that only some files hold, which are not written.
      ignored: regular expressions of tensors that hold no parameters of their own (buffers, tied heads).
      left_out: parts of the checkpoint that are not part of the model, each a regular expression of its tensors;
        who reads such a file is told.
      spellings: other ways to write the names, of which a file has one throughout.
    """

    around: tuple[Row, ...]
    layers: tuple[tuple[Row, ...], ...]
    copies: Mapping[str, str] = field(default_factory=dict)
    echoes: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    spellings: tuple[Spelling, ...] = ()

    def is_ignored(self, name: str) -> bool:
        """True for a tensor that is left out on purpose."""
        return any(re.fullmatch(pattern, name) for pattern in (*self.ignored, *self.left_out.values()))


@dataclass(frozen=True)
class Place:
    """Where a layer's parameters lie in our tree.

    Attributes:
      index: where repeats are stacked.
      number: of the layer in its stack, that of theirs; modules of multi-token prediction go on behind the decoder.
    """

    prefix: str
    index: int | None
    number: int


def places(model: Model) -> Iterator[Place]:
    """The place of every layer of a model, in the order in which they run; those of multi-token prediction last."""
    for name, stack in model.stacks.items():
        yield from _places(stack, name, 0)
    for depth in range(model.mtp.depth if model.mtp else 0):
        first = model.decoder.num_layers + depth * model.mtp.decoder.num_layers
        yield from _places(model.mtp.decoder, f"mtp/depth_{depth}/decoder", first)


def _places(stack: Stack, root: str, first: int) -> Iterator[Place]:
    def parts() -> Iterator[tuple[str, int | None]]:
        for i in range(len(stack.head)):
            yield f"{root}/head_{i}", None
        for repeat in range(stack.repeats):
            for i in range(len(stack.body)):
                yield f"{root}/body/block_{i}", repeat
        for i in range(len(stack.tail)):
            yield f"{root}/tail_{i}", None

    for number, (prefix, index) in enumerate(parts(), start=first):
        yield Place(prefix, index, number)
