"""What a step must send is what its compiled program sends, by purpose; nothing is gathered by accident."""

import dataclasses

import jax
import pytest

from transformer import config, sharding
from transformer.nn.model import Transformer
from transformer.planning import traffic
from transformer.planning.collectives import Collective, collectives
from transformer.training.meshes import random_batch
from transformer.training.state import abstract_state
from transformer.training.step import compile_train_step

ROWS, LENGTH = 16, 64
WIDTH = dict(d_model=128, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=16, vocab_size=264)
DENSE, MIXTURE = ("llama3:tiny", dict(d_ff=320)), ("mixtral:tiny", dict(d_ff=64, num_experts=8))


def compiled(page: tuple[str, dict], sizes: dict[str, int]) -> tuple[Transformer, list[Collective]]:
    """A model, and the collectives of its step on host devices."""
    values = config.load_config(page[0]).to_dict()
    values["model"] |= WIDTH | page[1]
    values["data"] |= dict(seq_len=LENGTH, batch_size=ROWS)
    values["compute"] |= dict(attention="reference", experts="capacity")
    values["mesh"] |= {"data": 1} | sizes
    run = config.resolve(values)
    mesh, model = sharding.make_mesh(run.settings.mesh), Transformer(run.spec, run.settings.compute)
    state, place = abstract_state(model, run.settings, mesh), sharding.batch_sharding(mesh)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for name, x in random_batch(run).items()}
    with jax.set_mesh(mesh):
        program = compile_train_step(model, run.settings).lower(state, shapes).compile()
    return model, collectives(program.as_text(), mesh.shape)


def sent(page: tuple[str, dict], sizes: dict[str, int]) -> tuple[dict, dict]:
    """(theory, compiled) on host devices."""
    model, found = compiled(page, sizes)
    return traffic.expected(model, ROWS, LENGTH, sizes, traffic.CPU), traffic.measured(found)


@pytest.mark.parametrize(
    ("page", "sizes"),
    [
        (DENSE, dict(data=2, fsdp=2, tensor=2)),
        (DENSE, dict(fsdp=8)),
        pytest.param(DENSE, dict(data=8), marks=pytest.mark.slow),
        pytest.param(DENSE, dict(tensor=8), marks=pytest.mark.slow),
        (MIXTURE, dict(fsdp=2, expert=4)),
        (DENSE, dict(fsdp=2, context=4)),
    ],
)
def test_a_step_sends_what_it_must(page, sizes):
    want, got = sent(page, sizes)
    for purpose in traffic.PURPOSES:
        # Gathered parameters are told by their kind alone, so that any other gathering shows up among them.
        rel = 1e-3 if purpose == "parameters" else 0.1
        assert got[purpose] == pytest.approx(want[purpose], rel=rel, abs=rel / 10 * sum(want.values())), (want, got)


def test_features_of_tokens_on_two_axes_change_places_on_one_after_the_other():
    """Of both at once, a compiler gathers all features of all tokens on every device."""
    _, found = compiled(DENSE, dict(fsdp=4, context=2))
    moved = {(c.kind, c.axes) for c in found if "/embedding/" in c.origin}
    assert moved == {("all-to-all", ("fsdp",)), ("all-to-all", ("context",))}


def test_compilers_differ_in_sums_alone():
    spec = config.resolve(config.load_config("llama3:tiny")).spec
    of = {c: traffic.expected(Transformer(spec), 8, 16, dict(fsdp=2, tensor=2), c) for c in (traffic.TPU, traffic.CPU)}
    tpu, cpu = of[traffic.TPU], of[traffic.CPU]
    assert [name for name in traffic.PURPOSES if tpu[name] != cpu[name]] == ["activations"]
    assert cpu["activations"] > 1.5 * tpu["activations"]
    alone = traffic.expected(Transformer(spec), 8, 16, {}, dataclasses.replace(traffic.TPU))
    assert not any(alone.values())
