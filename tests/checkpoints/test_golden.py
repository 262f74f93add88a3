"""Law: a Hugging Face checkpoint gives the outputs, gradients and tokens that `transformers` gives.

Every case ran there in float32 (`tests/golden/README.md`). The noise between two correct float32 programs is about
3e-5 on logits of size 10; a wrong detail moves them by 2e-3 and more.
"""

import jax
import numpy as np
import pytest

import transformer
from tests.checkpoints import common as golden
from tests.checkpoints import parity
from tests.checkpoints.parity import LIMIT, NEW, close, forward, mask, rows, small
from transformer.checkpoints import hugging_face
from transformer.ops import rope


@pytest.fixture(autouse=True, scope="module")
def quick_compiles():
    """Two thirds of the compile time; the arithmetic is the same."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("case", golden.DECODERS)
def test_logits_and_hidden_states(case):
    small("logits", parity.logits_error(case))
    for i, error in enumerate(parity.hidden_errors(case)):
        small(f"hidden state {i}", error)


@pytest.mark.parametrize("case", golden.DECODERS)
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


@pytest.mark.parametrize("case", golden.DECODERS)
def test_loss_and_gradients(case):
    """Of a batch padded on the right whose prompt is masked: the loss, the token table's gradient, the global norm."""
    for what, error in parity.loss_and_gradient_errors(case).items():
        small(what, error, 1e-5 if what == "loss" else LIMIT)


@pytest.mark.parametrize("case", golden.DECODERS)
def test_greedy_tokens(case):
    """Without a cache (the argmax of a full pass over the continuation) and with one; alone and padded alike."""
    want = parity.recorded_tokens(case)
    np.testing.assert_array_equal(parity.tokens_without_cache(case), want)
    close("logits of the steps", forward(case).logits[:, -NEW - 1 : -1], golden.expected(case)["gen_logits"])
    np.testing.assert_array_equal(parity.tokens_with_cache(case), want)


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
