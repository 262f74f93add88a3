"""Law: every inner value can be seen, layer by layer, and costs nothing unless asked for."""

import functools

import flax.linen as nn
import jax
import numpy as np
import pytest

from tests import common
from transformer.ops.attention import reference
from transformer.spec import MoE

ATTENTION = {"q", "k", "v", "probabilities"}
BLOCK = {"attention", "attention_out", "ffn_out", "residual"}


@functools.cache
def captured(family: str):
    """Logits of the packed batch, and everything in between."""
    net, batch = common.model(family), common.packed_batch(family)

    def run(params):
        return net.apply({"params": params}, batch.tokens, None, batch.segment_ids, mutable="intermediates")

    logits, state = jax.device_get(jax.jit(run)(common.params(family)))
    return logits, state["intermediates"]


@pytest.mark.parametrize("family", common.FAMILIES)
def test_points_are_there_with_their_shapes(family):
    spec, (logits, inner) = common.tiny_spec(family), captured(family)
    rows, length = common.packed_batch(family).tokens.shape
    stream = (rows, length, spec.d_model)
    assert set(inner) == {"embedded", "decoder", "logits"}
    assert inner["embedded"].shape == stream
    np.testing.assert_array_equal(inner["logits"], logits)
    for block in inner["decoder"].get("body", {}).values():
        assert {x.shape[0] for x in jax.tree.leaves(block)} == {spec.decoder.repeats}
    for block, values in zip(spec.decoder.layers, common.layers(spec.decoder, inner["decoder"]), strict=True):
        mixer, heads = block.mixer, values["attention"]
        assert set(values) >= BLOCK and set(heads) >= ATTENTION
        kv_heads = getattr(mixer, "num_kv_heads", mixer.num_heads)  # latent attention expands to all heads
        widths = common.head_dims(mixer)
        for point, number in (("q", mixer.num_heads), ("k", kv_heads), ("v", kv_heads)):
            assert heads[point].shape[:-1] == (rows, length, number) and heads[point].shape[-1] in widths
        assert heads["probabilities"].shape == (rows, mixer.num_heads, length, length)
        assert {values[point].shape for point in BLOCK - {"attention"}} == {stream}


@pytest.mark.parametrize("family", common.FAMILIES)
def test_probabilities_lie_where_the_layer_may_look(family):
    """Exactly on the visible keys, and rows sum to 1 (to less with sinks, to 0 in padding)."""
    spec, segments = common.tiny_spec(family), common.packed_batch(family).segment_ids
    real = segments > 0
    behind = np.subtract.outer(np.arange(common.LENGTH), np.arange(common.LENGTH))
    same = (segments[:, :, None] == segments[:, None, :]) & real[:, :, None]
    for block, values in zip(
        spec.decoder.layers, common.layers(spec.decoder, captured(family)[1]["decoder"]), strict=True
    ):
        weights, mask = values["attention"]["probabilities"], block.mixer.mask
        seen = same & (behind < (mask.window or common.LENGTH))
        if mask.causal:
            seen &= behind >= 0
        np.testing.assert_array_equal(weights > 0, np.broadcast_to(seen[:, None], weights.shape))
        sums = np.moveaxis(weights.sum(axis=-1), 1, -1)
        if getattr(block.mixer, "sinks", False):
            assert (sums[real] < 1).all()
        else:
            np.testing.assert_allclose(sums[real], 1, atol=1e-5)
        assert (sums[~real] == 0).all()


@pytest.mark.parametrize("family", common.FAMILIES)
def test_residual_is_the_sum_of_its_branches(family):
    """In pre-norm blocks the captured branch outputs are what the stream gains."""
    spec, (_, inner) = common.tiny_spec(family), captured(family)
    stream = inner["embedded"]
    for block, values in zip(spec.decoder.layers, common.layers(spec.decoder, inner["decoder"]), strict=True):
        if block.placement == "pre":
            total = stream + values["attention_out"] + values["ffn_out"]
            np.testing.assert_allclose(values["residual"], total, atol=1e-4)
        assert np.abs(values["residual"] - stream).max() > 0
        stream = values["residual"]


@pytest.mark.parametrize("family", common.FAMILIES)
def test_losses_are_those_of_the_captured_logits(family):
    """The chunked loss equals the full softmax in float64."""
    batch, logits = common.packed_batch(family), captured(family)[0].astype(np.float64)
    top = logits.max(axis=-1)
    norm = top + np.log(np.exp(logits - top[..., None]).sum(axis=-1))
    want = norm - np.take_along_axis(logits, batch.targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(common.packed_result(family).losses, want * batch.weights, atol=2e-5)


@pytest.mark.parametrize("family", common.FAMILIES)
def test_nothing_is_computed_unless_asked(family, monkeypatch):
    net, batch, params = common.model(family, attention="blockwise"), common.packed_batch(family), common.params(family)

    def program() -> str:
        return str(jax.make_jaxpr(lambda p: net.apply({"params": p}, batch.tokens, None, batch.segment_ids))(params))

    with_points = program()
    with monkeypatch.context() as patch:
        # No capture point may leave a trace, and the T×T matrix is made for the curious only.
        patch.setattr(nn.Module, "sow", lambda *args, **kwargs: False)
        patch.setattr(reference, "probabilities", None)
        assert program() == with_points


@pytest.mark.parametrize("family", [family for family in common.FAMILIES if common.routes(family)])
def test_routers_show_their_probabilities_and_picks(family):
    """Weights lie where experts were picked; probabilities are over all experts and prefer the picked ones."""
    spec, inner = common.tiny_spec(family), captured(family)[1]["decoder"]
    for block, values in zip(spec.decoder.layers, common.layers(spec.decoder, inner), strict=True):
        if not isinstance(block.ffn, MoE):
            continue
        ffn = values["ffn"]
        index, probability = ffn["router_index"], ffn["router_probabilities"]
        assert probability.dtype == np.float32 and probability.shape == ffn["router_logits"].shape
        np.testing.assert_allclose(probability.sum(axis=-1), 1, atol=1e-5)
        assert index.shape == ffn["router_weight"].shape == (*probability.shape[:2], block.ffn.top_k)
        if not block.ffn.router.correction and block.ffn.router.groups == 1:
            best = np.argsort(-ffn["router_logits"], axis=-1)[..., : block.ffn.top_k]
            np.testing.assert_array_equal(np.sort(index), np.sort(best))
