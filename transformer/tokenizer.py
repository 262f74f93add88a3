"""Text <-> token ids: one protocol, with bytes, a Hugging Face `tokenizer.json` or a SentencePiece model behind it."""

import functools
import hashlib
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers

from transformer.settings import SettingsError

_REPLACEMENT = "\ufffd"

# Tried in this order among the added tokens, where no tokenizer_config.json says which token has which role.
_COMMON_SPECIALS = {
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>", "[CLS]"),
    "eos": ("</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>", "<|im_end|>", "[SEP]"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
_SENTINEL = "<extra_id_{}>"
_MODELS = ("tokenizer.model", "spiece.model")  # SentencePiece's, as checkpoints call them


class Tokenizer(Protocol):
    """Text to ids in [0, vocab_size) and back; a special id is None where the tokenizer has no such token."""

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    end_ids: tuple[int, ...]  # any of them ends a generated text
    cls_id: int | None  # begins and sep_id ends what an encoder reads
    sep_id: int | None
    mask_id: int | None  # stands for a hidden token
    sentinel_ids: tuple[int, ...]  # each stands for a hidden span, in this order; may lie at vocab_size and beyond

    @property
    def text_ids(self) -> np.ndarray:
        """The ids that stand for text: int32, ascending, without special tokens."""
        ...

    @property
    def identity(self) -> dict[str, Any]:
        """JSON-able; equal where two tokenizers are the same file (or kind) with the same special ids."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with no special token added."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`: special tokens skipped, invalid UTF-8 replaced by U+FFFD."""
        ...

    def encode_with_bytes(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids of `text` and the UTF-8 bytes each accounts for: two int32 [L]; bytes sum to those of `text`."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as tokens: pad 0, bos 1, eos 2, byte b is b + 3.

    bos and eos serve as cls and sep, too. Objectives that hide text use ids above these 259, for which a model may have
    embeddings or not: 259 is the mask, 260 to 359 are sentinels.
    """

    vocab_size = 259
    pad_id, bos_id, eos_id = 0, 1, 2
    end_ids = (2,)
    cls_id, sep_id, mask_id = 1, 2, 259
    sentinel_ids = tuple(range(260, 360))
    text_ids = np.arange(3, 259, dtype=np.int32)

    @property
    def identity(self) -> dict[str, Any]:
        """What tells this tokenizer from others: its kind and size."""
        return {"kind": "bytes", "vocab_size": self.vocab_size}

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`, each plus 3."""
        return [byte + 3 for byte in text.encode()]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`: ids that are no byte skipped, invalid UTF-8 replaced by U+FFFD."""
        return bytes(i - 3 for i in ids if 3 <= i < 259).decode("utf-8", errors="replace")

    def encode_with_bytes(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids of `text` and a 1 for each: two int32 [L]."""
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32) + 3
        return ids, np.ones_like(ids)


class HFTokenizer:
    """A Hugging Face `tokenizer.json`; special roles come from the tokenizer_config.json beside it, or common names.

    Special tokens spelled out in a text become their ids, as in Hugging Face.

    Args:
      published: it belongs to a published checkpoint: a text begins with BOS only if the file itself puts it there,
        and ends at every `eos_token_id` of the generation_config.json (or config.json) beside it.

    Raises:
      SettingsError: the file is missing or no tokenizer.json, or a special token that the config names is not in it.
    """

    def __init__(self, path: str | Path, published: bool = False):
        path = Path(path)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise SettingsError(
                f"data.tokenizer={str(path)!r}: can't be read ({error.strerror}); "
                'use "bytes", or the path of a Hugging Face tokenizer.json'
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises bare Exception
            raise SettingsError(
                f"data.tokenizer={str(path)!r}: not a Hugging Face tokenizer.json ({error}); "
                "a SentencePiece file must be called .model; convert other formats with the transformers library first"
            ) from error
        # A tokenizer.json may carry these from whoever saved it; they would silently cut or pad documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Ids may have gaps: an embedding needs a row for the largest id, however many tokens there are.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        specials = _special_ids(self._tokenizer, path)
        self.bos_id, self.eos_id, self.pad_id = specials["bos"], specials["eos"], specials["pad"]
        self.cls_id, self.sep_id, self.mask_id = specials["cls"], specials["sep"], specials["mask"]
        sentinels = (self._tokenizer.token_to_id(_SENTINEL.format(n)) for n in itertools.count())
        self.sentinel_ids = tuple(itertools.takewhile(lambda i: i is not None, sentinels))
        ends = () if self.eos_id is None else (self.eos_id,)
        self.end_ids = (published_ends(path) or ends) if published else ends
        if published and self._tokenizer.encode("a").ids[:1] != [self.bos_id]:
            self.bos_id = None
        self._sha256 = hashlib.sha256(content).hexdigest()

    @functools.cached_property
    def text_ids(self) -> np.ndarray:
        """The ids that stand for text: int32, ascending, without special tokens."""
        special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        special |= {self._tokenizer.token_to_id("<unk>"), self._tokenizer.token_to_id("[UNK]")}
        special.update(self.sentinel_ids)
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        return np.asarray(sorted(set(ids) - special), np.int32)

    @property
    def identity(self) -> dict[str, Any]:
        """What tells this tokenizer from others: its file's content, and the special ids that may lie beside it."""
        ids = {"bos_id": self.bos_id, "eos_id": self.eos_id, "pad_id": self.pad_id}
        return {"kind": "hf", "sha256": self._sha256, "vocab_size": self.vocab_size, **ids}

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with no special token added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`: special and unknown ids skipped, invalid UTF-8 replaced by U+FFFD."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def encode_with_bytes(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids of `text` and the UTF-8 bytes each accounts for: two int32 [L]; bytes sum to those of `text`."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids = np.asarray(encoding.ids, np.int32)
        if not ids.size:
            return ids, ids
        code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        widths = 1 + sum((code_points >= first).astype(np.int32) for first in (0x80, 0x800, 0x10000))
        bytes_before = np.concatenate([[0], np.cumsum(widths)])
        # Offsets are characters: tokens that share one character repeat its end, and trimmed spaces lie between
        # tokens. The running maximum counts the first once and gives the second to the token that follows.
        ends = np.maximum.accumulate([end for _, end in encoding.offsets])
        ends[-1] = len(text)
        return ids, np.diff(bytes_before[ends], prepend=0).astype(np.int32)


class StreamDecoder:
    """Decodes a growing sequence; what `push` and the final `flush` return joins to the text of all ids."""

    _CONTEXT = 16  # ids kept once shown: a first token loses its leading space in some decoders

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0  # characters of decode(self._ids) already returned

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; a character whose last byte is still to come is held back."""
        self._ids.extend(int(i) for i in ids)
        text = self._tokenizer.decode(self._ids)
        complete = text.rstrip(_REPLACEMENT)
        new, self._shown = complete[self._shown :], max(self._shown, len(complete))
        if complete == text and len(self._ids) > 2 * self._CONTEXT:
            self._forget(text)
        return new

    def flush(self) -> str:
        """The text still held back, incomplete characters as U+FFFD; the decoder then starts afresh."""
        rest = self._tokenizer.decode(self._ids)[self._shown :]
        self._ids, self._shown = [], 0
        return rest

    def _forget(self, text: str) -> None:
        context = self._ids[-self._CONTEXT :]
        shown = self._tokenizer.decode(context)
        # Not so when the context starts inside a character, or holds nothing but special tokens: keep all for now.
        if shown and text.endswith(shown):
            self._ids, self._shown = context, len(shown)


def load_tokenizer(name_or_path: str | Path, published: bool = False) -> Tokenizer:
    """The tokenizer "bytes", or that of a tokenizer.json, a SentencePiece .model, or the directory that holds one.

    `published` as in `HFTokenizer` and `SentencePieceTokenizer`.

    Raises:
      SettingsError: there is no such file, it is neither of these, or the package sentencepiece is missing.
    """
    if name_or_path == "bytes":
        return ByteTokenizer()
    path = Path(name_or_path)
    if path.is_dir():
        path = tokenizer_file(path)
    if path.suffix == ".model":
        from transformer.sentence_pieces import SentencePieceTokenizer  # of those who have such a file

        return SentencePieceTokenizer(path, published)
    return HFTokenizer(path, published)


def tokenizer_file(directory: Path) -> Path:
    """The file in a directory that a tokenizer is made of; its tokenizer.json where there is none."""
    names = ("tokenizer.json", *_MODELS)
    return next((directory / name for name in names if (directory / name).is_file()), directory / names[0])


def _special_ids(tokenizer: tokenizers.Tokenizer, path: Path) -> dict[str, int | None]:
    """An id a role: of what tokenizer_config.json says, else of the first common name among the added tokens."""
    config_path = path.with_name("tokenizer_config.json")
    config = json_beside(path, config_path.name)
    added = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    ids: dict[str, int | None] = {}
    for role, names in _COMMON_SPECIALS.items():
        key = f"{role}_token"
        if key not in config:
            ids[role] = next((added[name] for name in names if name in added), None)
            continue
        token = config[key]["content"] if isinstance(config[key], dict) else config[key]
        ids[role] = None if token is None else tokenizer.token_to_id(token)
        if token is not None and ids[role] is None and role in ("bos", "eos", "pad"):  # what every model may need
            raise SettingsError(
                f"data.tokenizer={str(path)!r}: {config_path.name} names {key}={token!r}, which is not in the "
                "vocabulary; add it to tokenizer.json or remove it from the config"
            )
    return ids


def published_ends(path: Path) -> tuple[int, ...]:
    """The `eos_token_id`, one or several, of the generation_config.json beside the file, else of its config.json."""
    for name in ("generation_config.json", "config.json"):
        found = json_beside(path, name).get("eos_token_id")
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not ids or not all(type(i) is int for i in ids):
                raise SettingsError(f"{path.with_name(name)}: eos_token_id={found!r}: expected token ids; mend it")
            return tuple(ids)
    return ()


def json_beside(path: Path, name: str) -> dict[str, Any]:
    """The JSON object of a file in the same directory; empty where there is none."""
    file = path.with_name(name)
    if not file.exists():
        return {}
    try:
        values = json.loads(file.read_bytes())
    except ValueError as error:
        raise SettingsError(f"data.tokenizer={str(path)!r}: {file} is not JSON ({error}); mend or remove it") from error
    if not isinstance(values, dict):
        raise SettingsError(f"data.tokenizer={str(path)!r}: {file} is not a JSON object; mend or remove it")
    return values
