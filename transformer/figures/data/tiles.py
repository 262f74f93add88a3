"""What a tiled attention kernel visits, how its softmax runs online, and what it moves."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from transformer import spec
from transformer.kernels import visits
from transformer.ops.attention import Call, Where, attend
from transformer.ops.attention.blocks import cut_rows, shown_blocks

SKIPPED = -1


@dataclass(frozen=True)
class Tiles:
    """A mask cut into tiles of `q_block` queries and `k_block` keys.

    Attributes:
      visible: [T, T] who may look at whom.
      order: [q_blocks, k_blocks] when the kernel visits a tile; `SKIPPED` where it never does.
      whole: [q_blocks, k_blocks] where every pair of a tile is visible.
    """

    q_block: int
    k_block: int
    visible: np.ndarray
    order: np.ndarray
    whole: np.ndarray

    @property
    def visited(self) -> int:
        """Number of tiles that the kernel loads and computes."""
        return int(np.sum(self.order != SKIPPED))


def tiles(mask: spec.Mask, length: int, q_block: int, k_block: int, segments: list[int] | None = None) -> Tiles:
    """The visits of the splash kernels to a row of `length` tokens, in `segments` (packed documents) if given.

    Raises:
      ValueError: blocks that don't divide the row, or not a segment a token.
    """
    if length % q_block or length % k_block:
        raise ValueError(f"length={length}: use a multiple of q_block={q_block} and k_block={k_block}")
    if segments is not None and len(segments) != length:
        raise ValueError(f"segments: {len(segments)} for length={length}; give one a token")
    positions, parts = jnp.arange(length)[None], None if segments is None else jnp.asarray(segments)[None]
    where, call = Where(positions, positions, parts, parts), Call(mask, 1.0, aligned=True)
    shown, bounded = shown_blocks(call, *cut_rows(where, q_block, k_block), (length, length))
    walk = visits.visits(shown, bounded)
    order = np.full(shown.shape, SKIPPED)
    codes = np.asarray(walk.codes[0])[: int(walk.steps)]
    for step, code in enumerate(codes[codes & visits.WORK != 0]):
        order[visits.outer(code), visits.inner(code)] = step
    visible = np.asarray(where.visible(mask))[0]
    cut = visible.reshape(length // q_block, q_block, length // k_block, k_block)
    return Tiles(q_block, k_block, visible, order, cut.all(axis=(1, 3)))


@dataclass(frozen=True)
class Online:
    """The state of one query's softmax after each tile of keys.

    Attributes:
      blocks: which key blocks it met, in order.
      scores: [steps, k_block] of the tile, -inf where hidden.
      top: [steps] largest score so far.
      fade: [steps] what the sums so far were multiplied by.
      total: [steps] sum of exp(score - top) so far.
      acc: [steps, H] the same sum of values; acc / total is the output so far.
      ordinary: [H] the output of the softmax over all keys at once, by `ops.attention.reference`.
    """

    blocks: np.ndarray
    scores: np.ndarray
    top: np.ndarray
    fade: np.ndarray
    total: np.ndarray
    acc: np.ndarray
    ordinary: np.ndarray

    @property
    def output(self) -> np.ndarray:
        """[steps, H] attention over the keys met so far; 0 where none of them was visible."""
        return self.acc / np.where(self.total > 0, self.total, 1.0)[:, None]

    @property
    def error(self) -> np.ndarray:
        """[steps]: largest difference of the output so far from the ordinary one."""
        return np.abs(self.output - self.ordinary).max(axis=-1)


def online(mask: spec.Mask, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, row: int, block: int) -> Online:
    """The running softmax of query `row` of q, k, v [T, H] over the tiles that the kernel visits.

    Milakov & Gimelshein 2018 (arXiv:1805.02867), as `ops.attention.blockwise` runs it.
    """
    cut = tiles(mask, len(q), block, block)
    visited = cut.order[row // block]
    blocks = np.flatnonzero(visited != SKIPPED)
    top, total, acc, steps = -np.inf, 0.0, np.zeros(v.shape[1]), []
    for i in blocks:
        keys = slice(i * block, (i + 1) * block)
        scores = np.where(cut.visible[row, keys], k[keys] @ q[row] * scale, -np.inf)
        new = max(top, scores.max())
        fade = np.exp(top - new) if np.isfinite(new) else 1.0
        weights = np.exp(scores - new) if np.isfinite(new) else np.zeros(block)
        total, acc, top = total * fade + weights.sum(), acc * fade + weights @ v[keys], new
        steps.append((scores, top, fade, total, acc))
    at, keys = jnp.array([[row]]), jnp.arange(len(k))[None]
    features = (jnp.asarray(x, jnp.float32)[None, :, None] for x in (q[[row]], k, v))
    ordinary = attend("reference", Call(mask, scale), *features, Where(at, keys))[0, 0, 0]
    return Online(blocks, *(np.array(column) for column in zip(*steps, strict=True)), np.asarray(ordinary))


@dataclass(frozen=True)
class Traffic:
    """Bytes that one head moves between HBM and the chip's own memory, by array, and its products' FLOPs.

    Attributes:
      standard: with whole matrices of scores S and weights P.
      unskipped: tile by tile, every tile visited: what standard attention computes.
      tiled: tile by tile, those that the mask hides whole skipped.
      flops: of q·k and p·v, by the same three names.
    """

    standard: dict[str, int]
    unskipped: dict[str, int]
    tiled: dict[str, int]
    flops: dict[str, int]


def traffic(mask: spec.Mask, length: int, head_dim: int, block: int, itemsize: int = 2, group: int = 1) -> Traffic:
    """Bytes of one key head with `group` query heads: standard attention keeps S and P whole, tiled attention neither.

    Standard attention writes and reads each T×T matrix once. Tiled attention loads a query block once, and the keys
    and values of every tile that it visits, for all query heads of the group together, as the splash kernels do.
    """
    cut = tiles(mask, length, block, block)
    side, square = length * head_dim * itemsize, length * length * itemsize

    def by_tiles(visited: int) -> dict[str, int]:
        loaded = group * side + visited * 2 * block * head_dim * itemsize
        return {"q, k, v": loaded, "S": 0, "P": 0, "o": group * side}

    computed = dict(standard=cut.order.size, unskipped=cut.order.size, tiled=cut.visited)
    return Traffic(
        standard={"q, k, v": side * (group + 2), "S": 2 * group * square, "P": 2 * group * square, "o": group * side},
        unskipped=by_tiles(cut.order.size),
        tiled=by_tiles(cut.visited),
        flops={way: 4 * group * block * block * head_dim * count for way, count in computed.items()},
    )
