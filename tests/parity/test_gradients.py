"""Law: the gradient of every weight is the one that `transformers` computes."""

import jax
import numpy as np
import pytest

from tests import common
from tests.checkpoints import common as golden
from tests.parity import common as parity
from transformer import families
from transformer.checkpoints import weights

pytestmark = pytest.mark.torch
# Weights in few bits are another encoding of the same families.
CASES = [case for case in golden.CASES if not golden.quantized(case)]
# Of a tensor's largest value.
LIMIT = 1e-4
quick_compiles = pytest.fixture(autouse=True, scope="module")(parity.quick_compiles)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """The oracle's answer to every case: a batch padded on the right, whose prompt is masked."""

    def job(case: str) -> parity.Job:
        want = golden.expected(case)
        inputs = dict(input_ids=want["padR_input_ids"], attention_mask=want["padR_attention_mask"])
        return parity.Job(
            {"kind": "gradients", "model": str(golden.GOLDEN / case)}, inputs | {"labels": want["loss_labels"]}
        )

    return parity.ask(tmp_path_factory.mktemp("gradients"), {case: job(case) for case in CASES})


def ours(case: str) -> tuple[float, dict[str, np.ndarray]]:
    """(loss, gradients in their names and layout) of a case."""
    (model, params), want = golden.imported(case), golden.expected(case)
    real = want["padR_attention_mask"] > 0
    positions = np.where(real, np.cumsum(real, axis=1) - 1, -1).astype(np.int32)
    # Their labels lie at the token itself, ours are the next token's.
    labels = np.pad(want["loss_labels"][:, 1:], ((0, 0), (0, 1)), constant_values=-100)
    counted = (labels >= 0).astype(np.float32)
    tokens, targets = want["padR_input_ids"].astype(np.int32), np.maximum(labels, 0).astype(np.int32)
    losses, gradients = jax.device_get(
        common.objective(model)(params, common.Batch(tokens, targets, counted, positions))
    )
    gradients = jax.tree.map(lambda x: x / counted.sum(), gradients)
    table = families.get(model.spec.origin.family).table(model.spec)
    return losses.sum() / counted.sum(), dict(weights.dump(gradients, table, model.spec.decoder))


@pytest.mark.parametrize("case", CASES)
def test_every_weight_has_their_gradient(case, theirs):
    found, _, directory = theirs[case]
    assert "error" not in found, found["error"]
    want = golden.stored(directory / golden.WEIGHTS)
    loss, got = ours(case)
    assert abs(loss - found["loss"]) <= 1e-5
    assert got.keys() == want.keys()
    errors = {}
    for name in sorted(want.keys() - set(found["frozen"])):
        scale = np.abs(want[name]).max()
        # Nobody chose that expert: no noise either.
        assert scale > 0 or not got[name].any(), name
        errors[name] = parity.worst(got[name], want[name]) / scale if scale else 0.0
    name = max(errors, key=errors.get)
    idle = sum(not want[n].any() for n in errors)
    print(f"  {case}: {errors[name]:.1e} of its largest in {name}, worst of {len(errors)} tensors ({idle} are zero)")
    assert idle < len(errors) / 10
    assert errors[name] <= LIMIT, f"{name}: differs by {errors[name]:.1e} of its largest, limit {LIMIT:.1e}"
    # The bias that balances a router chooses and weighs nothing: it has no gradient, and ours is zero.
    assert set(found["frozen"]) == {n for n in want if n.endswith("e_score_correction_bias")}
    assert not any(got[n].any() for n in found["frozen"])
