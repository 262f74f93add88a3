"""What is predicted of what: from a document, or a pair of texts, to examples.

An objective cuts a document into `pieces` that fit into a row, then makes an `example` of each, by chance or not.
"""

from typing import Any, Protocol

import numpy as np

from transformer.settings import Data, check
from transformer.tokenizer import Tokenizer
from transformer.training.denoising import Masked, Spans
from transformer.training.examples import Example, Shape, behind, cut, ended, needed, record, shifted, with_prefix


class Objective(Protocol):
    """How texts become examples.

    Attributes:
      lengths: the row's length of each array of an example.
    """

    lengths: dict[str, int]

    def pieces(self, item: Any) -> list[Any]:
        """What `example` takes, from a document or a pair; empty where nothing of it can be used."""
        ...

    def example(self, piece: Any, rng: np.random.Generator) -> Example:
        """One example, which fits."""
        ...


def make_objective(data: Data, tokenizer: Tokenizer, shape: Shape) -> Objective:
    """The objective that the settings name, for a model of that shape.

    Raises:
      SettingsError: it does not fit the model, the tokenizer lacks a token that it needs, or its rows are too short.
    """
    remedy = f"{shape} trains on {' or '.join(map(repr, shape.objectives))}"
    check(data.objective in shape.objectives, "data.objective", data.objective, remedy)
    two_sided, limit = shape.encoder and shape.decoder, shape.length_limit
    length = data.target_len
    check(two_sided or length is None, "data.target_len", length, f"{shape} has one row; leave it at None")
    remedy = f"the model's learned positions end at model.max_length={limit}; use a shorter row"
    check(length is None or limit is None or length <= limit, "data.target_len", length, remedy)
    kinds = {"causal": Causal, "masked": Masked, "spans": Spans, "prefix": Prefix, "pairs": Pairs}
    return kinds[data.objective](data, tokenizer, shape)


class Causal:
    """Every token from those before it. Documents fill rows without a gap, so a row's borders cut them."""

    def __init__(self, data: Data, tokenizer: Tokenizer, shape: Shape):
        self.tokenizer, self.lengths = tokenizer, {"columns": data.seq_len}

    def pieces(self, item: str) -> list[np.ndarray]:
        columns = record(item, self.tokenizer)
        return [columns] if len(columns) else []

    def example(self, piece: np.ndarray, rng: np.random.Generator) -> Example:
        return {"columns": piece}


class Prefix:
    """The rest of a text from its beginning, which is seen both ways (Raffel et al. 2020, section 3.2.1).

    Where a text is split is chosen evenly. In an encoder-decoder the beginning is the source, which ends with eos.
    """

    def __init__(self, data: Data, tokenizer: Tokenizer, shape: Shape):
        self.tokenizer, self.start = tokenizer, shape.decoder_start
        self.lengths, self.piece = {"columns": data.seq_len}, data.seq_len
        self.two_sided = shape.encoder
        if self.two_sided:
            self.end = needed(tokenizer.eos_id, "end-of-sequence token", data, shape)
            self.lengths = {"columns": data.target_len or data.seq_len, "source": data.seq_len}
            # So that either side fits, wherever the split is.
            self.piece = min(self.lengths["source"], self.lengths["columns"] + 1)

    def pieces(self, item: str) -> list[np.ndarray]:
        """Columns [L, 4] of a row, or for two sides [L, 2] of id and bytes."""
        if not self.two_sided:
            return cut(record(item, self.tokenizer), self.piece)
        text = ended(*self.tokenizer.encode_with_bytes(item), self.end)
        return cut(np.stack(text, axis=1), self.piece, shortest=2)

    def example(self, piece: np.ndarray, rng: np.random.Generator) -> Example:
        if not self.two_sided:
            return {"columns": with_prefix(piece, rng.integers(1, len(piece) + 1))}
        split = rng.integers(1, len(piece))
        source = np.append(piece[:split, 0], self.end).astype(np.int32)
        return {"columns": behind(self.start, *piece[split:].T), "source": source}


class Pairs:
    """A target text from a source text, either ended by eos.

    Without an encoder both stand in one row behind bos, if there is one, and the source is a prefix.
    """

    def __init__(self, data: Data, tokenizer: Tokenizer, shape: Shape):
        self.tokenizer, self.start = tokenizer, shape.decoder_start
        self.end = needed(tokenizer.eos_id, "end-of-sequence token", data, shape)
        self.two_sided = shape.encoder
        self.lengths = {"columns": data.seq_len}
        if self.two_sided:
            self.lengths = {"columns": data.target_len or data.seq_len, "source": data.seq_len}

    def pieces(self, item: tuple[str, str]) -> list[Example]:
        """The example itself, unless it is too long for a row."""
        source, target = (ended(*self.tokenizer.encode_with_bytes(text), self.end) for text in item)
        if self.two_sided:
            made = {"columns": behind(self.start, *target), "source": source[0].astype(np.int32)}
        else:
            ids, sizes = (np.concatenate(sides) for sides in zip(source, target, strict=True))
            first = self.tokenizer.bos_id
            columns, length = shifted(ids, sizes), len(source[0])
            if first is not None:
                columns, length = behind(first, ids, sizes), length + 1
            made = {"columns": with_prefix(columns, length)}
        return [made] if all(len(made[name]) <= length for name, length in self.lengths.items()) else []

    def example(self, piece: Example, rng: np.random.Generator) -> Example:
        return piece
