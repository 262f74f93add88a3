"""Recorded outputs of Hugging Face models, through every kind of cache that the family's layers have."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoints import common as golden
from transformer.generation.layout import unroll
from transformer.nn.context import Source
from transformer.ops import cache as caches

# Mean difference of the logits over their standard deviation: what rounding keys and values may do. A mixture whose
# router is moved over an edge by it picks other experts for that token.
LIMITS = {"float32": 1e-5, "bfloat16": 0.02, "int8": 0.04}
ROUTED = 3
# Rounding: by default of windows and sinks, a latent, cross-attention and relative biases, and of plain grouped heads.
ROUNDED = {"llama3", "gpt_oss", "deepseek_v3", "t5"}


def cases():
    for case, dtype in itertools.product(golden.DECODERS + golden.PAIRS, caches.CACHE_DTYPES):
        slow = dtype != "float32" and case not in ROUNDED
        yield pytest.param(case, dtype, marks=[pytest.mark.slow] if slow else [])


@functools.cache
def model(case: str):
    """(model, parameters) with layers apart, so that each has a cache of its own."""
    return unroll(*golden.imported(case))


@pytest.mark.parametrize(("case", "dtype"), [*cases()])
def test_logits_over_a_cache(case, dtype):
    """In two chunks, of which the second sees the first, and what an encoder made, through the cache alone."""
    net, params = model(case)
    want, read = golden.expected(case)["logits"], golden.expected(case)["input_ids"].astype(np.int32)
    source, tokens = None, read
    if net.spec.trunk.crosses:
        source, tokens = Source(read), golden.expected(case)["decoder_input_ids"].astype(np.int32)
    rows, length = tokens.shape
    half = length // 2

    @jax.jit
    def chunk(params, tokens, positions, cache, source):
        x, cache = net.apply({"params": params}, tokens, positions, cache=cache, source=source, method="features")
        return net.apply({"params": params}, x, method="logits"), cache

    cache, logits = caches.init(net.spec.decoder, rows, length, dtype, source_length=read.shape[1]), []
    for start in (0, half):
        positions = jnp.broadcast_to(jnp.arange(start, start + half), (rows, half))
        out, cache = chunk(params, tokens[:, start : start + half], positions, cache, None if start else source)
        logits.append(np.asarray(out))
    assert {layer.mixer.keys.dtype for layer in cache.head} == {jnp.dtype(dtype)}
    difference = np.abs(np.concatenate(logits, axis=1) - want[:, : 2 * half]).mean() / want.std()
    routes = "moe_layers" in golden.expected(case)
    print(f"  {case}, {dtype}: {difference:.1e} of the standard deviation")
    assert difference <= LIMITS[dtype] * (ROUTED if routes else 1)
