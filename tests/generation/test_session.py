"""Laws of a conversation's memory: it draws what a fresh start draws, reads only what is new, compiles once."""

import jax
import numpy as np
import pytest

from tests import common
from tests.generation.common import GREEDY, prompts
from transformer import generation, sharding, spec
from transformer.generation import Session, session
from transformer.generation.meter import Meter
from transformer.ops.sampling import Sampling
from transformer.settings import Mesh, SettingsError
from transformer.tokenizer import ByteTokenizer

# Full layers; windows beside them (rings); latent attention; a learned position table.
FAMILIES = ("llama3", "gemma3", "deepseek_v3", "gpt2")
WARM = Sampling(temperature=1.0, repetition_penalty=1.3)
# What the user says: fewer tokens than a chunk, and more.
SAID = (3, 2, 11, 1)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Tiny models have tiny tables."""
    monkeypatch.setattr(session, "SLACK", 24)


def turns(family: str) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, common.tiny_spec(family).vocab_size, count).tolist() for count in SAID]


def talk(talker, family: str, ask, **options):
    """(prompt, completion) of every turn: each prompt is all that was said and answered before, and a new turn."""
    said, record = [], []
    for turn in turns(family):
        said = [*said, *turn]
        done = ask(said, max_new_tokens=5, **options)
        record.append((said, done))
        said = [*said, *done.tokens]
    return record


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_a_conversation_is_what_fresh_starts_say(family, sampling):
    model, params = common.model(family), common.params(family)
    talker = Session(model, params, capacity=48, chunk=4)
    for prompt, done in talk(talker, family, talker.generate, sampling=sampling, on_token=lambda row, token: False):
        [want] = generation.generate(model, params, [prompt], max_new_tokens=5, sampling=sampling)
        assert (done.tokens, done.reason) == (want.tokens, want.reason)
        np.testing.assert_allclose(done.logprobs, want.logprobs, atol=1e-4)
