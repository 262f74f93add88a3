"""Models with an encoder: every mechanism of theirs at once, and each by its formula."""

import dataclasses

import jax
import numpy as np
import pytest

from tests import common
from tests.nn.test_model import NORM, apply, random_params
from transformer import sharding, spec
from transformer.nn.context import Memory, Source
from transformer.nn.model import Transformer
from transformer.ops import cache
from transformer.ops.activations import activate
from transformer.ops.norms import normalize
from transformer.settings import Compute, Mesh
from transformer.spec import Mask

FFN = spec.FeedForward(d_ff=24, activation="gelu", gated=False, bias=True)


def attention(causal: bool, relative=None, window: int | None = None, kv_heads: int = 2) -> spec.Attention:
    return spec.Attention(
        num_heads=4,
        num_kv_heads=kv_heads,
        head_dim=4,
        mask=Mask(causal=causal, window=window),
        scale=0.5,
        rope=None,
        qkv_bias=True,
        out_bias=True,
        relative=relative,
    )


def block(mixer: spec.Attention, placement="post", cross: spec.Attention | None = None) -> spec.Block:
    return spec.Block(mixer=mixer, ffn=FFN, norm=NORM, placement=placement, cross=cross)


BOTH_WAYS = spec.RelativeBias(num_buckets=8, max_distance=20, bidirectional=True)
ONE_WAY = spec.RelativeBias(num_buckets=8, max_distance=20, bidirectional=False)
LOOK = attention(False)
READER = block(attention(False, BOTH_WAYS))
WRITER = block(attention(True, ONE_WAY), cross=LOOK)
NEAR_WRITER = block(attention(True, ONE_WAY, window=7), "sandwich", dataclasses.replace(LOOK, qk_norm=NORM))
TRANSLATOR = spec.Model(
    vocab_size=152,
    d_model=16,
    max_length=64,
    embedding=spec.Embedding(scale=4.0, positions=spec.SinusoidalPositions(base=1e4, interleaved=True), norm=NORM),
    encoder=spec.Stack(body=(READER,), repeats=2, final_norm=NORM),
    decoder=spec.Stack(head=(WRITER,), body=(NEAR_WRITER, WRITER), repeats=2, final_norm=NORM),
    decoder_start=3,
    head=spec.Head(tied=True, bias=True, scale=0.25, transform=spec.Transform(activation="gelu", norm=NORM)),
)
READING = spec.Model(
    vocab_size=152,
    d_model=16,
    max_length=64,
    embedding=spec.Embedding(
        scale=None, positions=spec.LearnedPositions(max_length=64), token_types=2, norm=dataclasses.replace(NORM)
    ),
    encoder=spec.Stack(body=(block(attention(False)),), repeats=2, final_norm=None),
    decoder=None,
    head=spec.Head(tied=True, bias=True, transform=spec.Transform(activation="gelu", norm=NORM)),
    pooler=spec.Pooler(classes=3),
)
# Distances have scores of their own (Transformer-XL), and reach 9 keys a layer.
RECURRENT = dataclasses.replace(
    TRANSLATOR,
    embedding=spec.Embedding(scale=None, positions=None),
    encoder=None,
    decoder=spec.Stack(
        body=(block(attention(True, spec.RelativeKeys(base=1e4), window=9)),), repeats=2, final_norm=None
    ),
    decoder_start=None,
)
MODELS = {"translator": TRANSLATOR, "reading": READING, "recurrent": RECURRENT}


def batch(built: spec.Model) -> common.Batch:
    rng = np.random.default_rng(1)
    segments = np.repeat([[1, 2, 0]], [17, 20, 3], axis=1).repeat(4, axis=0)
    tokens, targets = rng.integers(0, 150, (2, 4, 40))
    source = None
    if built.trunk.crosses:
        of_source = np.repeat([[1, 2, 0]], [9, 12, 5], axis=1).repeat(4, axis=0)
        source = Source(rng.integers(0, 150, (4, 26)), None, of_source)
    return common.Batch(tokens, targets, (segments > 0).astype(np.float32), None, segments, source)


@pytest.mark.parametrize("name", MODELS)
def test_every_mechanism_at_once_runs_the_same_in_every_way(name):
    """By another body of attention in blocks, with remat and small chunks, on a mesh."""
    built = MODELS[name]
    base, rows = Transformer(built, Compute(attention="reference")), batch(built)
    params = random_params(base)
    want = jax.device_get(common.objective(base)(params, rows))
    quiet = {"pooler", "content_bias"} if name != "recurrent" else {"pooler"}
    for path, gradient in jax.tree.leaves_with_path(want.gradients):
        if not quiet & {entry.key for entry in path}:
            assert np.abs(gradient).max() > 0, jax.tree_util.keystr(path)
    other = Transformer(built, Compute(attention="blockwise", attention_block=16, remat="dots", loss_chunk=128))
    mesh = sharding.make_mesh(Mesh(data=2, fsdp=2, tensor=2))
    placed = jax.device_put(params, common.shardings(other, mesh))
    with jax.set_mesh(mesh):
        got = common.objective(other)(placed, jax.device_put(rows, sharding.batch_sharding(mesh)))
    common.assert_same(jax.device_get(got), want)


@pytest.mark.parametrize("built", [TRANSLATOR, RECURRENT], ids=["translator", "recurrent"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_decoding_equals_the_full_forward(built, dtype):
    """Chunk by chunk and token by token; what the encoder made is given once, and padded there."""
    net = Transformer(built, Compute(attention="reference"))
    params, rows = random_params(net), batch(built)
    options, first = {}, {}
    if rows.source is not None:
        options["source"] = dataclasses.replace(rows.source, segments=(rows.source.segments == 1).astype(np.int32))
        first["source"] = apply(net, params, options["source"], method="encode")
        assert isinstance(first["source"], Memory) and (first["source"].positions[:, 9:] == -1).all()
        first["source"] = dataclasses.replace(first["source"], segments=None)
    want = apply(net, params, rows.tokens, **options) if not options else None
    if want is None:
        # The padding of the source is said by positions alone, as rows of one document say it.
        want = apply(net, params, rows.tokens, **first)
    positions, state = np.tile(np.arange(40), (4, 1)), cache.init(built.decoder, 4, 40, dtype, source_length=26)
    got = []
    for start, stop in ((0, 10), (10, 20), *((i, i + 1) for i in range(20, 40))):
        here = slice(start, stop)
        x, state = apply(net, params, rows.tokens[:, here], positions[:, here], cache=state, **first, method="features")
        got.append(apply(net, params, x, method="logits"))
        first = {}
    np.testing.assert_allclose(np.concatenate(got, axis=1), want, atol=1e-4 if dtype == "float32" else 0.3)


def test_a_prefix_is_read_in_both_directions():
    """A token of the prefix sees what follows in it; the rest sees the past alone."""
    net = Transformer(
        dataclasses.replace(RECURRENT, decoder=spec.Stack(body=(block(attention(True)),), repeats=1, final_norm=None))
    )
    params, tokens = random_params(net), batch(RECURRENT).tokens[:1, :12]
    orders = np.maximum(np.arange(12), 4)[None]
    plain = apply(net, params, tokens, orders=np.arange(12)[None])
    np.testing.assert_array_equal(plain, apply(net, params, tokens))
    want = apply(net, params, tokens, orders=orders)
    assert (np.abs(want - plain)[0, :4].max(axis=-1) > 0).all()
    changed = tokens.copy()
    changed[0, 4] += 1
    moved = np.abs(apply(net, params, changed, orders=orders) - want)[0].max(axis=-1) > 0
    np.testing.assert_array_equal(moved, np.ones(12, bool))
    changed = tokens.copy()
    changed[0, 7] += 1
    moved = np.abs(apply(net, params, changed, orders=orders) - want)[0].max(axis=-1) > 0
    np.testing.assert_array_equal(moved, np.arange(12) >= 7)


def test_pooler_types_and_transform_are_their_formulas():
    net = Transformer(READING, Compute(attention="reference"))
    params, tokens = random_params(net), batch(READING).tokens[:, :6]
    types = np.tile([0, 0, 1, 1, 0, 1], (4, 1))
    _, state = apply(net, params, tokens, token_types=types, mutable="intermediates")
    table = params["embedding"]
    plain = table["token"][tokens] + table["position"][:6] + table["token_type"][types]
    want = normalize(NORM, plain, table["norm"]["scale"], table["norm"]["bias"])
    np.testing.assert_allclose(state["intermediates"]["embedded"], want, atol=1e-5)
    x, _ = apply(net, params, tokens, method="features")
    pooled, classes = apply(net, params, x, method="pool")
    dense, classifier = params["pooler"]["dense"], params["pooler"]["classifier"]
    np.testing.assert_allclose(pooled, np.tanh(x[:, 0] @ dense["kernel"] + dense["bias"]), atol=1e-5)
    np.testing.assert_allclose(classes, pooled @ classifier["kernel"] + classifier["bias"], atol=1e-5)
    head = params["head"]
    hidden = activate("gelu", x @ head["transform"]["kernel"] + head["transform"]["bias"])
    hidden = normalize(NORM, hidden, head["transform_norm"]["scale"], head["transform_norm"]["bias"])
    np.testing.assert_allclose(apply(net, params, tokens), hidden @ table["token"].T + head["bias"], atol=1e-4)


def test_calls_that_do_not_fit_the_shape_are_refused():
    tokens = np.zeros((1, 4), np.int32)
    nets = {name: Transformer(built, Compute()) for name, built in MODELS.items()}
    params = {name: random_params(net) for name, net in nets.items()}
    with pytest.raises(ValueError, match="cross-attention needs the text that the encoder read"):
        apply(nets["translator"], params["translator"], tokens)
    with pytest.raises(ValueError, match="wrap the tokens"):
        apply(nets["translator"], params["translator"], tokens, source=tokens)
    with pytest.raises(ValueError, match="source: 2 rows, beside 1 rows of tokens"):
        apply(nets["translator"], params["translator"], tokens, source=Source(np.zeros((2, 4), np.int32)))
    with pytest.raises(ValueError, match="source: only a model with an encoder and a decoder"):
        apply(nets["recurrent"], params["recurrent"], tokens, source=Source(tokens))
    with pytest.raises(ValueError, match="an encoder alone has no cache and no orders"):
        apply(nets["reading"], params["reading"], tokens, orders=tokens)
    with pytest.raises(ValueError, match="token_types: this model has none"):
        apply(nets["recurrent"], params["recurrent"], tokens, token_types=tokens)
    state = cache.init(RECURRENT.decoder, 1, 8, "float32")
    with pytest.raises(ValueError, match="orders need all of the prefix in one call"):
        apply(nets["recurrent"], params["recurrent"], tokens, tokens, cache=state, orders=tokens, method="features")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(encoder=None, decoder=None, decoder_start=None), "needs an encoder, a decoder, or both"),
        (dict(encoder=None, decoder_start=None), "none without"),
        (dict(decoder_start=None), "decoder_start=None: use an id below"),
        (dict(decoder_start=152), "decoder_start=152: use an id below vocab_size=152"),
        (dict(decoder=RECURRENT.decoder), "needs cross-attention in its blocks behind an encoder"),
        (dict(encoder=TRANSLATOR.decoder), "model.encoder: its blocks have cross-attention"),
        (dict(encoder=RECURRENT.decoder), "model.encoder: a mask is causal"),
        (dict(pooler=spec.Pooler(classes=None)), "model.pooler: needs an encoder alone"),
    ],
)
def test_shapes_that_contradict_themselves_are_refused(changes, message):
    with pytest.raises(spec.SpecError, match=message):
        dataclasses.replace(TRANSLATOR, **changes)


def test_parts_that_contradict_themselves_are_refused():
    with pytest.raises(spec.SpecError, match=r"block\.cross: sees all of the other text"):
        block(attention(True), cross=attention(True))
    with pytest.raises(spec.SpecError, match="1 of 2 blocks have cross-attention"):
        spec.Stack(head=(WRITER, block(attention(True))), body=(), repeats=0, final_norm=None)
    with pytest.raises(spec.SpecError, match="layers share one table of relative biases, but want 2"):
        spec.Stack(head=(block(attention(True, ONE_WAY)), READER), body=(), repeats=0, final_norm=None)
    with pytest.raises(spec.SpecError, match=r"relative\.num_buckets=7: use at least 4, a multiple of 2"):
        spec.RelativeBias(num_buckets=7, max_distance=20, bidirectional=True)
    with pytest.raises(spec.SpecError, match=r"relative\.max_distance=4: must exceed the 4 distances"):
        spec.RelativeBias(num_buckets=8, max_distance=4, bidirectional=False)
