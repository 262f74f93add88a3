"""What models of every family draw greedily through the decode kernel, interpreted, is what they draw through XLA."""

import dataclasses
import functools

import numpy as np
import pytest

from tests import common
from tests.checkpoints import common as golden
from transformer.generation import Completion, generate
from transformer.ops.sampling import Sampling

NEW = 6
# Grouped heads; windows beside full attention, with learned sinks; a latent cache; cross-attention and relative biases.
DEFAULT = ("llama3", "gpt_oss", "deepseek_v3", "t5")


RECORDED = golden.DECODERS + golden.PAIRS
# Nobody published weights of these.
UNRECORDED = [
    family
    for family in common.FAMILIES
    if common.tiny_spec(family).decoder and not any(case.startswith(family) for case in RECORDED)
]


@functools.cache
def completions(case: str, how: str) -> list[Completion]:
    """Greedy continuations of ragged beginnings of recorded or random rows, or answers to them."""
    if case in UNRECORDED:
        model, params, rows = common.model(case), common.params(case), common.random_tokens(case, 3, 20, seed=0)
    else:
        (model, params), rows = golden.imported(case), golden.expected(case)["input_ids"]
    model = model.clone(compute=dataclasses.replace(model.compute, decode_attention=how))
    prompts = [row[: len(row) - 3 * i].tolist() for i, row in enumerate(rows)]
    return generate(model, params, prompts, max_new_tokens=NEW, sampling=Sampling(temperature=0.0))


def speed(case: str):
    return case if case in DEFAULT else pytest.param(case, marks=pytest.mark.slow)


@pytest.mark.parametrize("case", [speed(case) for case in (*RECORDED, *UNRECORDED)])
def test_greedy_tokens_are_the_same(case):
    for got, want in zip(completions(case, "kernel"), completions(case, "xla"), strict=True):
        assert got.tokens == want.tokens
        assert len(want.tokens) == NEW
        np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=0, atol=1e-4)
