"""What plans compile is what training and generation run: the same functions, arguments of the same shapes."""

import jax
import numpy as np
import pytest

from tests.common import FAMILIES
from transformer import config, programs, sharding
from transformer.generation import decode as decoding
from transformer.ops.sampling import Sampling
from transformer.training.meshes import random_batch

SIZES = {"fsdp": 4, "tensor": 2}
ROWS, LENGTH = 8, 32


def on_mesh(family: str, sizes: dict[str, int]) -> tuple[config.Run, jax.sharding.Mesh]:
    values = config.load_config(f"{family}:tiny").to_dict()
    values["data"] |= dict(seq_len=LENGTH, target_len=None, batch_size=ROWS)
    values["mesh"] |= {"data": 1} | sizes
    run = config.resolve(values)
    return run, sharding.make_mesh(run.settings.mesh)


def shapes(tree) -> list:
    return [
        (jax.tree_util.keystr(path), x.shape, str(x.dtype)) for path, x in jax.tree_util.tree_leaves_with_path(tree)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_are_those_of_training(family):
    run, mesh = on_mesh(family, {"fsdp": 8})
    assert sorted(shapes(programs.abstract_batch(run, mesh))) == sorted(shapes(random_batch(run)))


@pytest.mark.parametrize("family", ["llama3", "gemma3"])
def test_decoding_goes_on_from_what_prefill_leaves(family):
    run, mesh = on_mesh(family, SIZES)
    _, (model, params, state, *_) = programs.decode(run, mesh, ROWS, LENGTH)
    prompts, ones = np.zeros((ROWS, LENGTH), np.int32), np.ones(ROWS, np.int32)
    rest = (
        ones,
        np.zeros((ROWS, 3), np.uint32),
        np.array([decoding.NOTHING], np.int32),
        Sampling(temperature=0.0).method(),
    )
    plan = decoding.Plan(LENGTH, run.settings.compute.dtype, LENGTH)
    with jax.set_mesh(mesh):
        left, _ = jax.eval_shape(lambda p: decoding.prefill(model, p, prompts, ones, *rest, plan), params)
    assert shapes(state) == shapes(left)


@pytest.mark.parametrize(("family", "program"), [("llama3", programs.decode), ("t5", programs.prefill)])
def test_programs_take_their_arguments(family, program):
    run, mesh = on_mesh(family, SIZES)
    make, args = program(run, mesh, ROWS, LENGTH)
    with jax.set_mesh(mesh):
        assert make().lower(*args).as_text()
    _, apart = programs.decode(run, mesh, ROWS, LENGTH, apart=True)
    assert not apart[2].cache.body and len(apart[2].cache.head) == run.spec.decoder.num_layers
