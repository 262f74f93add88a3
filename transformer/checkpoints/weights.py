"""Parameters through a weight table, both ways: every tensor of theirs once, every leaf of ours once."""

import itertools
import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import einops
import jax
import numpy as np

from transformer.checkpoints.table import Row, Table, places
from transformer.checkpoints.tensors import CheckpointError, TensorFiles
from transformer.spec import Model

log = logging.getLogger(__name__)

# Told the path of a leaf and how many more of its bytes are in place; they add up to its size when it is complete.
Tick = Callable[[str, int], None]


@dataclass(frozen=True)
class Link:
    """One tensor of theirs and the leaves of ours that it fills: (path, index of the slice) each."""

    row: Row
    name: str
    leaves: tuple[tuple[str, tuple[int, ...]], ...]


def links(table: Table, model: Model) -> Iterator[Link]:
    """Every tensor of a model, from its table and its spec."""
    for row in table.around:
        yield Link(row, row.name, tuple((path, ()) for path in row.paths))
    for rows, place in zip(table.layers, places(model), strict=True):
        at = () if place.index is None else (place.index,)
        for row in rows:
            for expert in range(row.experts or 1):
                index = (*at, expert) if row.experts else at
                name = row.name.replace("{i}", str(place.number)).replace("{e}", str(expert))
                yield Link(row, name, tuple((f"{place.prefix}/{path}", index) for path in row.paths))


def flatten(tree: dict) -> dict[str, jax.Array]:
    """Leaves by their "/"-separated path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def their_shape(link: Link, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Shape of a tensor of theirs, from the shapes of our leaves."""
    row = link.row
    parts = [list(shapes[path][len(index) :]) for path, index in link.leaves]
    if row.parts:
        parts[0][row.axis] = sum(row.parts)
    theirs, ours = row.pattern.split(" -> ")
    # An array without memory: every stride is 0.
    fused = np.broadcast_to(np.zeros(()), parts[0])
    return einops.rearrange(fused, f"{ours} -> {theirs}", **_inverse_sizes(row)).shape


def _inverse_sizes(row: Row) -> dict[str, int]:
    """Lengths that einops can't infer when the pattern runs right to left: those of axes that ours groups."""
    ours = row.pattern.split(" -> ")[1]
    return {name: size for name, size in row.sizes.items() if "(" in ours and name in ours}


def to_ours(row: Row, tensor: np.ndarray) -> list[np.ndarray]:
    """A tensor of theirs as the slices of our leaves, one a path."""
    fused = einops.rearrange(tensor, row.pattern, **row.sizes)
    if not row.parts:
        return [fused]
    return np.split(fused, list(itertools.accumulate(row.parts))[:-1], axis=row.axis)


def to_theirs(row: Row, slices: list[np.ndarray]) -> np.ndarray:
    """The slices of our leaves as one tensor of theirs: `to_ours` read right to left."""
    fused = np.concatenate(slices, axis=row.axis) if row.parts else slices[0]
    theirs, ours = row.pattern.split(" -> ")
    return einops.rearrange(fused, f"{ours} -> {theirs}", **_inverse_sizes(row))


def load(files: TensorFiles, table: Table, model: Model, like: dict, dtype: np.dtype, progress: Tick) -> dict:
    """Our parameters from their tensors, each read when a shard of ours needs it and placed there at once.

    Args:
      like: abstract parameters with the sharding of every leaf.
      progress: told of every tensor that is in place.

    Raises:
      CheckpointError: tensors without a leaf, leaves without a tensor, or shapes that differ, before anything is read
        but copies; or copies that differ.
    """
    found = list(links(table, model))
    names = _spelled(files, table, [link.name for link in found])
    shapes = {path: leaf.shape for path, leaf in flatten(like).items()}
    _check(files, table, found, names, shapes)
    _tell(files, table)
    sources: dict[str, dict[tuple[int, ...], tuple[Link, int]]] = {path: {} for path in shapes}
    for link in found:
        for part, (path, index) in enumerate(link.leaves):
            sources[path][index] = (link, part)

    def leaf(path, abstract):
        path = jax.tree_util.keystr(path, simple=True, separator="/")

        told, size = 0, abstract.size * abstract.dtype.itemsize
        here = math.prod(abstract.sharding.shard_shape(abstract.shape)) * len(abstract.sharding.addressable_devices)

        def placed(elements: int) -> None:
            nonlocal told
            # The last byte is told of when the array is made.
            more = min(size * elements // here, size - told - 1)
            told += more
            progress(path, more)

        def shard(where: tuple[slice, ...]) -> np.ndarray:
            return _shard(files, names, sources[path], abstract.shape, where, dtype, placed)

        made = jax.make_array_from_callback(abstract.shape, abstract.sharding, shard)
        progress(path, size - told)
        return made

    return jax.tree_util.tree_map_with_path(leaf, like)


def _shard(files, names, source, shape, where, dtype, placed) -> np.ndarray:
    """A region of one leaf: only the tensors that lie in it are read."""
    where = tuple(slice(*w.indices(size)) for w, size in zip(where, shape, strict=True))
    out = np.empty([len(range(w.start, w.stop)) for w in where], dtype)
    depth = len(next(iter(source)))
    for index, (link, part) in source.items():
        if all(w.start <= i < w.stop for i, w in zip(index, where, strict=False)):
            tensor = to_ours(link.row, files.read(names[link.name]))[part]
            at = tuple(i - w.start for i, w in zip(index, where, strict=False))
            out[at] = tensor[where[depth:]]  # rounds as it copies: a rounded tensor never lies beside it
            placed(out[at].size)
    return out


def _spelled(files: TensorFiles, table: Table, names: list[str]) -> dict[str, str]:
    """The table's names as the files spell them: whichever way finds most of them."""
    spellings = ({name: spell(name) for name in names} for spell in (str, *table.spellings))
    return max(spellings, key=lambda spelled: len(files.names.intersection(spelled.values())))


def _tell(files: TensorFiles, table: Table) -> None:
    """Says which parts of a checkpoint are not part of the model."""
    counts = {part: sum(bool(re.fullmatch(p, name)) for name in files.names) for part, p in table.left_out.items()}
    if any(counts.values()):
        parts = " and ".join(f"{part} ({count} tensors)" for part, count in counts.items() if count)
        log.warning("the model is read without %s, which are left out", parts)


def _check(files: TensorFiles, table: Table, found: list[Link], names: dict, shapes: dict) -> None:
    theirs, wanted = set(files.names), set(names.values())
    copies = {name: original for name, original in (table.copies | table.echoes).items() if name in theirs}
    theirs -= copies.keys()
    unknown = sorted(name for name in theirs - wanted if not table.is_ignored(name))
    missing = sorted(wanted - theirs)
    if unknown or missing:
        raise CheckpointError(
            f"the checkpoint doesn't fit its config.json: {len(missing)} tensors are missing{_some(missing)}, "
            f"{len(unknown)} are not known{_some(unknown)}"
        )
    filled = {path for link in found for path, _ in link.leaves}
    unmade, made_up = sorted(set(shapes) - filled), sorted(filled - set(shapes))
    if unmade or made_up:
        raise CheckpointError(
            f"the family's table doesn't fit its spec: {len(unmade)} parameters have no row{_some(unmade)}, "
            f"{len(made_up)} rows make no parameter{_some(made_up)}"
        )
    for link in found:
        files.check_kind(names[link.name])
        expected, shape = their_shape(link, shapes), files.shape(names[link.name])
        if tuple(shape) != tuple(expected):
            raise CheckpointError(f"{names[link.name]}: shape {tuple(shape)}, but config.json implies {expected}")
    for name, original in copies.items():
        if not np.array_equal(files.read(name), files.read(names[original])):
            raise CheckpointError(f"{name}: differs from {original}, with which this model shares it")


def _some(names: list[str], count: int = 4) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return f" [{', '.join(names[:count])}{more}]" if names else ""


def dump(params: dict, table: Table, model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """Their tensors from our parameters, one at a time, in the table's order; copies last."""
    leaves, found = flatten(params), {link.name: link for link in links(table, model)}
    for name, original in {**dict(zip(found, found, strict=True)), **table.copies}.items():
        link = found[original]
        yield name, np.ascontiguousarray(to_theirs(link.row, [np.asarray(leaves[p][i]) for p, i in link.leaves]))
