"""Objectives that hide a part of a text: single tokens or words, and spans."""

import itertools
import re

import numpy as np

from transformer.settings import Data, check
from transformer.tokenizer import Tokenizer
from transformer.training.examples import Example, Shape, behind, cut, needed

# Letters and digits that belong together, one ideograph or kana, or one other sign; spaces go with what follows.
_ALONE = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"\s*(?:[{_ALONE}]|[^\W{_ALONE}]+|[^\w\s]|$)")


def word_numbers(text: str, sizes: np.ndarray) -> np.ndarray:
    """The number of the word that each token of `text` belongs to, by its last byte: int [L].

    Args:
      sizes: [L] UTF-8 bytes that each token accounts for.
    """
    starts = [match.start() for match in _WORD.finditer(text)]
    widths = np.asarray([len(text[a:b].encode()) for a, b in itertools.pairwise(starts)], int)
    begins = np.concatenate([[0], np.cumsum(widths)])
    return np.searchsorted(begins, np.maximum(np.cumsum(sizes) - 1, 0), side="right") - 1


class Masked:
    """Hidden tokens from those on both sides (BERT, Devlin et al. 2019, section 3.1).

    Of the picked tokens 80 % read as the mask, 10 % as a random token, and 10 % as they are. A piece of a document
    stands between cls and sep where the tokenizer has them; special tokens are never picked.
    """

    def __init__(self, data: Data, tokenizer: Tokenizer, shape: Shape):
        self.tokenizer, self.density, self.whole_word = tokenizer, data.noise_density, data.whole_word
        self.mask = needed(tokenizer.mask_id, "mask token", data, shape)
        self.before = [] if tokenizer.cls_id is None else [tokenizer.cls_id]
        self.after = [] if tokenizer.sep_id is None else [tokenizer.sep_id]
        self.room = data.seq_len - len(self.before) - len(self.after)
        check(self.room >= 1, "data.seq_len", data.seq_len, "a row needs room for a token beside cls and sep")
        self.lengths = {"columns": data.seq_len}
        self.text_ids = tokenizer.text_ids
        self.is_text = np.zeros(tokenizer.vocab_size, bool)
        self.is_text[self.text_ids] = True

    def pieces(self, item: str) -> list[np.ndarray]:
        """[L, 3] each: id, bytes, number of the word."""
        ids, sizes = self.tokenizer.encode_with_bytes(item)
        words = word_numbers(item, sizes) if self.whole_word else np.arange(len(ids))
        return cut(np.stack([ids, sizes, words], axis=1), self.room)

    def example(self, piece: np.ndarray, rng: np.random.Generator) -> Example:
        ids, sizes, words = piece.T
        picked = self.is_text[ids]
        picked &= np.isin(words, self._pick(words[picked], rng))
        read = np.where(picked, self._replace(ids, rng), ids)
        first, last = len(self.before), len(self.after)
        columns = np.zeros((first + len(ids) + last, 4), np.int32)
        columns[:, 0] = [*self.before, *read, *self.after]
        columns[:, 1] = [*self.before, *ids, *self.after]
        columns[first : first + len(ids), 2:] = np.stack([sizes * picked, picked], axis=1)
        return {"columns": columns}

    def _pick(self, words: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Words that hold `density` of the tokens: exactly so on average, since the last one is taken by chance."""
        numbers, sizes = np.unique(words, return_counts=True)
        order = rng.permutation(len(numbers))
        before = np.cumsum(sizes[order]) - sizes[order]
        return numbers[order[before + rng.random() * sizes[order] < self.density * len(words)]]

    def _replace(self, ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        chance, random = rng.random(len(ids)), rng.choice(self.text_ids, len(ids))
        return np.select([chance < 0.8, chance < 0.9], [self.mask, random], ids)


class Spans:
    """Hidden spans, each told by its sentinel, from what is left (T5, Raffel et al. 2020, section 3.1.4).

    The encoder reads the text with a sentinel in each span's place; the decoder writes each sentinel and its span. Both
    end with eos. As in T5's own preprocessing, visible and hidden spans take turns, from a visible to a hidden one,
    their lengths random, and pieces of documents are as long as lets the source fill its row.
    """

    def __init__(self, data: Data, tokenizer: Tokenizer, shape: Shape):
        self.tokenizer, self.density, self.mean_span = tokenizer, data.noise_density, data.mean_span
        self.start, self.end = shape.decoder_start, needed(tokenizer.eos_id, "end-of-sequence token", data, shape)
        needed(next(iter(tokenizer.sentinel_ids), None), "sentinel (<extra_id_0>)", data, shape)
        self.sentinels = np.asarray([i for i in tokenizer.sentinel_ids if i < shape.vocab_size], np.int32)
        room, self.piece = (data.seq_len, data.target_len or data.seq_len), 1
        while all(np.less_equal(self.row_lengths(self.piece + 1), room)):
            self.piece += 1
        name, value = ("seq_len", data.seq_len) if data.target_len is None else ("target_len", data.target_len)
        check(self.piece >= 2, f"data.{name}", value, "no text with a hidden span fits; use a longer row")
        target = data.target_len or self.row_lengths(self.piece)[1]
        self.lengths = {"columns": target, "source": data.seq_len}

    def counts(self, length: int) -> tuple[int, int]:
        """How many tokens of a text are hidden, and in how many spans."""
        hidden = min(max(round(length * self.density), 1), length - 1)
        return hidden, min(max(round(hidden / self.mean_span), 1), hidden, length - hidden, len(self.sentinels))

    def row_lengths(self, length: int) -> tuple[int, int]:
        """Tokens of the source and of the target that a text of `length` tokens becomes."""
        hidden, spans = self.counts(length)
        return length - hidden + spans + 1, hidden + spans + 1

    def pieces(self, item: str) -> list[np.ndarray]:
        """[L, 2] each: id and bytes."""
        return cut(np.stack(self.tokenizer.encode_with_bytes(item), axis=1), self.piece, shortest=2)

    def example(self, piece: np.ndarray, rng: np.random.Generator) -> Example:
        hidden, spans = self.counts(len(piece))
        lengths = np.stack([composition(len(piece) - hidden, spans, rng), composition(hidden, spans, rng)], axis=1)
        parts = np.split(piece, np.cumsum(lengths)[:-1])
        marks = [np.asarray([[sentinel, 0]]) for sentinel in self.sentinels[:spans]]
        end = [np.asarray([[self.end, 0]])]
        source = np.concatenate([part for pair in zip(parts[::2], marks, strict=True) for part in pair] + end)
        target = np.concatenate([part for pair in zip(marks, parts[1::2], strict=True) for part in pair] + end)
        return {"columns": behind(self.start, *target.T), "source": source[:, 0].astype(np.int32)}


def composition(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """`parts` positive numbers that sum to `total`, all such equally likely."""
    cuts = np.sort(rng.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=total)
