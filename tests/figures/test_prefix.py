"""Which cached keys and values die with a token that changes."""

import numpy as np
import pytest

from transformer.figures.data import prefix


@pytest.mark.parametrize("window", [None, 3])
def test_only_what_reads_the_token_dies(window):
    """Layer l holds what l layers have read: the token's own entry at first, and then as far on as windows reach."""
    dead = prefix.stale(window=window)
    count, layers = dead.shape[0], dead.shape[1]
    behind = np.subtract.outer(np.arange(count), np.arange(count)).T  # [changed, token]
    for layer in range(layers):
        far = 0 if layer == 0 else count if window is None else layer * (window - 1)
        np.testing.assert_array_equal(dead[:, layer], (behind >= 0) & (behind <= far))


def test_without_a_causal_mask_everything_dies_behind_the_first_layer():
    dead = prefix.stale(causal=False)
    np.testing.assert_array_equal(dead[:, 0], np.eye(len(dead), dtype=bool))
    assert dead[:, 1:].all()
