"""Law: what the publishers wrote is understood. Their configs give their parameter counts, and our pages' specs."""

from pathlib import Path

import pytest

from tests.checkpoints import common as golden
from tests.checkpoints import published
from transformer import families
from transformer.checkpoints import hugging_face
from transformer.planning import accounting
from transformer.settings import SettingsError

PAGE = Path(__file__).parents[2] / "docs" / "families.md"


@pytest.mark.parametrize("name", published.NAMES)
def test_published_config_gives_the_published_model(name):
    read = published.read(name)
    assert published.nameless(read) == published.nameless(published.of_page(name))
    assert accounting.parameters(read).total == published.abstract_count(read) == published.count(name)


@pytest.mark.parametrize("name", published.NAMES)
def test_what_we_would_export_is_the_same_model(name):
    read = published.read(name)
    written = families.get(read.origin.family).to_hf(read.origin.dims)
    assert hugging_face.read_spec(written) == read


def test_every_family_with_checkpoints_has_a_published_config():
    assert set(published.NAMES) == set(published.SIZES)
    covered = {family for family, _ in published.SIZES.values()}
    assert covered == {name for name in families.names() if hasattr(families.get(name), "to_hf")}


def test_a_feed_forward_of_another_width_is_kept():
    """GPT-2's n_inner: null and four times the width are the same model, anything else is not."""
    plain = published.config("gpt2")
    spec = hugging_face.read_spec(plain)
    for inner in (None, 4 * plain["n_embd"]):
        assert hugging_face.read_spec(plain | {"n_inner": inner}) == spec
    wide = hugging_face.read_spec(plain | {"n_inner": 1000})
    assert {block.ffn.d_ff for block in wide.decoder.layers} == {1000}
    written = families.get("gpt2").to_hf(wide.origin.dims)
    assert written["n_inner"] == 1000 and hugging_face.read_spec(written) == wide
    for wrong in (0, -3, 2.5, "x", True):
        with pytest.raises(SettingsError, match="n_inner"):
            hugging_face.read_spec(plain | {"n_inner": wrong})


def test_the_measured_page_has_every_family_and_config():
    """docs/families.md, as far as it can be stale without being measured again."""
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    named = {cells[0].removeprefix("| ") for cells in rows}
    assert {*families.names(), *published.NAMES} <= named
    cases = {case for cells in rows for case in cells[1].split(", ")}
    assert set(golden.CASES) <= cases
