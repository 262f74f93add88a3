"""Laws of rows: packing, padding and batch mates change no token's loss and no gradient."""

import jax
import numpy as np
import pytest

from tests import common
from tests.common import Batch

SIZE = 13  # of a document: more than a tiny window
ROWS, LENGTH = 8, common.LENGTH


def documents(family: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets of three documents, [3, SIZE] each."""
    return common.random_tokens(family, 3, SIZE, seed=3), common.random_tokens(family, 3, SIZE, seed=4)


def lay_out(family: str, places: list[tuple[int, int, int, int]]) -> Batch:
    """Documents at (row, column, document, segment id); what is left is padding of random content."""
    tokens, targets = (common.random_tokens(family, ROWS, LENGTH, seed) for seed in (5, 6))
    segments, weights = np.zeros((ROWS, LENGTH), np.int32), np.zeros((ROWS, LENGTH), np.float32)
    for row, column, document, segment in places:
        where = row, slice(column, column + SIZE)
        tokens[where], targets[where] = (part[document] for part in documents(family))
        segments[where], weights[where] = segment, 1
    return Batch(tokens, targets, weights, None, segments)


@pytest.mark.parametrize("family", common.FAMILIES)
def test_packed_documents_equal_each_alone(family):
    """Loss of every token, and the gradient of the sum."""
    run = common.objective(common.model(family))
    tokens, targets = documents(family)
    alone = jax.device_get(run(common.params(family), Batch(tokens, targets, np.ones(tokens.shape, np.float32))))
    # Ids are neither sorted nor consecutive, and padding lies before, between and after documents.
    places = [(0, 0, 0, 5), (0, SIZE, 1, 2), (1, 4, 2, 1)]
    packed = jax.device_get(run(common.params(family), lay_out(family, places)))
    for row, column, document, _ in places:
        got = packed.losses[row, column : column + SIZE]
        np.testing.assert_allclose(got, alone.losses[document], rtol=0, atol=2e-5)
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
    return Batch(tokens, targets, weights, positions)


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
    by_segment = right._replace(positions=None, segment_ids=(right.positions >= 0).astype(np.int32))
    common.assert_same(result(by_segment), want)
