"""A SentencePiece model file (`.model`, of unigrams or BPE) behind the protocol of tokenizers.

Kudo and Richardson 2018 (arXiv:1808.06226); the file is the `sentencepiece` package's own.
"""

import functools
import hashlib
import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from transformer.settings import SettingsError
from transformer.tokenizer import json_beside, published_ends

_MARKED = {"cls": ("[CLS]", "<cls>"), "sep": ("[SEP]", "<sep>"), "mask": ("[MASK]", "<mask>")}
_SENTINEL = "<extra_id_{}>"


class SentencePieceTokenizer:
    """A SentencePiece `.model`; special ids are the file's own, and those that a tokenizer_config.json adds (T5).

    Special tokens spelled out in a text are text, unless the file lists them as user-defined.

    Args:
      published: it belongs to a published checkpoint: a text begins with BOS unless the tokenizer_config.json beside it
        says `"add_bos_token": false`, and ends at every `eos_token_id` of the generation_config.json beside it.

    Raises:
      SettingsError: the file is missing or no SentencePiece model, or the package `sentencepiece` is.
    """

    def __init__(self, path: str | Path, published: bool = False):
        name = f"data.tokenizer={str(path)!r}"
        try:
            processor = importlib.import_module("sentencepiece").SentencePieceProcessor
        except ImportError:
            remedy = "pip install sentencepiece (the extra [data] has it)"
            raise SettingsError(f"{name}: needs sentencepiece, which is not installed; {remedy}") from None
        try:
            content = Path(path).read_bytes()
            self._pieces = processor(model_proto=content)
        except OSError as error:
            raise SettingsError(f"{name}: can't be read ({error.strerror}); give a SentencePiece .model") from None
        except RuntimeError:
            raise SettingsError(
                f"{name}: not a SentencePiece model; give a .model file that sentencepiece wrote"
            ) from None
        self._sha256 = hashlib.sha256(content).hexdigest()
        config = _config_beside(Path(path), name)
        self._size = self._pieces.get_piece_size()
        # T5 puts its sentinels behind the pieces, the first one last.
        extra = config.get("extra_ids", 0)
        self.vocab_size = self._size + extra
        self.sentinel_ids = tuple(self.vocab_size - 1 - n for n in range(extra)) or self._listed_sentinels()
        found = {role: getattr(self._pieces, f"{role}_id")() for role in ("bos", "eos", "pad")}
        ids = {role: i if i >= 0 else None for role, i in found.items()}
        self.bos_id, self.eos_id, self.pad_id = ids["bos"], ids["eos"], ids["pad"]
        if published and not config.get("add_bos_token", True):
            self.bos_id = None
        ends = () if self.eos_id is None else (self.eos_id,)
        self.end_ids = (published_ends(Path(path)) or ends) if published else ends
        marked = {role: next(filter(self._has, names), None) for role, names in _MARKED.items()}
        ids = {role: None if piece is None else self._pieces.piece_to_id(piece) for role, piece in marked.items()}
        self.cls_id, self.sep_id, self.mask_id = ids["cls"], ids["sep"], ids["mask"]

    def _has(self, piece: str) -> bool:
        return self._pieces.id_to_piece(self._pieces.piece_to_id(piece)) == piece

    def _listed_sentinels(self) -> tuple[int, ...]:
        found = []
        while self._has(_SENTINEL.format(len(found))):
            found.append(self._pieces.piece_to_id(_SENTINEL.format(len(found))))
        return tuple(found)

    @functools.cached_property
    def text_ids(self) -> np.ndarray:
        """The ids that stand for text: int32, ascending, without special tokens."""
        pieces = self._pieces
        named = {self.cls_id, self.sep_id, self.mask_id, *self.sentinel_ids}
        special = (i in named or pieces.is_control(i) or pieces.is_unknown(i) or pieces.is_unused(i) for i in self._ids)
        return np.asarray([i for i, skip in zip(self._ids, special, strict=True) if not skip], np.int32)

    @property
    def _ids(self) -> range:
        return range(self._size)

    @property
    def identity(self) -> dict[str, Any]:
        """What tells this tokenizer from others: its file's content, and the special ids that may lie beside it."""
        ids = {"bos_id": self.bos_id, "eos_id": self.eos_id, "pad_id": self.pad_id}
        return {"kind": "sentencepiece", "sha256": self._sha256, "vocab_size": self.vocab_size, **ids}

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with no special token added."""
        return self._pieces.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`: special and unknown ids skipped, invalid UTF-8 replaced by U+FFFD."""
        return self._pieces.decode([i for i in map(int, ids) if i < self._size and not self._pieces.is_unknown(i)])

    def encode_with_bytes(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids of `text` and the UTF-8 bytes each accounts for: two int32 [L]; bytes sum to those of `text`."""
        found = self._pieces.encode(text, return_type="offset_mapping", return_bytes=True)
        ids = np.asarray(found["ids"], np.int32)
        if not ids.size:
            return ids, ids
        # Spaces that normalization drops lie between pieces: the one that follows has them.
        ends = np.maximum.accumulate([end for _, end in found["offsets"]])
        ends[-1] = len(text.encode())
        return ids, np.diff(ends, prepend=0).astype(np.int32)


def _config_beside(path: Path, name: str) -> dict[str, Any]:
    """The fields of the tokenizer_config.json in the same directory that are read, each of its type."""
    values = json_beside(path, "tokenizer_config.json")
    kinds = {"extra_ids": int, "add_bos_token": bool}
    found = {key: values[key] for key in kinds if key in values}
    for key, value in found.items():
        if type(value) is not kinds[key]:
            expected = f"tokenizer_config.json: {key}={value!r}: expected {kinds[key].__name__}; mend it"
            raise SettingsError(f"{name}: {expected}")
    return found
