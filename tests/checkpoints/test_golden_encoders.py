"""Law: a Hugging Face checkpoint with an encoder gives the outputs, gradients and tokens that `transformers` gives."""

import jax
import numpy as np
import pytest

from tests.checkpoints import common as golden
from tests.checkpoints import parity_encoders as parity
from tests.checkpoints.parity import LIMIT, close, small


@pytest.fixture(autouse=True, scope="module")
def quick_compiles():
    """Two thirds of the compile time; the arithmetic is the same."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("case", parity.CASES)
def test_logits_and_hidden_states(case):
    small("logits", parity.logits_error(case))
    for i, error in enumerate(parity.hidden_errors(case)):
        small(f"hidden state {i}", error)


@pytest.mark.parametrize("case", parity.CASES)
def test_padding(case):
    """Of the text that the encoder reads, on the right."""
    given, want = parity.inputs(case, "padR_"), golden.expected(case)["padR_logits"]
    got = parity.forward(case, "padR_").logits
    assert (given.positions < 0).any()
    real = given.positions >= 0 if case in golden.ENCODERS else np.ones(want.shape[:2], bool)
    close("padR_logits", got[real], want[real])


@pytest.mark.parametrize("case", golden.ENCODERS)
@pytest.mark.parametrize("batch", ["", "padR_"])
def test_pooled_vector_and_its_classifier(case, batch):
    want, got = golden.expected(case), parity.forward(case, batch)
    close("pooled", got.pooled, want[f"{batch}pooled"])
    if not batch:
        close("classes", got.classes, want["nsp_logits"])


@pytest.mark.parametrize("case", golden.ENCODERS)
def test_token_types_are_zero_unless_given(case):
    (model, params), want = golden.imported(case), golden.expected(case)
    got = model.apply({"params": params}, want["input_ids"])
    close("logits without token types", got, want["logits_no_tt"])
    assert np.abs(want["logits_no_tt"] - want["logits"]).max() > 100 * LIMIT


@pytest.mark.parametrize("case", golden.PAIRS)
def test_loss_and_gradients(case):
    """Of a batch whose source is padded: the loss, the token table's gradient, the global norm."""
    for what, error in parity.loss_and_gradient_errors(case).items():
        small(what, error, 1e-5 if what == "loss" else LIMIT)


@pytest.mark.parametrize("case", golden.PAIRS)
def test_greedy_tokens(case):
    """The argmax of full passes over the continuation is the continuation, of whole and of padded sources."""
    np.testing.assert_array_equal(parity.tokens_without_cache(case), parity.recorded_tokens(case))
    want = golden.expected(case)["gen_logits"]
    close("logits of the steps", parity.steps(case)[: len(want)], want)
