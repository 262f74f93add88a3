"""Parts of arrays against what JAX puts on eight devices."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from transformer import api, settings
from transformer.figures.data import placement
from transformer.sharding import ShardingError, make_mesh

MESHES = [dict(data=2, fsdp=2, tensor=2), dict(fsdp=2, expert=4), dict(tensor=8), dict(data=8)]
WHATS = (
    "embedding/token", "decoder/body/block_0/ffn/experts/up_kernel", "decoder/body/block_0/attention/query/kernel",
    "decoder/final_norm/scale", "activation/features", "activation/heads",
)  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_parts_are_those_of_the_devices(mesh):
    real = make_mesh(settings.Mesh(**{"data": 1, **mesh}))
    for what in WHATS:
        found = placement.place("mixtral:8x7b", what, **mesh)
        index = NamedSharding(real, found.spec).devices_indices_map(found.shape)
        for device, part in zip(real.devices.flat, found.parts, strict=True):
            cut = [s.indices(size)[:2] for s, size in zip(index[device], found.shape, strict=True)]
            assert tuple(cut) == part, (what, device)
        assert sum(np.prod([b - a for a, b in part]) for part in found.parts) == found.copies * np.prod(found.shape)


def test_every_parameter_of_a_model_can_be_placed():
    known = placement.arrays("deepseek_v3:tiny")
    parameters = api.init(api.build("deepseek_v3:tiny"), abstract=True)
    assert len(known) == len(jax.tree.leaves(parameters)) + len(placement.ACTIVATIONS)
    for what in known:
        assert len(placement.place("deepseek_v3:tiny", what, fsdp=2, tensor=2).parts) == 4


def test_wrong_places_are_refused():
    with pytest.raises(ValueError, match=r"what=.embedding.: llama3:tiny has .*embedding/token"):
        placement.place("llama3:tiny", "embedding")
    with pytest.raises(ShardingError, match="3 ways"):
        placement.place("llama3:tiny", "embedding/token", fsdp=3)
