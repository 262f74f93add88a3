"""Reading tells of every byte once, and draws a bar only for who waits at a terminal."""

import collections
import io

import jax
import numpy as np
import pytest
from rich.console import Console

import transformer
from tests.checkpoints import common as golden
from transformer import settings, sharding
from transformer.checkpoints import hugging_face
from transformer.checkpoints import source as sources

TIMES = [c for c in golden.CASES if golden.config(c)["model_type"] in ("llama", "qwen3_moe")][:2]


@pytest.mark.parametrize("case", TIMES)
@pytest.mark.parametrize("fsdp", [1, 2])
def test_bytes_add_up(case, fsdp):
    """Leaf by leaf, in more than one step where a leaf has several tensors, and full only when it is made."""
    model = golden.imported(case)[0]
    mesh = sharding.make_mesh(settings.Mesh(data=1, fsdp=fsdp), jax.devices()[:fsdp])
    like = transformer.init(model, mesh=mesh, abstract=True)
    told = collections.defaultdict(list)
    hugging_face.read_params(
        golden.GOLDEN / case, model.spec, like, np.float32, lambda path, count: told[path].append(count)
    )
    sizes = sources.sizes(like)
    assert {path: sum(counts) for path, counts in told.items()} == sizes
    assert all(count >= 0 for counts in told.values() for count in counts)
    assert all(counts[-1] > 0 for counts in told.values())
    assert max(map(len, told.values())) > model.spec.decoder.repeats


@pytest.mark.parametrize(("terminal", "patience", "show", "drawn"), [
    (True, 0.0, True, True), (True, 60.0, True, False), (False, 0.0, True, False), (True, 0.0, False, False),
])  # fmt: skip
def test_bar(terminal, patience, show, drawn, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sources, "Console", lambda **_: Console(file=out, force_terminal=terminal))
    monkeypatch.setattr(sources, "PATIENCE", patience)
    with sources.progress_bar(100, "reading it", show) as advance:
        advance(50)
    assert ("reading it" in out.getvalue()) == drawn


def test_library_use_is_silent(capfd):
    transformer.from_hf(golden.GOLDEN / golden.PLAIN)
    assert capfd.readouterr() == ("", "")
