"""The parameters of a model as a mesh holds them: names and sizes of their axes, and the bytes of a device's part."""

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from transformer import sharding, spec
from transformer.nn import initial
from transformer.nn.model import Transformer
from transformer.settings import Compute

# Rows and columns of a tile of numbers of four bytes.
SUBLANES, LANES = 8, 128


@dataclass(frozen=True)
class Leaf:
    """A parameter: where it is, and the sizes and logical names of its axes."""

    path: tuple[str, ...]
    names: tuple[str, ...]
    shape: tuple[int, ...]

    def local(self, size: Mapping[str, int], rules: str) -> tuple[int, ...]:
        """Sizes of a device's part."""
        ways = (math.prod(size.get(a, 1) for a in sharding.RULES[rules][name]) for name in self.names)
        return tuple(-(-n // w) for n, w in zip(self.shape, ways, strict=True))


@functools.lru_cache(maxsize=64)
def leaves(model: spec.Model) -> tuple[Leaf, ...]:
    """All parameters, whatever the settings."""
    boxes = initial.abstract_params(Transformer(model, Compute(attention="reference", experts="dense")))
    found = jax.tree_util.tree_leaves_with_path(boxes, is_leaf=initial.is_named)
    return tuple(Leaf(tuple(str(getattr(k, "key", k)) for k in p), box.names, box.value.shape) for p, box in found)


def padded(shape: tuple[int, ...], item: int = 4) -> int:
    """Bytes of an array in the layout that wastes least: its last two axes, which may be any, come in tiles."""
    if len(shape) < 2:
        size = math.prod(shape)
        return _up(size, min(LANES * SUBLANES, max(LANES, 1 << (size - 1).bit_length()))) * item
    best = min(
        math.prod(shape) // (a * b) * _up(a, _tile(a)) * _up(b, LANES) for a, b in itertools.permutations(shape, 2)
    )
    return best * item


def _up(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _tile(size: int) -> int:
    """Rows of a tile, which are fewer where there aren't as many."""
    return min(SUBLANES, 1 << (size - 1).bit_length())
