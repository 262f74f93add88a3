"""The choice of block sizes."""

import dataclasses
import itertools

import numpy as np
import pytest

from transformer.kernels import blocks
from transformer.kernels.blocks import CHIPS, Shape
from transformer.ops.mask import visible
from transformer.spec import Mask

CAUSAL = Mask(causal=True)
MASKS = {"full": Mask(causal=False), "causal": CAUSAL, "window": Mask(causal=True, window=1024)}
SINKS = Mask(causal=True, window=40, sinks=3)
SHAPES = [
    Shape(group, length, length, dim, v_dim, itemsize, buckets)
    for group, length, (dim, v_dim), itemsize, buckets in itertools.product(
        (1, 8, 16), (512, 8192), ((64, 64), (192, 128), (256, 256)), (2, 4), (0, 32)
    )
]


@pytest.mark.parametrize("kind", CHIPS)
@pytest.mark.parametrize("mask", MASKS)
def test_a_choice_fits(kind, mask):
    for shape, backward in itertools.product(SHAPES, (False, True)):
        best = blocks.choose(kind, shape, MASKS[mask], backward)
        of_step = dataclasses.replace(shape, group=best.heads)
        assert blocks.vmem_bytes(of_step, best.q, best.k, backward) <= best.vmem < CHIPS[kind].vmem
        assert shape.group % best.heads == 0
        assert best.q % 128 == best.k % 128 == 0


@pytest.mark.parametrize(
    "mask", [*MASKS.values(), Mask(causal=False, window=70), Mask(causal=True, window=40, sinks=3)]
)
@pytest.mark.parametrize(("queries", "keys", "q_block", "k_block"), [(128, 128, 32, 16), (64, 128, 16, 32)])
def test_visited_blocks_are_those_that_show_something(mask, queries, keys, q_block, k_block):
    seen = np.asarray(visible(mask, np.arange(keys - queries, keys), np.arange(keys)))
    seen = seen.reshape(queries // q_block, q_block, keys // k_block, k_block).any((1, 3))
    assert blocks.visited(mask, queries, keys, q_block, k_block) == seen.sum()


def test_a_setting_comes_before_the_choice_where_it_fits():
    shape = Shape(8, 8192, 8192, 128, 128, 2)
    assert blocks.choose("TPU v5", shape, CAUSAL, True, 256)[:2] == (256, 256)
    with pytest.raises(ValueError, match=r"compute\.attention_block=4096: needs .* use a smaller"):
        blocks.choose("TPU v4", shape, CAUSAL, True, 4096)
    short = dataclasses.replace(shape, q_length=200, k_length=200)
    assert blocks.choose("TPU v4", short, CAUSAL, True, 4096)[:2] == (256, 256)


def test_windows_get_smaller_blocks():
    shape = Shape(8, 8192, 8192, 128, 128, 2)
    for kind in CHIPS:
        wide, narrow = (blocks.choose(kind, shape, mask, False) for mask in (CAUSAL, Mask(causal=True, window=128)))
        assert narrow.k < wide.k
