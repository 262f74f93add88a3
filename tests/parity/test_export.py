"""Law: `transformers` loads what we export, lacking nothing, and computes the same logits."""

import pytest

import transformer
from tests import common
from tests.parity import common as parity
from transformer import families

pytestmark = pytest.mark.torch
EXPORTED = [name for name in families.names() if hasattr(families.get(name), "to_hf")]
quick_compiles = pytest.fixture(autouse=True, scope="module")(parity.quick_compiles)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """The oracle's answer about the tiny model of every family, written by us."""
    root, jobs = tmp_path_factory.mktemp("export"), {}
    for family in EXPORTED:
        directory = root / f"{family}-model"
        transformer.to_hf(common.model(family), common.params(family), directory)
        tokens = common.random_tokens(family, rows=2).astype("int64")
        jobs[family] = parity.Job({"kind": "load", "model": str(directory)}, {"tokens": tokens})
    return parity.ask(root, jobs)


@pytest.mark.parametrize("family", EXPORTED)
def test_an_export_is_loaded_whole_and_computes_the_same(family, theirs):
    answer = theirs[family]
    assert "error" not in answer.found, answer.found["error"]
    assert {"missing_keys", "unexpected_keys", "mismatched_keys"} <= answer.found.keys()
    assert not any(answer.found.values()), answer.found
    want = answer.arrays["logits"]
    got = parity.logits(common.model(family), common.params(family), common.random_tokens(family, rows=2))
    error = parity.worst(got, want)
    print(f"  {family}: logits of size {abs(want).max():.1f} differ by {error:.1e}")
    assert abs(want).max() > 1
    assert error <= parity.LIMIT
