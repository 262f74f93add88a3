"""Laws of StreamingLLM's attention: what is kept, where it is said to lie, and that it never ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import common
from tests.generation.common import GREEDY, assert_close, generate
from transformer import spec
from transformer.nn.model import Transformer
from transformer.ops import cache as caches
from transformer.ops import rope as rotary
from transformer.ops.mask import visible

SINKS, WINDOW, LENGTH = 3, 6, 31
# One of each way to rotate: half and interleaved, with a window layer beside, and latent attention.
FAMILIES = ("llama3", "gemma3", "deepseek_v3")


def streaming(family: str) -> Transformer:
    model = common.model(family)
    return model.clone(spec=spec.streaming(model.spec, sinks=SINKS, window=WINDOW))


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_are_those_of_positions_counted_in_the_cache(interleaved):
    """The definition: a query sees the sinks and its window as if they were tokens 0, 1, 2 … (paper, section 3.2)."""
    rope = spec.Rope(theta=100.0, dim=8, interleaved=interleaved)
    mask = spec.Mask(causal=True, window=WINDOW, sinks=SINKS)
    q, k = jax.random.normal(jax.random.key(0), (2, 1, LENGTH, 1, 8))
    positions = jnp.arange(LENGTH)[None]
    together = rotary.rotate_in_cache(rope, mask, q, k, positions, positions)
    scores = np.einsum("bqnh,bknh->qk", *together)
    for query in range(LENGTH):
        seen = np.flatnonzero(np.asarray(visible(mask, positions, positions))[0, query])
        assert len(seen) == min(query + 1, SINKS + WINDOW)
        places = jnp.arange(len(seen))[None]
        turned_k = rotary.rotate(rope, k[:, seen], *rotary.rotations(rope, places))
        turned_q = rotary.rotate(rope, q[:, query : query + 1], *rotary.rotations(rope, places[:, -1:]))
        want = np.einsum("bqnh,bknh->k", turned_q, turned_k)
        np.testing.assert_allclose(scores[query, seen], want, atol=1e-5)
        alone = rotary.rotate_in_cache(
            rope, mask, q[:, query : query + 1], k[:, seen], positions[:, query : query + 1], positions[:, seen]
        )
        np.testing.assert_allclose(np.einsum("bqnh,bknh->k", *alone), want, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_any_size_equal_the_whole_forward(family):
    model, params = streaming(family), common.params(family)
    tokens = common.random_tokens(family, 2, LENGTH)
    want = np.asarray(jax.jit(lambda t: model.apply({"params": params}, t))(tokens))
    plain = np.asarray(common.model(family).apply({"params": params}, tokens))
    assert np.abs(want - plain)[:, SINKS + WINDOW :].max() > 1e-3, "nothing was left out"
    assert_close(want[:, : SINKS + WINDOW], plain[:, : SINKS + WINDOW], "before the window is full")

    @jax.jit
    def step(tokens, positions, cache):
        x, cache = model.apply({"params": params}, tokens, positions, cache=cache, method="features")
        return model.apply({"params": params}, x, method="logits"), cache

    for sizes in ([1] * LENGTH, [5] * 6 + [1], [9, 9, 9, 4]):
        cache, out, start = caches.init(model.spec.decoder, 2, LENGTH, "float32"), [], 0
        for size in sizes:
            positions = jnp.broadcast_to(jnp.arange(start, start + size), (2, size))
            logits, cache = step(tokens[:, start : start + size], positions, cache)
            out.append(np.asarray(logits))
            start += size
        assert_close(np.concatenate(out, 1), want, f"chunks of {sizes[0]}")


@pytest.mark.parametrize("dtype", caches.CACHE_DTYPES)
def test_generation_runs_on_far_beyond_the_trained_length_in_constant_memory(dtype):
    model, length = streaming("llama3"), common.tiny_spec("llama3").max_length
    [done] = generate(
        model, common.params("llama3"), [[1, 2, 3]], max_new_tokens=10 * length, sampling=GREEDY, cache_dtype=dtype
    )
    assert len(done.tokens) == 10 * length and np.isfinite(done.logprobs).all()
    sizes = [
        sum(x.size for x in jax.tree.leaves(caches.init(model.spec.decoder, 1, total, dtype)))
        for total in (length, 10 * length)
    ]
    assert sizes[0] == sizes[1]


def test_what_cannot_stream_is_refused():
    tiny = common.tiny_spec("llama3")
    with pytest.raises(spec.SpecError, match=r"embedding\.positions=LearnedPositions"):
        spec.streaming(common.tiny_spec("gpt2"), sinks=4, window=8)
    for sizes, what in (((0, 8), "sinks=0"), ((4, 0), "window=0"), ((4, tiny.max_length), "max_length")):
        with pytest.raises(spec.SpecError, match=what):
            spec.streaming(tiny, sinks=sizes[0], window=sizes[1])
    with pytest.raises(spec.SpecError, match="sinks=2"):
        spec.Mask(causal=True, sinks=2)
    kept = spec.streaming(common.tiny_spec("gemma3"), sinks=2, window=9).decoder.layers
    windows = [(b.mixer.mask.window, b.mixer.mask.sinks) for b in kept]
    assert set(windows) == {(9, 2), *((b.mixer.mask.window, 0) for b in common.tiny_spec("gemma3").decoder.layers)} - {
        (None, 0)
    }
