"""What recorded models draw greedily through the decode kernel, interpreted, is what they draw through XLA."""

import dataclasses
import functools

import numpy as np
import pytest

from tests.checkpoints import common as golden
from transformer.generation import generate
from transformer.ops.sampling import Sampling

NEW = 6
# Grouped heads, a window beside full attention with sinks learned, a latent cache: the rest of the families is slow.
DEFAULT = ("llama3", "gpt_oss", "deepseek_v3")


@functools.cache
def completions(case: str, how: str) -> list[list[int]]:
    """Greedy continuations of ragged beginnings of the recorded rows."""
    model, params = golden.imported(case)
    model = model.clone(compute=dataclasses.replace(model.compute, decode_attention=how))
    rows = golden.expected(case)["input_ids"]
    prompts = [row[: len(row) - 3 * i].tolist() for i, row in enumerate(rows)]
    drawn = generate(model, params, prompts, max_new_tokens=NEW, sampling=Sampling(temperature=0.0))
    return [list(one.tokens) for one in drawn]


@pytest.mark.parametrize(
    "case", [case if case in DEFAULT else pytest.param(case, marks=pytest.mark.slow) for case in golden.DECODERS]
)
def test_greedy_tokens_are_the_same(case):
    got, want = completions(case, "kernel"), completions(case, "xla")
    assert all(len(row) for row in want)
    np.testing.assert_equal(got, want)
