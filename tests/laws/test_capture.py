"""Law: every inner value can be seen, layer by layer, and costs nothing unless asked for."""

import functools

import flax.linen as nn
import jax
import numpy as np
import pytest

from tests import common
from transformer.ops.attention import reference
from transformer.spec import Block, MoE

ATTENTION = {"q", "k", "v", "probabilities"}
BLOCK = {"attention", "attention_out", "ffn_out", "residual"}


@functools.cache
def captured(family: str):
    """Logits of the packed batch, and everything in between."""
    net, batch = common.model(family), common.packed_batch(family)

    def run(params):
        places = batch.tokens, None, batch.segment_ids
        return net.apply({"params": params}, *places, **batch.options, mutable="intermediates")

    logits, state = jax.device_get(jax.jit(run)(common.params(family)))
    return logits, state["intermediates"]


@pytest.mark.parametrize("family", common.FAMILIES)
def test_points_are_there_with_their_shapes(family):
    spec, (logits, inner) = common.tiny_spec(family), captured(family)
    source = {"source_embedded"} if common.reads_source(family) else set()
    assert set(inner) == {"embedded", *spec.stacks, "logits"} | source
    assert inner["embedded"].shape == (*common.packed_batch(family).tokens.shape, spec.d_model)
    np.testing.assert_array_equal(inner["logits"], logits)
    for name, stack in spec.stacks.items():
        for block in inner[name].get("body", {}).values():
            assert {x.shape[0] for x in jax.tree.leaves(block)} == {stack.repeats}
        for block, values in zip(stack.layers, common.layers(stack, inner[name]), strict=True):
            check_points(family, name, block, values)


def check_points(family: str, name: str, block: Block, values) -> None:
    """The captured values of a block of the stack `name`."""
    rows, length = segments_of(family, name).shape
    crosses = {"cross", "cross_out"} if block.cross else set()
    assert set(values) >= BLOCK | crosses
    branches = {point for point in BLOCK | crosses if point not in ("attention", "cross")}
    assert {values[point].shape for point in branches} == {(rows, length, common.tiny_spec(family).d_model)}
    for branch, mixer in (("attention", block.mixer), ("cross", block.cross)):
        if mixer is None:
            continue
        keys = segments_of(family, "encoder").shape[1] if branch == "cross" else length
        kv_heads = getattr(mixer, "num_kv_heads", mixer.num_heads)  # latent attention expands to all heads
        shapes = {"q": (length, mixer.num_heads), "k": (keys, kv_heads), "v": (keys, kv_heads)}
        for point, shape in shapes.items():
            got = values[branch][point].shape
            assert got[:-1] == (rows, *shape) and got[-1] in common.head_dims(mixer)
        assert values[branch]["probabilities"].shape == (rows, mixer.num_heads, length, keys)


def segments_of(family: str, stack: str) -> np.ndarray:
    """Segment ids of what a stack reads."""
    batch = common.packed_batch(family)
    return batch.source.segments if stack == "encoder" and batch.source else batch.segment_ids


@pytest.mark.parametrize("family", common.FAMILIES)
def test_probabilities_lie_where_the_layer_may_look(family):
    """Exactly on the visible keys, and rows sum to 1 (to less with sinks, to 0 in padding)."""
    for name, stack in common.tiny_spec(family).stacks.items():
        for block, values in zip(stack.layers, common.layers(stack, captured(family)[1][name]), strict=True):
            queries, keys = segments_of(family, name), segments_of(family, "encoder")
            check_weights(values["attention"]["probabilities"], block.mixer, queries, queries)
            if block.cross is not None:
                check_weights(values["cross"]["probabilities"], block.cross, queries, keys)


def check_weights(weights: np.ndarray, mixer, queries: np.ndarray, keys: np.ndarray) -> None:
    """Weights [B, N, T, S] are where segments [B, T] and [B, S] and the mask let queries look."""
    real, mask = queries > 0, mixer.mask
    seen = (queries[:, :, None] == keys[:, None, :]) & real[:, :, None]
    behind = np.subtract.outer(np.arange(queries.shape[1]), np.arange(keys.shape[1]))
    if mask.causal:
        seen &= behind >= 0
    if mask.window is not None:
        seen &= np.abs(behind) < mask.window
    np.testing.assert_array_equal(weights > 0, np.broadcast_to(seen[:, None], weights.shape))
    sums, looks = np.moveaxis(weights.sum(axis=-1), 1, -1), seen.any(axis=-1)
    if getattr(mixer, "sinks", False):
        assert (sums[looks] < 1).all()
    else:
        np.testing.assert_allclose(sums[looks], 1, atol=1e-5)
    assert looks.any() and (sums[~looks] == 0).all()


@pytest.mark.parametrize("family", common.FAMILIES)
def test_residual_is_the_sum_of_its_branches(family):
    """In pre-norm blocks the captured branch outputs are what the stream gains."""
    spec, (_, inner) = common.tiny_spec(family), captured(family)
    for name, stack in spec.stacks.items():
        stream = inner["source_embedded" if name == "encoder" and spec.decoder else "embedded"]
        for block, values in zip(stack.layers, common.layers(stack, inner[name]), strict=True):
            if block.placement == "pre":
                total = stream + sum(values[point] for point in values if point.endswith("_out"))
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


# Wherever a point is captured: in every kind of mixer, of feed-forward layer and of stack.
@pytest.mark.parametrize("family", common.often({"bert", "deepseek_v3", "gemma3", "gpt_oss", "t5"}))
def test_nothing_is_computed_unless_asked(family, monkeypatch):
    net, batch, params = common.model(family, attention="blockwise"), common.packed_batch(family), common.params(family)

    def program() -> str:
        places = batch.tokens, None, batch.segment_ids
        return str(jax.make_jaxpr(lambda p: net.apply({"params": p}, *places, **batch.options))(params))

    with_points = program()
    with monkeypatch.context() as patch:
        # No capture point may leave a trace, and the T×T matrix is made for the curious only.
        patch.setattr(nn.Module, "sow", lambda *args, **kwargs: False)
        patch.setattr(reference, "probabilities", None)
        assert program() == with_points


@pytest.mark.parametrize("family", [family for family in common.FAMILIES if common.routes(family)])
def test_routers_show_their_probabilities_and_picks(family):
    """Weights lie where experts were picked; probabilities are over all experts and prefer the picked ones."""
    spec = common.tiny_spec(family)
    for block, values in zip(spec.layers, common.all_layers(spec, captured(family)[1]), strict=True):
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
