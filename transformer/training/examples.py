"""Examples: what the objectives share.

An example is a dict of int32 arrays that fit into a row:

  "columns" [L, C]  the side that the head scores: token, target, target's bytes, weight and, in prefix models, order
  "source" [S]      what the encoder of an encoder-decoder reads
"""

from dataclasses import dataclass

import numpy as np

from transformer import spec
from transformer.settings import Data, check
from transformer.tokenizer import Tokenizer

Example = dict[str, np.ndarray]
COLUMNS = ("tokens", "targets", "target_bytes", "weights", "orders")


@dataclass(frozen=True)
class Shape:
    """What the data must know of a model: its stacks, its vocabulary, and what begins a decoded sequence."""

    encoder: bool
    decoder: bool
    vocab_size: int
    decoder_start: int | None = None
    length_limit: int | None = None

    @property
    def objectives(self) -> tuple[str, ...]:
        """The objectives that fit."""
        if not self.decoder:
            return ("masked",)
        return ("spans", "prefix", "pairs") if self.encoder else ("causal", "prefix", "pairs")

    def __str__(self) -> str:
        stacks = [name for name in ("encoder", "decoder") if getattr(self, name)]
        return f"a model of {' and '.join(stacks)}"


def shape_of(model: spec.Model) -> Shape:
    """The shape of a model."""
    stacks = model.encoder is not None, model.decoder is not None
    return Shape(*stacks, model.vocab_size, model.decoder_start, model.length_limit)


def needed(token: int | None, what: str, data: Data, shape: Shape) -> int:
    """A special id that the objective can't do without.

    Raises:
      SettingsError: the tokenizer has none, or the model has no embedding for it.
    """
    check(token is not None, "data.objective", data.objective, f"data.tokenizer={data.tokenizer!r} has no {what}")
    remedy = f'the {what} of data.objective="{data.objective}" is {token}; use {token + 1} or more'
    check(token < shape.vocab_size, "model.vocab_size", shape.vocab_size, remedy)
    return token


def cut(array: np.ndarray, length: int, shortest: int = 1) -> list[np.ndarray]:
    """`array` in pieces of `length`, the last one shorter and dropped if below `shortest`."""
    pieces = [array[i : i + length] for i in range(0, len(array), length)]
    return [piece for piece in pieces if len(piece) >= shortest]


def shifted(ids: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Columns [L - 1, 4] in which each token of a text [L] is the target of the one before it."""
    return np.stack([ids[:-1], ids[1:], sizes[1:], np.ones_like(ids[1:])], axis=1).astype(np.int32)


def behind(start: int, ids: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Columns [L, 4] of a decoder that writes a text [L] when it is told to start."""
    return shifted(np.append(start, ids), np.append(0, sizes))


def with_prefix(columns: np.ndarray, length: int) -> np.ndarray:
    """Columns [L, 5] of a row whose first `length` tokens see each other and are not scored.

    A key is visible if its order is at most the query's.
    """
    orders = np.maximum(np.arange(len(columns)), length - 1)
    scored = np.arange(len(columns)) >= length - 1
    columns = np.concatenate([columns, orders[:, None]], axis=1).astype(np.int32)
    columns[:, 2:4] *= scored[:, None]
    return columns


def ended(ids: np.ndarray, sizes: np.ndarray, end: int | None) -> tuple[np.ndarray, np.ndarray]:
    """A text's ids and bytes with the token that ends it, if there is such a token."""
    return (ids, sizes) if end is None else (np.append(ids, end), np.append(sizes, 0))


def record(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Columns [L, 4] of a document; bos and eos are added if there are such."""
    ids, sizes = ended(*tokenizer.encode_with_bytes(text), tokenizer.eos_id)
    return shifted(ids, sizes) if tokenizer.bos_id is None else behind(tokenizer.bos_id, ids, sizes)
