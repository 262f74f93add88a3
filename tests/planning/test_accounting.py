"""The accounting of every family against the model itself: traced, never run."""

import dataclasses
import importlib.util
from pathlib import Path
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from tests.common import FAMILIES, build_spec, model, page, tiny_spec
from transformer import families, spec
from transformer.nn.context import Source
from transformer.nn.initial import abstract_params
from transformer.nn.model import Transformer
from transformer.ops import cache
from transformer.ops.mask import visible
from transformer.planning import accounting
from transformer.planning.caches import cache_numbers
from transformer.planning.matmuls import matmul_flops
from transformer.settings import Compute

BATCH, LENGTH = 2, 48
TOKENS = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
SIZES = [(family, size) for family in FAMILIES for size in page(family).SIZES]


def shapes_of(net: Transformer):
    return nn.meta.unbox(abstract_params(net))


def size_of(tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def idle_of(model: spec.Model, shapes) -> int:
    """Parameters of the experts that a token does not visit, from the arrays."""
    layers = [block.ffn for block in model.layers if isinstance(block.ffn, spec.MoE)]
    if not layers:
        return 0
    leaves = jax.tree.leaves_with_path(shapes)
    routed = sum(leaf.size for path, leaf in leaves if "['experts']" in jax.tree_util.keystr(path))
    return routed * (layers[0].num_experts - layers[0].top_k) // layers[0].num_experts


def visiting_all(model: spec.Model) -> spec.Model:
    """The same model with every token passing every expert."""

    def opened(block: spec.Block) -> spec.Block:
        if not isinstance(block.ffn, spec.MoE):
            return block
        router = dataclasses.replace(block.ffn.router, groups=1, top_groups=1)
        ffn = dataclasses.replace(block.ffn, router=router, top_k=block.ffn.num_experts)
        return dataclasses.replace(block, ffn=ffn)

    stacks = {name: stack.map(opened) for name, stack in model.stacks.items()}
    mtp = model.mtp and dataclasses.replace(model.mtp, decoder=model.mtp.decoder.map(opened))
    return dataclasses.replace(model, **stacks, mtp=mtp)


def flops_of_all_scores(model: spec.Model, training: bool) -> float:
    """As the reference bodies multiply: all T×S scores, then the mask; all experts, then the router."""
    with mock.patch.object(accounting, "mean_visible", lambda mask, length: length):
        a_token = accounting.flops_per_token(visiting_all(model), LENGTH, training=training).total
    return a_token * BATCH * LENGTH


def source_of(model: spec.Model, tokens) -> dict:
    """What an encoder before a decoder reads: the same tokens."""
    return {"source": Source(tokens)} if len(model.stacks) > 1 else {}


@pytest.mark.parametrize(("family", "size"), SIZES)
def test_parameters_are_those_of_the_model(family, size):
    built = build_spec(family, size)
    count, shapes = accounting.parameters(built), shapes_of(Transformer(built))
    modules = shapes.pop("mtp", ())
    assert count.mtp == size_of(modules)
    assert count.total == size_of(shapes)
    assert count.active == count.total - idle_of(built, shapes)
    assert count.embedding == size_of(shapes["embedding"])
    assert count.head == size_of(shapes.get("head", ()))
    assert count.pooler == size_of(shapes.get("pooler", ()))
    assert count.relative == sum(size_of(shapes[name].get("relative_bias", ())) for name in built.stacks)
    assert count.final_norm == sum(size_of(shapes[name].get("final_norm", ())) for name in built.stacks)
    layers = [layer for name, stack in built.stacks.items() for layer in layers_of(stack, shapes[name])]
    assert [b.total for b in count.blocks] == [size_of(layer) for layer in layers]
    assert [b.attention for b in count.blocks] == [size_of(layer["attention"]) for layer in layers]
    assert [b.cross for b in count.blocks] == [size_of(layer.get("cross", ())) for layer in layers]
    assert [b.ffn for b in count.blocks] == [size_of(layer["ffn"]) for layer in layers]


def layers_of(stack: spec.Stack, shapes) -> list:
    """The shapes of each layer of a stack."""
    layers = [shapes[f"head_{i}"] for i in range(len(stack.head))]
    body = [shapes["body"][f"block_{i}"] for i in range(len(stack.body))]
    layers += jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), body) * stack.repeats
    return layers + [shapes[f"tail_{i}"] for i in range(len(stack.tail))]


@pytest.mark.parametrize("placement", ["pre", "post", "after", "sandwich"])
@pytest.mark.parametrize("joint", [False, True])
def test_norms_are_those_of_the_model_wherever_they_are(placement, joint):
    """Also in places that no family uses."""
    rms = spec.Norm(kind="rms", eps=1e-6, offset=0.0, bias=False, scale_in_float32=False)
    built = tiny_spec("llama3")
    (block,) = built.decoder.body
    mixer = dataclasses.replace(block.mixer, qk_norm=rms, qk_norm_joint=joint)
    block = dataclasses.replace(block, mixer=mixer, placement=placement)
    shapes = shapes_of(
        Transformer(dataclasses.replace(built, decoder=dataclasses.replace(built.decoder, body=(block,))))
    )
    count = accounting.block_parameters(block, built.d_model)
    layers = shapes["decoder"]["body"]["block_0"]
    assert count.attention * built.decoder.repeats == size_of(layers["attention"])
    assert count.total * built.decoder.repeats == size_of(layers)


@pytest.mark.parametrize(("family", "size"), SIZES)
def test_parameters_are_those_published(family, size):
    total = accounting.parameters(build_spec(family, size)).total
    published, rounded = (getattr(page(family), name, {}) for name in ("PARAMETERS", "PARAMETERS_ROUNDED"))
    if size in published:
        assert total == published[size]
    if size in rounded:
        assert total == pytest.approx(rounded[size], rel=0.02)


@pytest.mark.parametrize("unroll", [1, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_forward_flops_are_the_products_of_the_traced_model(family, unroll):
    net = model(family, unroll=unroll)
    built = tiny_spec(family)
    traced = matmul_flops(lambda p, t: net.apply({"params": p}, t, **source_of(built, t)), shapes_of(net), TOKENS)
    assert traced == flops_of_all_scores(tiny_spec(family), training=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_flops_are_the_products_of_the_traced_gradient(family):
    net, further = model(family), tiny_spec(family).mtp is not None

    def loss(params, tokens):
        more = source_of(tiny_spec(family), tokens) | dict(mtp_weight=1.0 if further else 0.0)
        ones = jnp.ones(tokens.shape)
        return net.apply({"params": params}, ones, tokens, tokens, **more, method="weighed_losses").total

    traced = matmul_flops(jax.grad(loss), shapes_of(net), TOKENS)
    assert traced == flops_of_all_scores(tiny_spec(family), training=True)


# Experts run in a loop, whose body the compiler counts once; the traced products above have every trip.
UNLOOPED = [f for f in FAMILIES if not any(isinstance(b.ffn, spec.MoE) for b in tiny_spec(f).layers)]


@pytest.mark.parametrize("family", UNLOOPED)
def test_flops_are_those_the_compiler_counts(family):
    # The compiler counts elementwise work too, so the model is widened until products dominate.
    wide = families.build_spec(page(family).get_config("tiny").model.to_dict() | {"d_model": 576})
    net = Transformer(wide, Compute(attention="reference", unroll=64))
    run = jax.jit(lambda p, t: net.apply({"params": p}, t, **source_of(wide, t)))
    compiled = run.lower(shapes_of(net), TOKENS).compile()
    counted = flops_of_all_scores(wide, training=False)
    assert counted < compiled.cost_analysis()["flops"] < 1.05 * counted


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 7, 8, 20])
@pytest.mark.parametrize("length", [1, 2, 8, 15])
@pytest.mark.parametrize("sinks", [0, 1, 4])
def test_mean_visible_is_the_mean_of_the_mask(causal, window, sinks, length):
    if sinks and not (causal and window):
        pytest.skip("no such mask")
    mask, positions = spec.Mask(causal=causal, window=window, sinks=sinks), jnp.arange(length)
    assert accounting.mean_visible(mask, length) == pytest.approx(
        float(visible(mask, positions, positions).sum(-1).mean())
    )


def test_only_visible_scores_count():
    built = tiny_spec("mistral")
    short, long = (accounting.flops_per_token(built, n, training=False) for n in (8, 4096))
    assert short.projections == long.projections and short.ffn == long.ffn and short.head == long.head
    a = built.decoder.body[0].mixer
    per_key = 4 * a.num_heads * a.head_dim * built.decoder.num_layers
    assert short.scores == per_key * 4.5  # (8 + 1) / 2 keys within a window of 8
    assert long.scores == pytest.approx(per_key * a.mask.window, rel=1e-3)


@pytest.mark.parametrize("source", [1, 7, 48, 100])
@pytest.mark.parametrize("family", [family for family in FAMILIES if len(tiny_spec(family).stacks) > 1])
def test_a_source_of_another_length_is_paid_by_the_tokens_of_the_decoder(family, source):
    net, built = model(family), tiny_spec(family)
    given = jax.ShapeDtypeStruct((BATCH, source), jnp.int32)
    traced = matmul_flops(lambda p, t, s: net.apply({"params": p}, t, source=Source(s)), shapes_of(net), TOKENS, given)
    with mock.patch.object(accounting, "mean_visible", lambda mask, length: length):
        a_token = accounting.flops_per_token(built, LENGTH, training=False, source_len=source)
    assert traced == pytest.approx(a_token.total * BATCH * LENGTH, rel=1e-12)
    for wrong in (dict(source_len=0), dict(source_len=-1)):
        with pytest.raises(ValueError, match=f"source_len={wrong['source_len']}: use at least 1"):
            accounting.flops_per_token(built, LENGTH, training=False, **wrong)
    with pytest.raises(ValueError, match="source_len=3: only a model with an encoder and a decoder"):
        accounting.flops_per_token(tiny_spec("gpt2"), LENGTH, training=False, source_len=3)


def test_distances_with_keys_of_their_own_are_counted():
    """Transformer-XL's scores, which no family has."""
    built = tiny_spec("llama3")

    def change(block: spec.Block) -> spec.Block:
        mixer = dataclasses.replace(block.mixer, rope=None, relative=spec.RelativeKeys(base=1e4))
        return dataclasses.replace(block, mixer=mixer)

    built = dataclasses.replace(built, decoder=built.decoder.map(change))
    net = Transformer(built, Compute(attention="reference"))
    assert accounting.parameters(built).total == size_of(shapes_of(net))
    traced = matmul_flops(lambda p, t: net.apply({"params": p}, t), shapes_of(net), TOKENS)
    assert traced == flops_of_all_scores(built, training=False)


def test_no_tokens_are_refused():
    with pytest.raises(ValueError, match="seq_len=0"):
        accounting.flops_per_token(tiny_spec("gpt2"), 0, training=False)


def allocated(built: spec.Model, length: int, dtype: str, source: int = 0) -> int:
    """Bytes of all buffers of a cache of one row but the slots' positions."""
    held = jax.eval_shape(lambda: cache.init(built.decoder, 1, length, dtype, source_length=source))
    buffers = jax.tree.leaves(held.map(lambda layer: dataclasses.replace(layer, positions=None)))
    return sum(x.size * x.dtype.itemsize for x in buffers)


@pytest.mark.parametrize(("length", "source"), [(3, 3), (8, 20), (100, 1)])
@pytest.mark.parametrize(("family", "size"), SIZES)
def test_cache_is_the_one_that_is_allocated(family, size, length, source):
    built = build_spec(family, size)
    numbers = cache_numbers(built, length, source)
    if built.decoder is None:  # reads its text whole, and keeps nothing
        assert numbers.total == 0 and numbers.source is None
        return
    for dtype in cache.CACHE_DTYPES:
        assert numbers.bytes(dtype) == allocated(built, length, dtype, source)
    held = jax.eval_shape(lambda: cache.init(built.decoder, 1, length, "bfloat16"))
    positions = [layer.mixer.positions for layer in (*held.head, *held.body, *held.tail)]
    assert sum(numbers.slots) == sum(x.size for x in positions)


def test_cache_of_a_stream_is_its_sinks_and_window():
    built = spec.streaming(build_spec("llama3", "8b"), sinks=4, window=1020)
    for length in (500, 1024, 10**6):
        numbers = cache_numbers(built, length)
        assert numbers.slots == (min(length, 1024),) * 32
        assert numbers.bytes("bfloat16") == allocated(built, length, "bfloat16")


@pytest.mark.parametrize("family", [family for family in FAMILIES if tiny_spec(family).decoder])
def test_cache_per_token_is_one_slot_of_each_layer(family):
    built = tiny_spec(family)
    unrolled = cache.init(built.decoder.unrolled, 1, 1, "bfloat16").head
    per_layer = tuple(layer.mixer.keys.size + layer.mixer.values.size for layer in unrolled)
    assert cache_numbers(built, 1).per_token == per_layer


def test_the_page_of_caches_is_what_its_script_writes():
    script = Path(__file__).parents[2] / "benchmarks" / "caches.py"
    module_spec = importlib.util.spec_from_file_location("caches", script)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run benchmarks/caches.py"
