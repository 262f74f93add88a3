"""Caches whose tokens share rows, in whole models: decoding is the forward pass without a cache."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import pytest

from tests import common
from tests.generation.common import assert_close
from transformer import spec
from transformer.nn.model import Transformer
from transformer.ops import cache as caches

ROWS, LENGTH, SLOTS = 2, 70, 128


def model(family: str, mask: spec.Mask, **compute: str) -> Transformer:
    """Two layers with keys of 64 features, or of 192 where they are latents."""
    built = common.tiny_spec(family)

    def widen(block: spec.Block) -> spec.Block:
        latent = isinstance(block.mixer, spec.LatentAttention)
        sizes = dict(kv_rank=192 - block.mixer.rope_dim) if latent else dict(head_dim=64)
        return dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, mask=mask, **sizes))

    decoder = spec.Stack(body=built.decoder.map(widen).layers[:1], repeats=2, final_norm=built.decoder.final_norm)
    return Transformer(dataclasses.replace(built, decoder=decoder), common.model(family, **compute).compute)


@pytest.mark.parametrize(
    ("family", "mask", "how"),
    [
        ("llama3", spec.Mask(causal=True, window=62, sinks=2), "xla"),
        ("deepseek_v3", spec.Mask(causal=True), "kernel"),
        pytest.param("gpt_oss", spec.Mask(causal=True, window=64), "kernel", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", spec.Mask(causal=True, window=62, sinks=2), "xla", marks=pytest.mark.slow),
    ],
)
def test_decoding_is_the_forward_pass(family, mask, how):
    net = model(family, mask, decode_attention=how)
    params = nn.unbox(jax.jit(net.init)(jax.random.key(0), np.zeros((1, 2), np.int32))["params"])
    tokens = common.random_tokens(family, ROWS, LENGTH)
    cache = caches.init(net.spec.decoder, ROWS, SLOTS, "float32")
    assert cache.body[0].mixer.together == 2

    @jax.jit
    def step(params, tokens, positions, cache):
        return net.apply({"params": params}, tokens, positions, cache=cache, method="features")

    got = []
    for start, stop in ((0, 40), *((i, i + 2) for i in range(40, LENGTH, 2))):
        positions = np.tile(np.arange(start, stop), (ROWS, 1))
        out, cache = step(params, tokens[:, start:stop], positions, cache)
        got.append(np.asarray(out))
    want = jax.jit(lambda tokens: net.apply({"params": params}, tokens, method="features")[0])(tokens)
    assert_close(np.concatenate(got, axis=1), np.asarray(want), f"{family}, {how}")
