"""Law: a mixture of experts decodes the same tokens whoever else is in the batch, however its experts are run."""

import jax
import pytest

from tests import common
from tests.generation.common import GREEDY, NEW, generate, greedy, prompts
from transformer import sharding
from transformer.nn import initial
from transformer.settings import Mesh

MIXTURES = [family for family in common.FAMILIES if common.routes(family)]


@pytest.mark.parametrize("family", MIXTURES)
def test_sorted_tokens_decode_as_all_experts_do_with_any_batch_mates(family):
    mine, others = prompts(family), prompts(family, seed=1)
    net = common.model(family, experts="grouped")
    mixed = [others[3], mine[2], mine[0], others[1]]
    completions = generate(net, common.params(family), mixed, max_new_tokens=NEW, sampling=GREEDY)
    for place, row in ((1, 2), (2, 0)):
        assert completions[place].tokens == greedy(family)[row].tokens


def test_experts_on_other_devices_decode_the_same():
    family = MIXTURES[0]
    net, mesh = common.model(family, experts="grouped"), sharding.make_mesh(Mesh(data=1, expert=2), jax.devices()[:2])
    params = jax.device_put(common.params(family), initial.param_shardings(net, mesh))
    with jax.set_mesh(mesh):
        completions = generate(net, params, prompts(family), max_new_tokens=NEW, sampling=GREEDY)
    assert [c.tokens for c in completions] == [c.tokens for c in greedy(family)]
