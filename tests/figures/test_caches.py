"""Caches of the calculator and of published models: theory, allocation, and the slots of rings."""

import functools

import flax.linen as nn
import jax
import numpy as np
import pytest

from transformer import spec
from transformer.figures.data import caches, published
from transformer.nn.context import make_context
from transformer.nn.latent_attention import LatentAttention
from transformer.settings import Compute


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_what_is_counted_is_what_is_allocated(dtype):
    shape = caches.Shape(layers=3, heads=8, groups=2, head_dim=16, latent=24, rope_dim=8)
    for size in caches.schemes(shape, 1000, dtype):
        assert size.bytes == size.allocated > 0
    for reference in ("gemma3:27b", "deepseek_v3:671b", "gpt_oss:120b", "vaswani:base"):
        size = caches.size(reference, published.model(reference), 20_000, dtype)
        assert size.bytes == size.allocated > 0


def test_schemes_follow_the_formulas():
    """2·heads·d, 2·groups·d, 2·d and latent + rope_dim numbers a token and layer, of two bytes each."""
    shape = caches.Shape(layers=4, heads=32, groups=8, head_dim=128, latent=512, rope_dim=64)
    sizes = {size.name: size for size in caches.schemes(shape, 4096, "bfloat16")}
    per_layer = {"MHA": 2 * 32 * 128, "GQA": 2 * 8 * 128, "MQA": 2 * 128, "MLA": 512 + 64}
    assert {name: size.numbers // 4 for name, size in sizes.items()} == per_layer
    assert {name: size.bytes for name, size in sizes.items()} == {n: 2 * 4 * 4096 * x for n, x in per_layer.items()}


def test_presets_are_what_is_published():
    assert caches.Shape.of("llama3:8b") == caches.Shape(layers=32, heads=32, groups=8, head_dim=128)
    deepseek = caches.Shape.of("deepseek_v3:671b")
    assert (deepseek.layers, deepseek.heads, deepseek.latent, deepseek.rope_dim) == (61, 128, 512, 64)
    with pytest.raises(ValueError, match="bert:base"):
        caches.Shape.of("bert:base")


def test_a_text_ends_where_the_context_does():
    lengths = {"gpt2:xl": 1024, "vaswani:base": 512, "llama3:8b": 8192, "mistral:7b-v0.1": 32768, "gemma3:27b": 32768}
    for name, length in lengths.items():
        assert caches.size(name, published.model(name), 32768, "bfloat16").length == length


def test_a_latent_is_what_its_layer_keeps_and_makes():
    """Against the parameters of a layer, the keys and values that it makes, and what the calculator counts."""
    model, one = published.model("deepseek_v3:tiny"), caches.latent("deepseek_v3:tiny")
    mixer = model.layers[-1].mixer
    layer = LatentAttention(mixer, Compute(attention="reference"), gain=1.0)
    x, context = np.zeros((1, 2, one.width), np.float32), make_context((mixer.rope,), np.arange(2)[None])
    run = functools.partial(layer.init_with_output, mutable=["params", "intermediates"])
    _, seen = nn.meta.unbox(jax.eval_shape(lambda key: run(key, x, context, None), jax.random.key(0)))
    assert sum(seen["params"][up].size for up in ("key_up", "value_up")) == one.weights
    assert sum(seen["intermediates"][made].size for made in "kv") == 2 * one.made, "of two tokens"
    assert one.kept == sum(caches.cache_numbers(model, 8).per_token) // model.decoder.num_layers
    with pytest.raises(ValueError, match=r"llama3:8b.*keeps no latent"):
        caches.latent("llama3:8b")


def test_heads_make_more_of_the_same_latent():
    few, many = (caches.latent("deepseek_v3:671b", heads) for heads in (16, 256))
    assert few.kept == many.kept == 576
    assert (many.made, many.weights) == (16 * few.made, 16 * few.weights)


@pytest.mark.parametrize("sinks", [0, 2])
def test_slots_hold_the_sinks_and_the_last_window(sinks):
    mask = spec.Mask(causal=True, window=4, sinks=sinks)
    for step, held in enumerate(caches.slots(mask, 15)):
        wanted = {*range(min(sinks, step + 1)), *range(max(0, step - 3), step + 1)}
        assert {p for p in held if p >= 0} == wanted
        assert list(held[:sinks]) == [p if p <= step else -1 for p in range(sinks)], "sinks never move"


def test_a_full_cache_holds_everything():
    held = caches.slots(spec.Mask(causal=True), 5)
    np.testing.assert_array_equal(held, np.where(np.tri(5, dtype=bool), np.arange(5), -1))
