"""Multi-token prediction: each depth is the formula, document by document, with and without a cache."""

import dataclasses
import functools

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import common
from transformer import config, families, sharding
from transformer.nn import initial
from transformer.nn.context import make_context
from transformer.nn.model import Transformer
from transformer.nn.multi_token import Stack
from transformer.ops import cache as caches
from transformer.settings import Mesh, SettingsError
from transformer.training import step as steps

FAMILIES = [family for family in common.FAMILIES if common.tiny_spec(family).mtp]
FAMILY, DEPTH, LENGTH = FAMILIES[0], 2, 24
LENGTHS = ((9, 1, 11), (2, 15, 3), (24,), (3, 8, 1, 5))  # of the documents in each row
ROWS, DOCUMENTS = len(LENGTHS), sum(map(len, LENGTHS))
WEIGHT = 0.3


@functools.cache
def model() -> Transformer:
    """The tiny model with two modules instead of one."""
    origin = common.tiny_spec(FAMILY).origin
    return Transformer(
        families.make(origin.family, dataclasses.replace(origin.dims, mtp=DEPTH)), common.model(FAMILY).compute
    )


@functools.cache
def params() -> dict:
    """Parameters of which none is at its initial one or zero."""
    shapes = nn.meta.unbox(initial.abstract_params(model()))
    rng = np.random.default_rng(3)

    def draw(path, leaf):
        noise = rng.standard_normal(leaf.shape).astype(np.float32)
        return 1 + 0.1 * noise if path[-1].key == "scale" else noise / np.sqrt(model().spec.d_model)

    return jax.tree.map_with_path(draw, shapes)


@functools.cache
def batch() -> dict[str, np.ndarray]:
    """Documents of 1, 2 and more tokens, and padding: some are too short for a further token."""
    segments = np.zeros((ROWS, LENGTH), np.int32)
    for row, cuts in zip(segments, LENGTHS, strict=True):
        ends = np.cumsum(cuts)
        for i, (end, size) in enumerate(zip(ends, cuts, strict=True)):
            row[end - size : end] = i + 1
    rng = np.random.default_rng(5)
    tokens, targets = rng.integers(0, model().spec.vocab_size, (2, ROWS, LENGTH), dtype=np.int32)
    for row in range(ROWS):  # the target is the next token where the document goes on
        goes_on = np.append(segments[row, 1:] == segments[row, :-1], False)
        targets[row] = np.where(goes_on, np.roll(tokens[row], -1), targets[row])
    positions = np.full((ROWS, LENGTH), -1, np.int32)
    for row, ids in enumerate(segments):
        for i in range(1, ids.max() + 1):
            positions[row, ids == i] = np.arange((ids == i).sum())
    return {
        "tokens": tokens, "targets": targets, "segment_ids": segments, "positions": positions,
        "weights": (segments > 0).astype(np.float32), "target_bytes": (segments > 0).astype(np.int32),
    }  # fmt: skip


@functools.partial(jax.jit, static_argnames=("method", "mtp_weight"))
def apply(p: dict, *args, method: str = "__call__", **options):
    """A method of the model."""
    return model().apply({"params": p}, *args, method=method, **options)


def rms(x, scale, eps):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + eps) * scale


@jax.jit
def formula(p: dict, tokens: jax.Array) -> list[jax.Array]:
    """Log probabilities [B, T - k, V] that module k gives: equations 21 to 23, one module after the other.

    One document a row, from position 0; causality makes what lies behind its end harmless.
    """
    spec = model().spec
    features, _ = model().apply({"params": p}, tokens, method="features")
    found = []
    for k in range(1, DEPTH + 1):
        # The document that the k-th module sees is shorter by k: nothing stands in for what isn't there.
        module, count = p["mtp"][f"depth_{k - 1}"], tokens.shape[1] - k
        hidden = rms(features[:, :count], module["hidden_norm"]["scale"], spec.mtp.norm.eps)
        token = rms(p["embedding"]["token"][tokens[:, k:]], module["embedding_norm"]["scale"], spec.mtp.norm.eps)
        kernel = module["projection"]["kernel"]
        x = token @ kernel[: spec.d_model] + hidden @ kernel[spec.d_model :]
        context = make_context(spec.ropes, jnp.broadcast_to(jnp.arange(count), x.shape[:2]))
        features, _ = Stack(spec.mtp.decoder, model().compute).apply({"params": module["decoder"]}, x, context, None)
        found.append(jax.nn.log_softmax(features @ p["head"]["kernel"].T))
    return found


def by_formula(documents: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """[DEPTH, T] losses of each document (tokens, targets), NaN where there is none."""
    rows = np.zeros((DOCUMENTS, LENGTH), np.int32)
    for row, (tokens, _) in zip(rows, documents, strict=False):
        row[: len(tokens)] = tokens
    logprobs = [np.asarray(x) for x in formula(params(), rows)]
    losses = [np.full((DEPTH, len(tokens)), np.nan) for tokens, _ in documents]
    for row, (_, targets) in enumerate(documents):
        for k in range(1, DEPTH + 1):
            count = max(len(targets) - k, 0)
            losses[row][k - 1, k:] = -logprobs[k - 1][row, np.arange(count), targets[k:]]
    return losses


@functools.cache
def further() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    b = batch()
    args = b["weights"], b["tokens"], b["targets"], b["positions"], b["segment_ids"]
    found = apply(params(), *args, method="weighed_losses", mtp_weight=WEIGHT)
    return tuple(np.asarray(x) for x in (found.nats, found.further, found.seen))


def test_losses_are_those_of_each_document_by_itself():
    b, (_, losses, seen) = batch(), further()
    want, segments = np.full_like(losses, np.nan), b["segment_ids"]
    places = [(row, segments[row] == i) for row in range(ROWS) for i in range(1, segments[row].max() + 1)]
    for place, found in zip(places, by_formula([(b["tokens"][p], b["targets"][p]) for p in places]), strict=True):
        want[:, *place] = found
    np.testing.assert_array_equal(seen, ~np.isnan(want))
    assert 0 < seen[1].sum() < seen[0].sum() < b["weights"].sum()
    np.testing.assert_allclose(losses[seen > 0], want[seen > 0], rtol=2e-5, atol=2e-5)


def test_rows_without_segments_and_positions_are_one_document():
    b = batch()
    rows = b["weights"][:1], b["tokens"][:1], b["targets"][:1]
    got = apply(params(), *rows, method="weighed_losses", mtp_weight=WEIGHT)
    further, seen = (np.asarray(x)[:, 0] for x in (got.further, got.seen))
    np.testing.assert_array_equal(seen.sum(-1), [LENGTH - 1, LENGTH - 2])
    [want] = by_formula([(b["tokens"][0], b["targets"][0])])
    np.testing.assert_allclose(further[seen > 0], want[~np.isnan(want)], rtol=2e-5, atol=2e-5)


def test_first_losses_and_logits_are_the_models_own():
    b = batch()
    args = b["tokens"], b["targets"], b["positions"], b["segment_ids"]
    want = apply(params(), *args, method="token_losses")
    np.testing.assert_allclose(further()[0], want, rtol=1e-6, atol=1e-6)
    plain = Transformer(dataclasses.replace(model().spec, mtp=None), model().compute)
    rest = {name: x for name, x in params().items() if name != "mtp"}
    np.testing.assert_array_equal(apply(params(), b["tokens"]), jax.jit(plain.apply)({"params": rest}, b["tokens"]))


def test_gradient_is_that_of_the_papers_loss_and_reaches_every_module():
    """Main loss plus λ / D times the sum of the further ones, all divided by the number of tokens.

    In microbatches, and on a mesh.
    """
    b = batch()

    def nats(logits, ahead):  # those of targets so many tokens further
        logprobs = jax.nn.log_softmax(logits)[:, : LENGTH - ahead]
        return -jnp.take_along_axis(logprobs, b["targets"][:, ahead:, None], axis=-1)[..., 0]

    def objective(p):
        run = functools.partial(model().apply, {"params": p})
        where = b["positions"], b["segment_ids"]
        x, _ = run(b["tokens"], *where, method="features")
        total = jnp.sum(nats(run(x, method="logits"), 0) * b["weights"])
        for depth, seen in enumerate(further()[2]):
            after = np.roll(b["tokens"], -depth - 1, axis=1)
            x, _ = run(depth, x, after, *where, method="further")
            weights = (seen * b["weights"])[:, depth + 1 :]
            total += WEIGHT / DEPTH * jnp.sum(nats(run(x, method="logits"), depth + 1) * weights)
        return total / b["weights"].sum()

    want = jax.jit(jax.grad(objective))(params())
    want = jax.device_get(want)
    run = jax.jit(functools.partial(steps.gradients, mtp_weight=WEIGHT), static_argnums=(0, 3))
    got, sums = jax.device_get(run(model(), params(), b, 2))
    common.assert_same_gradients(got, want)
    mesh = sharding.make_mesh(Mesh(data=2, context=2, tensor=2))
    with jax.set_mesh(mesh):
        placed = jax.device_put(params(), initial.param_shardings(model(), mesh))
        got, _ = run(model(), placed, jax.device_put(b, sharding.batch_sharding(mesh)), 1)
    common.assert_same_gradients(jax.device_get(got), want)
    values = steps.means(sums)
    _, losses, seen = further()
    np.testing.assert_allclose(values["mtp_loss"], losses[seen > 0].mean(), rtol=1e-5)
    # Correction biases only pick experts: their gradient is zero everywhere.
    for path, leaf in jax.tree.leaves_with_path(want["mtp"]):
        assert ("correction" in jax.tree_util.keystr(path)) == (np.abs(leaf).max() == 0), path


def test_without_a_weight_no_module_is_run():
    """Its parameters may be missing."""
    rest = {name: x for name, x in params().items() if name != "mtp"}
    _, sums = jax.eval_shape(functools.partial(steps.loss_sums, model()), rest, batch())
    assert "mtp_nats" not in sums
    with pytest.raises(flax.errors.ScopeParamNotFoundError, match=r"mtp|depth_0"):
        jax.eval_shape(functools.partial(steps.loss_sums, model(), mtp_weight=WEIGHT), rest, batch())


def test_a_cache_and_chunks_change_nothing():
    tokens = batch()["tokens"][:2]
    rows, spec, after = len(tokens), model().spec, np.roll(tokens, -1, axis=1)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    x, _ = apply(params(), tokens, method="features")

    @jax.jit
    def run(x, after, positions, cache=None):
        return model().apply({"params": params()}, 0, x, after, positions, None, cache, method="further")

    want, _ = run(x, after, positions)
    cache, parts = caches.init(spec.mtp.decoder, rows, LENGTH, "float32"), []
    for start, stop in ((0, 9), (9, 18), (18, LENGTH)):
        part, cache = run(x[:, start:stop], after[:, start:stop], positions[:, start:stop], cache)
        parts.append(part)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("depth", "weight"), [(1, 0.0), (0, 0.3)])
def test_a_weight_without_a_module_and_a_module_without_a_weight_are_refused(depth, weight):
    page = config.load_config(f"{FAMILY}:tiny")
    page.model.mtp, page.train.mtp_weight = depth, weight
    with pytest.raises(SettingsError, match=rf"train\.mtp_weight={weight}: {depth} modules .*; use "):
        config.resolve(page)
