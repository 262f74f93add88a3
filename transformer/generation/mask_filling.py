"""What an encoder takes for the hidden tokens of a text."""

import functools
from dataclasses import dataclass

import jax
import numpy as np

from transformer.generation.prompts import bucket
from transformer.nn.model import Transformer
from transformer.settings import check
from transformer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Guess:
    """A token that may be the hidden one."""

    token: int
    text: str
    probability: float


def fill_mask(
    model: Transformer,
    params: dict,
    tokenizer: Tokenizer,
    text: str,
    *,
    mask: str = "[MASK]",
    mask_id: int | None = None,
    top: int = 5,
) -> list[list[Guess]]:
    """The `top` most probable tokens for each `mask` in the text, the best first, each mask by itself.

    The text stands between the tokenizer's cls and sep, where there are such, as in training.

    Args:
      mask_id: token that stands for a mask, where the tokenizer does not make one of `mask`; None: the tokenizer's.

    Raises:
      SettingsError: a model with a decoder or without a head, no mask in the text, a mask that is no token of the
        model, a text that is too long for a learned position table, or fewer guesses than 1.
    """
    spec = model.spec
    kind = "a decoder" if spec.decoder is not None else "no head"
    check(spec.decoder is None and spec.head is not None, "model", kind, "use an encoder with a head of token scores")
    check(1 <= top <= spec.vocab_size, "top", top, f"use 1 to vocab_size={spec.vocab_size}")
    check(bool(mask), "mask", mask, "an empty text is everywhere; use such as '[MASK]'")
    check(mask in text, "text", text, f"has no {mask!r}; put it where a token is to be guessed")
    if mask_id is None:
        found = tokenizer.encode(mask)
        mask_id = found[0] if len(found) == 1 else tokenizer.mask_id
        remedy = "is no single token, and the tokenizer has no mask; give mask_id"
        check(mask_id is not None, "mask", mask, remedy)
    check(0 <= mask_id < spec.vocab_size, "mask_id", mask_id, f"use 0 to vocab_size - 1 = {spec.vocab_size - 1}")
    if tokenizer.encode(mask) == [mask_id]:
        ids = tokenizer.encode(text)  # whole, since spaces about a mask may belong to it
    else:
        first, *others = (tokenizer.encode(piece) for piece in text.split(mask))
        ids = [*first, *(token for piece in others for token in (mask_id, *piece))]
    ends = ([] if end is None else [end] for end in (tokenizer.cls_id, tokenizer.sep_id))
    ids = np.array([*next(ends), *ids, *next(ends)], np.int32)
    size, limit = bucket(len(ids)), spec.length_limit
    check(limit is None or len(ids) <= limit, "text", f"{len(ids)} tokens", f"the position table ends at {limit}")
    spare = (0, (size if limit is None else min(size, limit)) - len(ids))
    tokens, positions = np.pad(ids, spare), np.pad(np.arange(len(ids)), spare, constant_values=-1)
    scores = np.asarray(_probabilities(model, params, tokens[None], positions[None].astype(np.int32)))[0]
    guesses = []
    for place in np.flatnonzero(ids == mask_id):
        best = np.argsort(-scores[place], kind="stable")[:top].tolist()
        guesses.append([Guess(i, tokenizer.decode([i]), float(scores[place, i])) for i in best])
    return guesses


@functools.partial(jax.jit, static_argnames="model")
def _probabilities(model: Transformer, params: dict, tokens, positions):
    return jax.nn.softmax(model.apply({"params": params}, tokens, positions))
