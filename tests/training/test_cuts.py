"""Law: the loss and the gradient of a step are those of its documents, however these are cut.

Documents lie in any rows, at any places, in any order, with padding of any content between them; rows go to
microbatches and devices. Each term of the loss by itself is among the slow proofs, all that a model can have at once
here.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import common
from transformer import sharding
from transformer.nn import initial
from transformer.settings import Balance, Mesh
from transformer.training import step as steps

ROWS, LENGTH = 8, 24
SIZES, SOURCE_SIZES = (9, 12, 7, 5, 3, 8), (8, 11, 6, 5, 4, 9)
FEW = settings(deadline=None, max_examples=8)


class Term(NamedTuple):
    """A family that has a term, what makes it large beside the others, and which tokens are scored."""

    family: str
    terms: dict[str, float]
    balance: Balance = steps.UNBALANCED
    scored: str = "all"


SMOOTH = dict(smoothing=0.2, z=0.05)
TERMS = {
    "cross entropy": Term("gpt2", {}),
    "label smoothing": Term("gpt2", dict(smoothing=0.2)),
    "z-loss": Term("gpt2", dict(z=0.05)),
    "auxiliary": Term("mixtral", {}, Balance(auxiliary=0.5)),
    "auxiliary of a document": Term("mixtral", {}, Balance(sequence=0.5)),
    "router's z": Term("mixtral", {}, Balance(z=0.5)),
    "sigmoid scores": Term("deepseek_v3", {}, Balance(auxiliary=0.5, sequence=0.5)),
    "multi-token": Term("deepseek_v3", dict(mtp_weight=0.5)),
    "hidden tokens": Term("bert", SMOOTH, scored="some"),
    "two sides": Term("t5", SMOOTH),
    "pairs in a row": Term("llama3", SMOOTH, scored="ends"),
    "a prefix": Term("gpt2", SMOOTH, scored="prefix"),
}
TOGETHER = {
    "all of a mixture": Term("deepseek_v3", dict(mtp_weight=0.5, z=0.05), Balance(auxiliary=0.5, sequence=0.5, z=0.5)),
    "two sides": TERMS["two sides"],
    "a prefix": TERMS["a prefix"],
}
Document = dict[str, np.ndarray]


@functools.cache
def documents(term: str) -> list[Document]:
    """Columns of each, and what its encoder reads where there is one."""
    family, _, _, scored = (TERMS | TOGETHER)[term]
    rng, vocab, made = np.random.default_rng(0), common.tiny_spec(family).vocab_size, []
    for size, source in zip(SIZES, SOURCE_SIZES, strict=True):
        tokens, targets = rng.integers(0, vocab, (2, size), dtype=np.int32)
        place, prefix = np.arange(size, dtype=np.int32), size // 2
        weights = {
            "all": np.ones(size),
            "some": rng.random(size) < 0.3,
            "ends": place >= prefix,
            "prefix": place >= prefix - 1,
        }[scored].astype(np.float32)
        document = {"tokens": tokens, "targets": targets, "weights": weights, "positions": place}
        document["target_bytes"] = rng.integers(0, 4, size, dtype=np.int32)
        if scored in ("ends", "prefix"):
            document["orders"] = np.maximum(place, prefix - 1)
        if common.reads_source(family):
            document["source_tokens"] = rng.integers(0, vocab, source, dtype=np.int32)
            document["source_positions"] = np.arange(source, dtype=np.int32)
        made.append(document)
    return made


class Place(NamedTuple):
    """Where a document lies: columns of its text and of its source, and the segment that both are."""

    document: int
    row: int
    column: int
    source_column: int
    segment: int


def lay_out(term: str, places: list[Place]) -> steps.Batch:
    """The batch [ROWS, LENGTH]; padding has tokens of its own."""
    found, rng = documents(term), np.random.default_rng(len(places) + sum(place.column for place in places))
    vocab = common.tiny_spec((TERMS | TOGETHER)[term].family).vocab_size
    batch = {name: np.full((ROWS, LENGTH), _padding(name), x.dtype) for name, x in found[0].items()}
    for name in {"tokens", "targets", "source_tokens"} & batch.keys():
        batch[name] = rng.integers(0, vocab, (ROWS, LENGTH), dtype=np.int32)
    sides = ("", "source_") if "source_tokens" in batch else ("",)
    batch |= {f"{side}segment_ids": np.zeros((ROWS, LENGTH), np.int32) for side in sides}
    for place in places:
        for name, x in found[place.document].items():
            side, start = ("source_", place.source_column) if name in SOURCE else ("", place.column)
            here = place.row, slice(start, start + len(x))
            batch[name][here], batch[f"{side}segment_ids"][here] = x, place.segment
    return batch


SOURCE = {"source_tokens", "source_positions"}


def _padding(name: str) -> int:
    return -1 if name in {"positions", "orders", "source_positions"} else 0


def together(accumulate: int) -> list[Place]:
    """All documents in two rows of one microbatch: the others, and all other rows, are padding."""
    places = []
    for row, here in ((0, (0, 1, 4)), (accumulate % ROWS, (2, 3, 5))):
        ends = np.cumsum([0, *(SIZES[i] for i in here)]), np.cumsum([0, *(SOURCE_SIZES[i] for i in here)])
        places += [Place(i, row, int(ends[0][k]), int(ends[1][k]), k + 1) for k, i in enumerate(here)]
    return places


@st.composite
def layouts(draw) -> list[Place]:
    """Each document somewhere in the first row, from a random one on, that has room for it."""
    used, places = np.zeros((2, ROWS), int), []
    for document in draw(st.permutations(range(len(SIZES)))):
        sizes, row = (SIZES[document], SOURCE_SIZES[document]), draw(st.integers(0, ROWS - 1))
        while any(used[:, row] + sizes > LENGTH):
            row = (row + 1) % ROWS
        starts = [draw(st.integers(int(used[i, row]), LENGTH - sizes[i])) for i in range(2)]
        used[:, row] = np.add(starts, sizes)
        segment = draw(st.integers(1, 9).filter(lambda n: all(p.segment != n for p in places if p.row == row)))
        places.append(Place(document, row, *starts, segment))
    return places


@functools.cache
def program(term: str, accumulate: int) -> Any:
    family, terms, balance, _ = (TERMS | TOGETHER)[term]
    cut = functools.partial(steps.gradients, common.model(family), accumulate=accumulate, balance=balance, **terms)
    return jax.jit(lambda params, batch: cut(params, batch))


@functools.cache
def whole(term: str, accumulate: int) -> tuple[dict, dict]:
    """Gradient and sums of all documents in one microbatch."""
    params = common.params((TERMS | TOGETHER)[term].family)
    return jax.device_get(program(term, accumulate)(params, lay_out(term, together(accumulate))))


def assert_same(got: tuple[dict, dict], want: tuple[dict, dict]) -> None:
    got, want = jax.device_get(got), want
    common.assert_same_gradients(got[0], want[0])
    for (path, a), b in zip(jax.tree.leaves_with_path(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("term", TOGETHER)
@FEW
@given(places=layouts())
def test_how_documents_are_cut_changes_no_loss_and_no_gradient(term, places):
    params = common.params(TOGETHER[term].family)
    assert_same(program(term, 4)(params, lay_out(term, places)), whole(term, 4))


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2, 8])
@pytest.mark.parametrize("term", TERMS)
@FEW
@given(places=layouts())
def test_every_term_is_the_same_in_any_cut(term, accumulate, places):
    params = common.params(TERMS[term].family)
    assert_same(program(term, accumulate)(params, lay_out(term, places)), whole(term, 1))


@pytest.mark.slow
@pytest.mark.parametrize("term", TERMS)
@settings(deadline=None, max_examples=4)
@given(places=layouts())
def test_every_term_is_the_same_on_devices(term, places):
    """Rows over two, their length over two, microbatches of four rows; experts or features over two."""
    family = TERMS[term].family
    last = "expert" if common.routes(family) else "tensor"
    mesh = sharding.make_mesh(Mesh(data=2, context=2, **{last: 2}), jax.devices())
    with jax.set_mesh(mesh):
        params = jax.device_put(common.params(family), initial.param_shardings(common.model(family), mesh))
        batch = jax.device_put(lay_out(term, places), sharding.batch_sharding(mesh))
        got = program(term, 2)(params, batch)
    assert_same(got, whole(term, 1))
