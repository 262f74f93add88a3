"""Law: a Hugging Face checkpoint gives the outputs, gradients and tokens that `transformers` gives.

Every case ran there in float32 (`tests/golden/README.md`). The noise between two correct float32 programs is about
3e-5 on logits of size 10; a wrong detail moves them by 2e-3 and more.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import transformer
from tests import common
from tests.checkpoints import common as golden
from transformer import spec
from transformer.checkpoints import hugging_face
from transformer.generation import generate
from transformer.nn.model import Transformer
from transformer.ops import rope
from transformer.ops.sampling import Sampling

LIMIT = 3e-4
ROUTER = ("logits", "index", "weight")
NEW = golden.expected(golden.CASES[0])["gen_tokens"].shape[1]


@pytest.fixture(autouse=True, scope="module")
def quick_compiles():
    """Two thirds of the compile time; the arithmetic is the same."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


class Result(NamedTuple):
    """Logits [B, T, V], hidden states [L + 1, B, T, D] as `transformers` counts them, and each layer's `ROUTER`."""

    logits: np.ndarray
    hidden: np.ndarray
    routers: list[list[np.ndarray] | None]


@functools.cache
def program(model: Transformer):
    """The jitted forward pass that sees inside."""

    def both(net, tokens, positions):
        x, _ = net.features(tokens, positions)
        return x, net.logits(x)

    def run(params, tokens, positions) -> Result:
        (last, logits), state = model.apply({"params": params}, tokens, positions, method=both, mutable="intermediates")
        inner = state["intermediates"]
        layers = common.layers(model.spec.decoder, inner["decoder"])
        # Theirs end with the normed one in place of the last residual.
        hidden = [inner["embedded"], *(layer["residual"] for layer in layers[:-1]), last]
        routers = [
            [layer["ffn"][f"router_{name}"] for name in ROUTER] if isinstance(block.ffn, spec.MoE) else None
            for block, layer in zip(model.spec.decoder.layers, layers, strict=True)
        ]
        return Result(logits, jax.numpy.stack(hidden), routers)

    return jax.jit(run)


@functools.cache
def forward(case: str, batch: str = "") -> Result:
    """A recorded batch and its recorded continuation in one pass without a cache, so that one program serves all."""
    model, params = golden.imported(case)
    tokens, positions = rows(case, batch)
    return jax.device_get(program(model)(params, tokens, positions))


def mask(case: str, batch: str) -> np.ndarray:
    """Where a batch has tokens."""
    want = golden.expected(case)
    return want[f"{batch}attention_mask"] > 0 if batch else np.ones(want["input_ids"].shape, bool)


def rows(case: str, batch: str) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, positions), each [B, T + NEW]; padding is at position -1."""
    want, real = golden.expected(case), mask(case, batch)
    tokens = want[f"{batch}input_ids"]
    after = want.get(f"{batch}gen_tokens", np.zeros((len(tokens), NEW), np.int32))
    real = np.concatenate([real, np.full(after.shape, f"{batch}gen_tokens" in want)], axis=1)
    positions = np.where(real, np.cumsum(real, axis=1) - 1, -1)
    return np.concatenate([tokens, after], axis=1).astype(np.int32), positions.astype(np.int32)


def close(what: str, got: Any, want: Any, limit: float = LIMIT) -> None:
    """Agrees within `limit`; the figure is printed."""
    assert np.shape(got) == np.shape(want), what
    worst = float(np.abs(np.asarray(got) - want).max())
    print(f"  {what}: {worst:.1e}")
    assert worst <= limit, f"{what}: differs by {worst:.1e}, limit {limit:.1e}"


@pytest.mark.parametrize("case", golden.CASES)
def test_logits_and_hidden_states(case):
    want, got = golden.expected(case), forward(case)
    length = want["input_ids"].shape[1]
    close("logits", got.logits[:, :length], want["logits"])
    assert len(got.hidden) == len(want["hidden_states"])
    for i, states in enumerate(want["hidden_states"]):
        close(f"hidden state {i}", got.hidden[i, :, :length], states)


@pytest.mark.parametrize("case", golden.CASES)
@pytest.mark.parametrize("side", ["padL_", "padR_"])
def test_padding(case, side):
    want, real = golden.expected(case), mask(case, side)
    got = forward(case, side).logits[:, : real.shape[1]]
    assert not real.all()
    close(f"{side}logits", got[real], want[f"{side}logits"][real])


@pytest.mark.parametrize("case", [c for c in golden.CASES if "moe_layers" in golden.expected(c)])
def test_routers(case):
    """The same logits, the same experts, the same weights."""
    want, got = golden.expected(case), forward(case)
    length = want["input_ids"].shape[1]
    assert [i for i, router in enumerate(got.routers) if router] == want["moe_layers"].tolist()
    for i, layer in enumerate(want["moe_layers"]):
        logits, index, weight = (x[:, :length] for x in got.routers[layer])
        order = np.argsort(index, axis=-1)
        close(f"router {layer} logits", logits, want["moe_router_logits"][i])
        np.testing.assert_array_equal(np.take_along_axis(index, order, -1), want["moe_topk_idx"][i])
        close(f"router {layer} weights", np.take_along_axis(weight, order, -1), want["moe_topk_weight"][i])


@pytest.mark.parametrize("case", [c for c in golden.CASES if any("inv_freq" in k for k in golden.expected(c))])
def test_rotations(case):
    """Frequencies and attention factors, of local and global layers where they differ."""
    want, layers = golden.expected(case), golden.imported(case)[0].spec.decoder.layers
    kinds = {
        "rope_": {b.mixer.rope for b in layers},
        "rope_full_attention_": {b.mixer.rope for b in layers if b.mixer.mask.window is None},
        "rope_sliding_attention_": {b.mixer.rope for b in layers if b.mixer.mask.window is not None},
    }
    compared = 0
    for prefix, ropes in kinds.items():
        if f"{prefix}inv_freq" in want:
            (one,) = ropes
            np.testing.assert_allclose(rope.inverse_frequencies(one), want[f"{prefix}inv_freq"], rtol=1e-6)
            np.testing.assert_allclose(rope.rotation_gain(one), want[f"{prefix}attention_scaling"], rtol=1e-6)
            compared += 1
    assert compared == sum(key.endswith("inv_freq") for key in want)


@pytest.mark.parametrize("case", golden.CASES)
def test_loss_and_gradients(case):
    """Of a batch padded on the right whose prompt is masked: the loss, the token table's gradient, the global norm."""
    (model, params), want = golden.imported(case), golden.expected(case)
    tokens, positions = (x[:, :-NEW] for x in rows(case, "padR_"))
    # Their labels lie at the token itself, ours are the next token's.
    labels = np.pad(want["loss_labels"][:, 1:], ((0, 0), (0, 1)), constant_values=-100)
    weights = (labels >= 0).astype(np.float32)
    batch = common.Batch(tokens, np.maximum(labels, 0).astype(np.int32), weights, positions)
    losses, gradients = jax.device_get(common.objective(model)(params, batch))
    gradients = jax.tree.map(lambda x: x / weights.sum(), gradients)
    norm = np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(gradients)))
    close("loss", losses.sum() / weights.sum(), want["loss"], 1e-5)
    scale = float(np.abs(want["grad_embed"]).max())
    close("grad_embed, of its largest", gradients["embedding"]["token"] / scale, want["grad_embed"] / scale)
    close("grad_global_norm, relative", norm / want["grad_global_norm"], 1.0)


@pytest.mark.parametrize("case", golden.CASES)
def test_greedy_tokens(case):
    """Without a cache (the argmax of a full pass over the continuation) and with one; alone and padded alike."""
    (model, params), want = golden.imported(case), golden.expected(case)
    prompts, continuations = [], []
    for batch in ("", "padL_"):
        tokens = want[f"{batch}gen_tokens"]
        steps = forward(case, batch).logits[:, -NEW - 1 : -1]
        np.testing.assert_array_equal(steps.argmax(axis=-1), tokens)
        if not batch:
            close("logits of the steps", steps, want["gen_logits"])
        ids, real = want[f"{batch}input_ids"], mask(case, batch)
        prompts += [row[there].tolist() for row, there in zip(ids, real, strict=True)]
        continuations += tokens.tolist()
    got = generate(model, params, prompts, max_new_tokens=NEW, sampling=Sampling(temperature=0.0))
    assert [list(row.tokens) for row in got] == continuations


@pytest.mark.parametrize("case", [c for c in golden.CASES if "hidden0_bf16" in golden.expected(c)])
def test_scaled_embedding_in_bfloat16(case):
    """The scale is rounded to bfloat16 before it multiplies: exactly the same vectors."""
    model, params = transformer.from_hf(golden.GOLDEN / case, dtype="bfloat16")
    tokens, positions = (x[:, :-NEW] for x in rows(case, ""))
    got = model.apply({"params": params}, tokens, positions, method=lambda net, *args: net.embedding(*args))
    assert got.dtype == jax.numpy.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), golden.expected(case)["hidden0_bf16"])


@pytest.mark.parametrize("case", golden.CASES)
def test_old_and_new_spelling_of_a_config_are_one_model(case):
    new, old = (golden.config(case, file) for file in ("config.json", "config_hub.json"))
    assert new != old
    assert hugging_face.read_spec(new) == hugging_face.read_spec(old)


def test_every_family_with_checkpoints_has_a_case():
    from transformer import families

    covered = {families.of_model_type(golden.config(case)["model_type"]) for case in golden.CASES}
    assert covered == {name for name in families.names() if hasattr(families.get(name), "MODEL_TYPES")}
