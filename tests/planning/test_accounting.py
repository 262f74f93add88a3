"""The accounting of every family against the model itself: traced, never run."""

import importlib
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from transformer import families, spec
from transformer.nn.model import Transformer
from transformer.ops import cache
from transformer.ops.mask import visible
from transformer.planning import accounting
from transformer.planning.matmuls import matmul_flops
from transformer.settings import Compute

BATCH, LENGTH = 2, 48
PAGES = {name: importlib.import_module(f"configs.{name}") for name in families.names()}
SIZES = [(name, size) for name, page in PAGES.items() for size in page.SIZES]


def build(family: str, size: str = "tiny") -> spec.Model:
    return families.build_spec(PAGES[family].get_config(size).model.to_dict())


def abstract_parameters(model: Transformer):
    boxed = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 2), jnp.int32))
    return nn.meta.unbox(boxed)["params"]


def size_of(tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def seeing_all(model: spec.Model) -> spec.Model:
    """The same model with every mask open, as the reference body multiplies: all T×S scores, then the mask."""

    def open_masks(blocks):
        everything = spec.Mask(causal=False)
        return tuple(spec.replace(b, mixer=spec.replace(b.mixer, mask=everything)) for b in blocks)

    stack = model.decoder
    ends = {name: open_masks(getattr(stack, name)) for name in ("head", "body", "tail")}
    return spec.replace(model, decoder=spec.replace(stack, **ends))


@pytest.mark.parametrize(("family", "size"), SIZES)
def test_parameters_are_those_of_the_model(family, size):
    model = build(family, size)
    count, shapes = accounting.parameters(model), abstract_parameters(Transformer(model))
    assert count.total == size_of(shapes)
    assert count.embedding == size_of(shapes["embedding"])
    assert count.head == size_of(shapes.get("head", ()))
    assert count.active == count.total
    stack, repeats = shapes["decoder"], model.decoder.repeats
    first = len(model.decoder.head)
    for i in range(len(model.decoder.body)):
        block = jax.tree.map(lambda x: x.size // repeats, stack["body"][f"block_{i}"])
        assert count.blocks[first + i].attention == sum(jax.tree.leaves(block["attention"]))
        assert count.blocks[first + i].ffn == sum(jax.tree.leaves(block["ffn"]))


@pytest.mark.parametrize(("family", "size"), SIZES)
def test_parameters_are_those_published(family, size):
    page, total = PAGES[family], accounting.parameters(build(family, size)).total
    if size in getattr(page, "PARAMETERS", {}):
        assert total == page.PARAMETERS[size]
    elif size in getattr(page, "PARAMETERS_ROUNDED", {}):
        assert total == pytest.approx(page.PARAMETERS_ROUNDED[size], rel=0.02)


@pytest.mark.parametrize("unroll", [1, 64])
@pytest.mark.parametrize("family", families.names())
def test_forward_flops_are_the_products_of_the_traced_model(family, unroll):
    model = build(family)
    run = Transformer(model, Compute(attention="reference", unroll=unroll))
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    traced = matmul_flops(lambda p, t: run.apply({"params": p}, t), abstract_parameters(run), tokens)
    counted = accounting.flops_per_token(seeing_all(model), LENGTH, training=False)
    assert traced == counted.total * BATCH * LENGTH


@pytest.mark.parametrize("family", families.names())
def test_training_flops_are_the_products_of_the_traced_gradient(family):
    model = build(family)
    # One chunk of vocabulary: with several, the loss makes its logits again in the backward pass.
    run = Transformer(model, Compute(attention="reference", loss_chunk=max(model.vocab_size, 128)))
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)

    def loss(params, tokens):
        return run.apply({"params": params}, tokens, tokens, method="token_losses").mean()

    traced = matmul_flops(jax.grad(loss), abstract_parameters(run), tokens)
    counted = accounting.flops_per_token(seeing_all(model), LENGTH, training=True)
    assert traced == counted.total * BATCH * LENGTH


@pytest.mark.parametrize("family", families.names())
def test_flops_are_those_the_compiler_counts(family):
    # The compiler counts elementwise work too, so the model is widened until products dominate.
    page = PAGES[family].get_config("tiny").model.to_dict()
    model = families.build_spec({**page, "d_model": 512})
    run = Transformer(model, Compute(attention="reference", unroll=64))
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    forward = jax.jit(lambda p, t: run.apply({"params": p}, t))
    compiled = forward.lower(abstract_parameters(run), tokens).compile().cost_analysis()["flops"]
    counted = accounting.flops_per_token(seeing_all(model), LENGTH, training=False).total * BATCH * LENGTH
    assert counted < compiled < 1.05 * counted


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 7, 8, 20])
@pytest.mark.parametrize("length", [1, 2, 8, 15])
def test_mean_visible_is_the_mean_of_the_mask(causal, window, length):
    mask, positions = spec.Mask(causal=causal, window=window), jnp.arange(length)
    assert accounting.mean_visible(mask, length) == pytest.approx(
        float(visible(mask, positions, positions).sum(-1).mean())
    )


def test_only_visible_scores_count():
    model = build("mistral")
    short, long = (accounting.flops_per_token(model, n, training=False) for n in (8, 4096))
    assert short.projections == long.projections and short.ffn == long.ffn and short.head == long.head
    a = model.decoder.body[0].mixer
    per_key = 4 * a.num_heads * a.head_dim * model.decoder.num_layers
    assert short.scores == per_key * 4.5  # (8 + 1) / 2 keys within a window of 8
    assert long.scores == pytest.approx(per_key * a.mask.window, rel=1e-3)


def test_no_tokens_are_refused():
    with pytest.raises(ValueError, match="seq_len=0"):
        accounting.flops_per_token(build("gpt2"), 0, training=False)


@pytest.mark.parametrize("length", [3, 8, 100])
@pytest.mark.parametrize(("family", "size"), SIZES)
def test_cache_is_the_one_that_is_allocated(family, size, length):
    model = build(family, size)
    held = jax.eval_shape(lambda: cache.init(model.decoder, 1, length, jnp.bfloat16))
    layers = [*held.head, *held.body, *held.tail]
    numbers = accounting.cache_numbers(model, length)
    assert numbers.total == sum(c.keys.size + c.values.size for c in layers)
    assert numbers.bytes("bfloat16") == 2 * numbers.total
    assert numbers.bytes("float32") == 4 * numbers.total
    assert sum(numbers.slots) == sum(c.positions.size for c in layers)


@pytest.mark.parametrize("family", families.names())
def test_cache_per_token_is_one_slot_of_each_layer(family):
    model = build(family)
    held = jax.eval_shape(lambda: cache.init(model.decoder, 1, 1, jnp.bfloat16))
    body = tuple(2 * math.prod(c.keys.shape[-2:]) for c in held.body)
    head, tail = (tuple(2 * c.keys.size for c in end) for end in (held.head, held.tail))
    assert accounting.cache_numbers(model, 1).per_token == head + body * model.decoder.repeats + tail
