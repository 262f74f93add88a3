"""Laws of rows: packing, padding and batch mates change no token's loss and no gradient.

Where a model reads a source, each document has one of its own length, laid out and padded like it.
"""

import jax
import numpy as np
import pytest

from tests import common
from tests.common import Batch
from transformer.nn.context import Source

SIZE = 13  # of a document: more than a tiny window
SOURCE_SIZE = 11  # of its source
# As the packed batch has them, whose program runs these.
ROWS, LENGTH = 8, common.LENGTH
SOURCE_LENGTH = LENGTH + 8


def documents(family: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets of three documents, [3, SIZE] each."""
    return common.random_tokens(family, 3, SIZE, seed=3), common.random_tokens(family, 3, SIZE, seed=4)


def sources(family: str) -> np.ndarray:
    """What each document is made from, [3, SOURCE_SIZE]."""
    return common.random_tokens(family, 3, SOURCE_SIZE, seed=8)


def lay_out_sources(family: str, places: list[tuple[int, int, int, int]]) -> Source | None:
    """The sources in the rows of their documents, one column further left."""
    if not common.reads_source(family):
        return None
    tokens = common.random_tokens(family, ROWS, SOURCE_LENGTH, seed=9)
    segments = np.zeros_like(tokens)
    for row, column, document, segment in places:
        where = row, slice(max(column - 1, 0), max(column - 1, 0) + SOURCE_SIZE)
        tokens[where], segments[where] = sources(family)[document], segment
    return Source(tokens, common.positions_of(segments), segments)


def lay_out(family: str, places: list[tuple[int, int, int, int]]) -> Batch:
    """Documents at (row, column, document, segment id); what is left is padding of random content."""
    tokens, targets = (common.random_tokens(family, ROWS, LENGTH, seed) for seed in (5, 6))
    segments, weights = np.zeros((ROWS, LENGTH), np.int32), np.zeros((ROWS, LENGTH), np.float32)
    for row, column, document, segment in places:
        where = row, slice(column, column + SIZE)
        tokens[where], targets[where] = (part[document] for part in documents(family))
        segments[where], weights[where] = segment, 1
    positions = common.positions_of(segments)
    return Batch(tokens, targets, weights, positions, segments, lay_out_sources(family, places))


def without_padding(family: str) -> Batch:
    """A document a row, and nothing else: a program of its own, which takes most of the time."""
    tokens, targets = documents(family)
    source = Source(sources(family)) if common.reads_source(family) else None
    return Batch(tokens, targets, np.ones(tokens.shape, np.float32), source=source)


def row_for_each(family: str) -> Batch:
    """A document a row, padded: the program that runs the packed ones."""
    return lay_out(family, [(i, 0, i, 1) for i in range(3)])


WAYS = [(family, row_for_each) for family in common.FAMILIES]
WAYS += [
    (family, without_padding) for family in common.FAMILIES if common.tiny_spec(family).encoder or family == "gpt2"
]


@pytest.mark.parametrize(("family", "apart"), WAYS)
def test_packed_documents_equal_each_alone(family, apart):
    """Loss of every token, and the gradient of the sum."""
    run = common.objective(common.model(family))
    alone = jax.device_get(run(common.params(family), apart(family)))
    # Ids are neither sorted nor consecutive, and padding lies before, between and after documents.
    places = [(0, 0, 0, 5), (0, SIZE, 1, 2), (1, 4, 2, 1)]
    packed = jax.device_get(run(common.params(family), lay_out(family, places)))
    for row, column, document, _ in places:
        got = packed.losses[row, column : column + SIZE]
        np.testing.assert_allclose(got, alone.losses[document, :SIZE], rtol=0, atol=2e-5)
    common.assert_same_gradients(packed.gradients, alone.gradients)


def padded(family: str, side: str, *, content: int = 0, mates: int = 1) -> Batch:
    """Document A in row 0 padded on one side, among rows of full length; the weight is on A alone."""
    size = 26
    tokens, targets = (common.random_tokens(family, ROWS, LENGTH, seed) for seed in (10 + mates, 20 + mates))
    tokens[0] = common.random_tokens(family, 1, LENGTH, seed=30 + content)[0]
    start = 0 if side == "right" else LENGTH - size
    here = slice(start, start + size)
    tokens[0, here], targets[0, here] = (common.random_tokens(family, 1, size, seed=seed)[0] for seed in (40, 41))
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    positions[0] = -1
    positions[0, here] = np.arange(size)
    weights = np.zeros(tokens.shape, np.float32)
    weights[0, here] = 1
    source = padded_source(family, side, content, mates) if common.reads_source(family) else None
    return Batch(tokens, targets, weights, positions, np.ones_like(tokens), source)


def padded_source(family: str, side: str, content: int, mates: int) -> Source:
    """The source of document A padded on one side, among rows of full length."""
    size, tokens = 21, common.random_tokens(family, ROWS, SOURCE_LENGTH, seed=50 + mates)
    tokens[0] = common.random_tokens(family, 1, SOURCE_LENGTH, seed=60 + content)[0]
    start = 0 if side == "right" else SOURCE_LENGTH - size
    positions = np.tile(np.arange(SOURCE_LENGTH, dtype=np.int32), (ROWS, 1))
    positions[0] = -1
    positions[0, start : start + size] = np.arange(size)
    tokens[0, start : start + size] = common.random_tokens(family, 1, size, seed=70)[0]
    return Source(tokens, positions, np.ones_like(tokens))


@pytest.mark.parametrize("family", common.FAMILIES)
def test_padding_and_batch_mates_change_nothing(family):
    run = common.objective(common.model(family))

    def result(batch: Batch) -> common.Result:
        losses, gradients = jax.device_get(run(common.params(family), batch))
        return common.Result(losses[batch.weights > 0], gradients)

    right = padded(family, "right")
    want = result(right)
    # The same program on the same rows: equal to the last bit.
    for other in (padded(family, "right", content=1), padded(family, "right", mates=2)):
        jax.tree.map(np.testing.assert_array_equal, result(other), want)
    common.assert_same(result(padded(family, "left")), want)
    # Padding said by segment 0 is padding said by position -1.
    segments = (right.positions >= 0).astype(np.int32)
    by_segment = right._replace(positions=np.maximum(right.positions, 0), segment_ids=segments)
    if right.source is not None:
        segments = (right.source.positions >= 0).astype(np.int32)
        source = Source(right.source.tokens, np.maximum(right.source.positions, 0), segments)
        by_segment = by_segment._replace(source=source)
    common.assert_same(result(by_segment), want)
