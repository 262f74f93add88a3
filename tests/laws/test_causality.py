"""Law: a token depends on itself, on all tokens within reach, before it and, in an encoder, behind it, and on no other.

A decoder behind an encoder depends on all of the text that the encoder reads.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import common
from transformer.nn.context import Source
from transformer.nn.model import Transformer
from transformer.settings import Compute

WINDOWED = [f for f in common.FAMILIES if any(b.mixer.mask.window for b in common.tiny_spec(f).layers)]


def influence(net: Transformer, params, length: int) -> tuple[np.ndarray, np.ndarray | None]:
    """[T, T] and [T, S]: largest |d (a random mix of logits[t]) / d embedding[s]| of tokens and of the source's."""
    ids = np.random.default_rng(1).permutation(net.spec.vocab_size)[None].astype(np.int32)
    tokens, source = ids[:, :length], ids[:, length : length + 10]
    options = {"source": Source(source)} if net.spec.trunk.crosses else {}
    mix = np.random.default_rng(2).standard_normal(net.spec.vocab_size).astype(np.float32)

    def outputs(table):
        # The tokens differ, so that each position has its own row of the table; the head keeps the old table.
        moved = {**params, "embedding": {**params["embedding"], "token": table}}
        x, _ = net.apply({"params": moved}, tokens, **options, method="features")
        return net.apply({"params": params}, x, method="logits")[0] @ mix

    table = jnp.asarray(params["embedding"]["token"])
    found = np.abs(jax.jit(jax.jacrev(outputs))(table)).max(axis=-1)
    return found[:, tokens[0]], found[:, source[0]] if options else None


def check_reach(net: Transformer, params, length: int) -> None:
    """Influence is nonzero exactly where the windows of the layers, one after the other, lead."""
    stack = net.spec.trunk
    windows = [block.mixer.mask.window for block in stack.layers]
    reach = length if None in windows else sum(window - 1 for window in windows)
    behind = np.subtract.outer(np.arange(length), np.arange(length))
    got, of_source = influence(net, params, length)
    assert np.isfinite(got).all()
    ahead = stack.layers[0].mixer.mask.causal
    np.testing.assert_array_equal(got != 0, (behind >= (0 if ahead else -reach)) & (behind <= reach))
    assert of_source is None or (np.isfinite(of_source) & (of_source != 0)).all()


@pytest.mark.parametrize("family", common.FAMILIES)
def test_gradient_flows_from_the_past_only(family):
    """In several blocks, with the schedule that skips some of them; the formula's body has the same gradients."""
    net = common.model(family, attention="blockwise", attention_block=16)
    check_reach(net, common.params(family), common.LENGTH)


@pytest.mark.parametrize("family", common.often({"gemma3", "gpt_oss"}, WINDOWED))
def test_receptive_field_of_windows_alone(family):
    """With every layer's window in force the model reaches back the sum of window - 1, and not a token further."""
    spec = common.tiny_spec(family)
    window = next(b.mixer.mask.window for b in spec.layers if b.mixer.mask.window)

    def narrow(blocks):
        return tuple(_with_window(b, window) for b in blocks)

    stack = spec.decoder
    stack = dataclasses.replace(stack, head=narrow(stack.head), body=narrow(stack.body), tail=narrow(stack.tail))
    spec = dataclasses.replace(spec, decoder=stack)
    net = Transformer(spec, Compute(attention="reference"))
    check_reach(net, common.params(family), stack.num_layers * (window - 1) + 5)


def _with_window(block, window: int):
    mask = dataclasses.replace(block.mixer.mask, window=window)
    return dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, mask=mask))
