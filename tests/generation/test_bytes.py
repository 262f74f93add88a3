"""What a decoding step moves, as compiled: the weights, the cache once, and no copy of it."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from tests import common
from transformer import spec
from transformer.nn.model import Transformer
from transformer.ops import cache as caches

SHORT, LONG = 1024, 16_384
TOKEN = jax.ShapeDtypeStruct((1, 1), jnp.int32)


def model(family: str, window: int | None = None, head_dim: int = 128) -> Transformer:
    """Two layers of a family with heads as wide as published ones, so that scores are small beside keys.

    Latent keys have 576 features and share rows.
    """
    built = common.tiny_spec(family)

    def widen(block: spec.Block) -> spec.Block:
        mixer = block.mixer
        mask = dataclasses.replace(mixer.mask, window=window)
        if isinstance(mixer, spec.LatentAttention):
            return dataclasses.replace(block, mixer=dataclasses.replace(mixer, mask=mask, kv_rank=576 - mixer.rope_dim))
        return dataclasses.replace(block, mixer=dataclasses.replace(mixer, mask=mask, head_dim=head_dim))

    layers = built.decoder.map(widen).layers[:2]
    decoder = spec.Stack(head=layers, body=(), repeats=0, final_norm=built.decoder.final_norm)
    return Transformer(dataclasses.replace(built, decoder=decoder), common.model(family).compute)


def step(net: Transformer, capacity: int):
    """(bytes accessed by a step, its temporary bytes, bytes of the cache)."""
    cache = jax.eval_shape(lambda: caches.init(net.spec.decoder, 1, capacity, "float32"))

    def run(params, token, position, cache):
        return net.apply({"params": params}, token, position, cache=cache, method="features")

    params = nn.unbox(common.abstract_params(net))
    compiled = jax.jit(run, donate_argnums=3).lower(params, TOKEN, TOKEN, cache).compile()
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    return compiled.cost_analysis()["bytes accessed"], compiled.memory_analysis().temp_size_in_bytes, held


# A latent is read for the keys and again for the values.
@pytest.mark.parametrize(("family", "head_dim", "reads"), [("llama3", 128, 1), ("gpt2", 64, 1), ("deepseek_v3", 0, 2)])
def test_a_step_over_a_longer_cache_moves_the_longer_cache_and_nothing_else(family, head_dim, reads):
    net = model(family, head_dim=head_dim)
    (bytes_short, temp_short, held_short), (bytes_long, temp_long, held_long) = step(net, SHORT), step(net, LONG)
    grown = held_long - held_short
    # A scatter of several heads' rows counts as if it read and wrote the whole cache, which it does in place; and where
    # tokens share rows (of 64 features), so does the gathering of those rows before it.
    counted = reads if net.spec.decoder.layers[0].mixer.cache_dims.heads == 1 else reads + 2 + (head_dim == 64)
    assert reads * grown <= bytes_long - bytes_short <= 1.25 * counted * grown
    # Scores, but no keys or values.
    assert temp_long - temp_short < grown / 8


@pytest.mark.parametrize("family", ["llama3", "deepseek_v3"])
def test_a_step_of_a_window_layer_does_not_grow(family):
    net = model(family, window=64)
    assert step(net, SHORT) == step(net, LONG)
