"""A conversation's memory: of a prompt that goes on where the last one ended, only what is new is read."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from transformer.generation.decode import Plan, Read, absorb, begin, pin_cache, pin_read
from transformer.generation.layout import for_decoding
from transformer.generation.prompts import bucket, check_alone, check_writes, make_batches
from transformer.generation.text import Stream, Text, write
from transformer.generation.tokens import (
    PLAIN,
    STREAM_STEPS,
    Completion,
    OnToken,
    choose_cache_dtype,
    end_ids,
    finish,
    make_rows,
)
from transformer.nn.model import Transformer
from transformer.ops import cache as caches
from transformer.ops.sampling import Sampling
from transformer.settings import check
from transformer.tokenizer import Tokenizer

# Positions that a conversation has room for before its cache has to grow, and tokens that are read at once. Attention
# looks at empty slots too: on a CPU, a small model draws a token 1.3 times faster over 1024 slots than over 2048.
CAPACITY, CHUNK = 1024, 64
# Tokens at the end of a cache that may turn out otherwise: an answer is written again by the template. Rings of window
# layers are longer by as many slots; full layers can drop any number.
SLACK = 64


class Session:
    """Draws what `generate` draws from one prompt at a time, and keeps the cache in between.

    A second prompt compiles nothing, however long it is, until the conversation outgrows its capacity. Where a prompt
    has other tokens than the cache, those and all after them are read anew.

    Args:
      capacity: positions that the cache is made for; it is made anew, twice as large, when a conversation needs more.
      chunk: tokens that are read at once.
      cache_dtype: of cached keys and values; the model's compute dtype by default.

    Raises:
      SettingsError: a model with an encoder, or sizes below 1.
    """

    def __init__(
        self,
        model: Transformer,
        params: dict,
        *,
        capacity: int = CAPACITY,
        chunk: int = CHUNK,
        cache_dtype: caches.CacheDType | None = None,
    ):
        check_writes(model.spec)
        check_alone(model.spec, "a conversation goes on in one text")
        check(capacity >= 1, "capacity", capacity, "use at least 1")
        check(chunk >= 1, "prefill_chunk", chunk, "use at least 1")
        self._model, self._params = for_decoding(model), params
        self._windows = any(block.mixer.mask.window is not None for block in model.spec.decoder.layers)
        self._chunk, self._cache_dtype = chunk, choose_cache_dtype(model, cache_dtype)
        self._plan = self._sized(capacity)
        # The cache, and the tokens that it surely holds. A call uses it up: one that fails leaves nothing.
        self._cache: caches.StackCache | None = None
        self._held: list[int] = []

    def complete(
        self,
        tokenizer: Tokenizer,
        prompt: str,
        *,
        stop: Sequence[str] = (),
        stream: Stream | None = None,
        **options: Any,
    ) -> Text:
        """Text after a prompt that brings its own BOS, as `generation.complete`; options are those of `generate`."""

        def run(prompts, **ends):
            return [self.generate(prompts[0], **ends, **options)]

        ids = [tokenizer.encode(prompt)]
        [text] = write(run, tokenizer, ids, stop, stream, before=ids)
        return text

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling = PLAIN,
        seed: int = 0,
        eos_ids: Sequence[int] = (),
        on_token: OnToken | None = None,
    ) -> Completion:
        """Continues the prompt, which is the whole conversation, as `generate` does.

        Raises:
          SettingsError: what `generate` refuses.
        """
        [batch] = make_batches(self._model, [prompt], max_new_tokens, seed, 1, self._chunk)
        rows = make_rows(self._model, 1, max_new_tokens, eos_ids, on_token)
        tokens, total = batch.tokens[0, : batch.lengths[0]], int(batch.lengths[0]) + max_new_tokens
        if total > self._plan.capacity:
            self._plan, self._cache = self._sized(max(total, 2 * self._plan.capacity)), None
        read, ends, method = self._absorb(tokens, batch), end_ids(rows), sampling.method()
        padded = np.zeros((batch.tokens.shape[0], self._plan.capacity), np.int32)
        padded[0, : len(tokens)] = tokens
        left = np.where(batch.lengths > 0, max_new_tokens, 0).astype(np.int32)
        lengths, seeds = batch.lengths, batch.seeds
        first = begin(self._model, self._params, read.features, read.cache, padded, lengths, left, seeds, ends, method)
        state = finish(self._model, self._params, *first, rows, max_new_tokens, method)
        self._cache = state.cache
        self._held = [*tokens.tolist(), *rows[0].tokens]
        return rows[0].completion()

    def _absorb(self, tokens: np.ndarray, batch) -> Read:
        """Reads what the cache has not got; the last token always, since its features are wanted."""
        (cache, self._cache), rows = (self._cache, None), batch.tokens.shape[0]
        # The last token drawn was not read, unless an end token followed it.
        known = min(_common(self._held[:-1], tokens), len(tokens) - 1)
        if cache is None or (self._windows and len(self._held) + 2 * STREAM_STEPS - known > SLACK):
            cache, known = _empty(self._model, self._params, rows, self._plan), 0
        read = _resume(self._model, cache, np.int32(known), rows)
        for start in range(known, len(tokens), self._chunk):
            part = np.zeros((rows, self._chunk), np.int32)
            piece = tokens[start : start + self._chunk]
            part[0, : len(piece)] = piece
            read = absorb(self._model, self._params, part, np.int32(start), batch.lengths, read, self._plan)
        return read

    def _sized(self, total: int) -> Plan:
        limit = self._model.spec.length_limit
        capacity = bucket(total) if limit is None else min(bucket(total), limit)
        return Plan(capacity, self._cache_dtype, self._chunk, SLACK)


def _common(held: list[int], tokens: np.ndarray) -> int:
    """How many tokens both begin with."""
    count = min(len(held), len(tokens))
    differ = np.flatnonzero(np.array(held[:count], np.int32) != tokens[:count])
    return int(differ[0]) if differ.size else count


@functools.partial(jax.jit, static_argnames=("model", "rows", "plan"), keep_unused=True)
def _empty(model: Transformer, params: dict, rows: int, plan: Plan) -> caches.StackCache:
    """Nothing read yet. The parameters tell on which devices: elsewhere the next call would be another program."""
    return pin_cache(model, caches.init(model.spec.decoder, rows, plan.capacity, plan.cache_dtype, plan.slack))


@functools.partial(jax.jit, static_argnames=("model", "rows"), donate_argnames="cache")
def _resume(model: Transformer, cache: caches.StackCache, first: Int[Array, ""], rows: int) -> Read:
    """The tokens before position `first`, to be read on from there; `cache` is used up."""
    cache = cache.drop(first)
    return pin_read(model, Read(cache, jnp.zeros((rows, 1, model.spec.d_model), model.compute.dtype)))
