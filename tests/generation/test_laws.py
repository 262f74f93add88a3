"""Laws of decoding for every family: a cache, chunks, padding and batch mates change nothing."""

import functools

import jax
import numpy as np
import pytest

from tests import common
from tests.generation.common import GREEDY, LENGTHS, NEW, TOTAL, assert_close, full_forward, generate, greedy, prompts
from transformer.ops import cache as caches

families = pytest.mark.parametrize("family", common.DECODERS)
# Tokens a call of the chunked prefill, padding included: more than a window.
WIDTH = 12


@families
def test_greedy_equals_full_forwards_without_a_cache(family):
    completions = greedy(family)
    rows = [[*p, *c.tokens] for p, c in zip(prompts(family), completions, strict=True)]
    logits = full_forward(family, rows)
    logprobs = np.asarray(jax.nn.log_softmax(logits))
    for i, (length, done) in enumerate(zip(LENGTHS, completions, strict=True)):
        assert done.reason == "length" and len(done.tokens) == NEW
        before = np.arange(length - 1, length - 1 + NEW)
        # Where two tokens are equally good, either is right.
        chosen, best = logits[i, before, done.tokens], logits[i, before].max(axis=-1)
        assert_close(chosen, best, f"row {i}")
        assert_close(np.array(done.logprobs), logprobs[i, before, done.tokens], f"log probabilities of row {i}")


@families
def test_batch_mates_and_places_change_nothing(family):
    mine, others = prompts(family), prompts(family, seed=1)
    model, params = common.model(family), common.params(family)
    mixed = [others[3], mine[2], mine[0], others[1]]
    completions = generate(model, params, mixed, max_new_tokens=NEW, sampling=GREEDY)
    for place, row in ((1, 2), (2, 0)):
        assert completions[place].tokens == greedy(family)[row].tokens


@functools.cache
def stepper(family: str):
    model = common.model(family)

    @functools.partial(jax.jit, static_argnames="fresh")
    def step(params, tokens, positions, cache, fresh):
        x, cache = model.apply({"params": params}, tokens, positions, cache=cache, fresh=fresh, method="features")
        return model.apply({"params": params}, x, method="logits"), cache

    return functools.partial(step, common.params(family))


def run_chunks(family: str, tokens: np.ndarray, lengths, sizes, width: int, sides: str, fresh: bool = False):
    """Logits [B, T, V] of rows read in chunks of `sizes` tokens, each padded to `width` on its row's side."""
    rows, total = tokens.shape
    cache = caches.init(common.tiny_spec(family).decoder, rows, total, "float32")
    logits = np.zeros((rows, total, common.tiny_spec(family).vocab_size), np.float32)
    start = 0
    for size in sizes:
        fed, positions = np.zeros((rows, width), np.int32), np.full((rows, width), -1, np.int32)
        for i, side in zip(range(rows), sides, strict=True):
            count = max(0, min(size, lengths[i] - start))
            slots = slice(0, count) if side == "r" else slice(width - count, width)
            fed[i, slots] = tokens[i, start : start + count]
            positions[i, slots] = np.arange(start, start + count)
        out, cache = stepper(family)(fed, positions, cache, fresh)
        out = np.asarray(out)
        for i in range(rows):
            real = positions[i] >= 0
            logits[i, positions[i][real]] = out[i][real]
        start += size
    assert start >= max(lengths)
    return logits, cache


@families
def test_chunks_and_padding_on_either_side_change_nothing(family):
    tokens = common.random_tokens(family, len(LENGTHS), TOTAL)
    lengths = (40, 54, 9, 23)
    rows = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    want = full_forward(family, rows)
    # Edges on and off those of the window, chunks wider than it, single tokens.
    for sizes in ([8] * 7, [12] * 5, [5, 11, 1, 7, 12, 1, 1, 3, 12, 9]):
        for sides in ("rrrr", "rlrl"):
            got, _ = run_chunks(family, tokens, lengths, sizes, WIDTH, sides)
            for i, length in enumerate(lengths):
                assert_close(got[i, :length], want[i, :length], f"row {i}, chunks of {sizes}, padding {sides}")


@families
def test_fresh_prefill_equals_prefill_from_the_cache_and_leaves_the_same_cache(family):
    tokens = common.random_tokens(family, len(LENGTHS), TOTAL)
    lengths = (40, 54, 9, 23)
    want, want_cache = run_chunks(family, tokens, lengths, [12] * 5, WIDTH, "rrrr")
    got, cache = run_chunks(family, tokens, lengths, [TOTAL + 2], TOTAL + 2, "rlrl", fresh=True)
    for i, length in enumerate(lengths):
        assert_close(got[i, :length], want[i, :length], f"row {i}")

    def is_layer(x):
        return isinstance(x, caches.KVCache)

    for a, b in zip(*(jax.tree.leaves(c, is_leaf=is_layer) for c in (cache, want_cache)), strict=True):
        np.testing.assert_array_equal(a.positions, b.positions)
        assert_close(np.asarray(a.keys), np.asarray(b.keys), "cached keys")
        if a.values.size:  # a latent layer makes its values from its keys
            assert_close(np.asarray(a.values), np.asarray(b.values), "cached values")
