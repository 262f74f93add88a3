"""Law: a draft changes how many passes generation takes, and nothing else."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tests import common
from tests.generation.common import (
    GREEDY,
    GUESSES,
    LENGTHS,
    NEW,
    PLAIN,
    WITH_MODULE,
    assert_close,
    full_forward,
    greedy,
    prompts,
)
from transformer import families, sharding, spec
from transformer.generation import generate, rounds
from transformer.generation.decode import Plan
from transformer.generation.drafts import OtherModel, OwnModule
from transformer.generation.prompts import make_batches
from transformer.generation.speculative import Statistics, speculate
from transformer.nn import initial
from transformer.nn.model import Transformer
from transformer.ops.sampling import Sampling
from transformer.settings import Compute, Mesh, SettingsError


@functools.cache
def near(family: str) -> tuple[Transformer, dict]:
    """A draft that is often right and often wrong: the model itself with noise in its parameters."""
    rng = np.random.default_rng(1)
    noise = jax.tree.map(
        lambda x: 0.1 * np.std(x) * rng.standard_normal(x.shape).astype(np.float32), common.params(family)
    )
    return common.model(family), jax.tree.map(np.add, common.params(family), noise)


@functools.cache
def other(family: str, vocab_size: int) -> tuple[Transformer, dict]:
    """A tiny model of another family with a vocabulary of `vocab_size`."""
    model = Transformer(
        dataclasses.replace(common.tiny_spec(family), vocab_size=vocab_size), Compute(attention="reference")
    )
    return model, initial.params(model, 0)


def run(family: str, draft, rows=None, **options):
    options = dict(max_new_tokens=NEW, sampling=GREEDY, draft_tokens=GUESSES) | options
    return speculate(common.model(family), common.params(family), rows or prompts(family), draft=draft, **options)


def check(family: str, draft, **options) -> Statistics:
    """Greedy completions are those of plain generation, log probabilities included."""
    completions, statistics = run(family, draft, **options)
    for got, want in zip(completions, greedy(family), strict=True):
        assert (got.tokens, got.reason) == (want.tokens, want.reason)
        assert_close(np.array(got.logprobs), np.array(want.logprobs), "log probabilities")
    drawn, guesses = len(LENGTHS) * (NEW - 1), options.get("draft_tokens", GUESSES)
    assert statistics.drawn == drawn and statistics.guessed <= guesses * statistics.rounds
    # Every round draws what it keeps and one more token, but for the last of a row, which may have no room for it.
    assert statistics.rounds - len(LENGTHS) <= drawn - statistics.kept <= statistics.rounds
    return statistics


# Windows in rings, sinks, a latent, learned positions: whatever a cache can be.
CACHES = {"deepseek_v3", "gemma3", "gpt2", "gpt_oss", "llama3"}


@pytest.mark.parametrize("family", common.often(CACHES, common.DECODERS))
def test_greedy_is_plain_greedy(family):
    """Whatever the masks, the caches and the positions: prompts and answers are longer than the windows."""
    statistics = check(family, near(family))
    assert 0.05 < statistics.acceptance < 0.95


def test_greedy_is_plain_greedy_beyond_a_stream_with_sinks():
    streaming = spec.streaming(common.tiny_spec(PLAIN), sinks=2, window=7)
    model, params = Transformer(streaming, common.model(PLAIN).compute), common.params(PLAIN)
    want = generate(model, params, prompts(PLAIN), max_new_tokens=NEW, sampling=GREEDY)
    options = dict(draft=(model, near(PLAIN)[1]), draft_tokens=GUESSES, max_new_tokens=NEW, sampling=GREEDY)
    got, statistics = speculate(model, params, prompts(PLAIN), **options)
    assert [c.tokens for c in got] == [c.tokens for c in want]
    assert [c.tokens for c in want] != [c.tokens for c in greedy(PLAIN)] and 0.05 < statistics.acceptance < 0.95


@pytest.mark.parametrize(
    ("family", "draft"),
    [
        ("deepseek_v2", "gpt_oss"),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("mistral", "gpt2"), ("gemma3", "llama3"))),
    ],
)
def test_a_draft_of_another_family_changes_nothing(family, draft):
    check(family, other(draft, common.tiny_spec(family).vocab_size))


@pytest.mark.parametrize("guesses", [1, 4])
def test_a_models_own_module_is_a_draft(guesses):
    check(WITH_MODULE, None, draft_tokens=guesses)


def test_the_model_itself_is_always_right():
    statistics = check(PLAIN, (common.model(PLAIN), common.params(PLAIN)))
    assert statistics.kept == statistics.guessed
    # 23 tokens after the first one, four a pass.
    assert statistics.passes == 6 and statistics.mean_length == pytest.approx(23 / 6)
    sampled = run(PLAIN, (common.model(PLAIN), common.params(PLAIN)), sampling=Sampling(temperature=0.8, top_k=20))
    assert sampled[1].acceptance > 0.99


@pytest.mark.parametrize("new", [1, 2, 3, 6])
def test_the_number_of_tokens_is_exact(new):
    completions, statistics = run(PLAIN, near(PLAIN), max_new_tokens=new)
    assert [c.tokens for c in completions] == [c.tokens[:new] for c in greedy(PLAIN)]
    assert {c.reason for c in completions} == {"length"} and statistics.drawn == len(LENGTHS) * (new - 1)


def test_an_end_token_within_a_kept_run_ends_the_row():
    model, params = common.model(PLAIN), common.params(PLAIN)
    for place in range(1, 2 + GUESSES + 1):
        ends = [greedy(PLAIN)[0].tokens[place], greedy(PLAIN)[2].tokens[place + 3]]
        want = generate(model, params, prompts(PLAIN), max_new_tokens=NEW, sampling=GREEDY, eos_ids=ends)
        for draft in ((model, params), near(PLAIN)):
            got, statistics = run(PLAIN, draft, eos_ids=ends)
            assert [(c.tokens, c.reason) for c in got] == [(c.tokens, c.reason) for c in want]
            # The first token of a row is the prefill's, and nothing is drawn behind the end.
            assert statistics.drawn == sum(len(c.tokens) + (c.reason == "eos") - 1 for c in want)
        assert {c.reason for c in want} >= {"eos"}


def test_a_watcher_sees_every_token_in_order_and_ends_its_row():
    seen = {i: [] for i in range(len(LENGTHS))}

    def watch(row, token):
        seen[row].append(token)
        return row == 1 and len(seen[1]) == 5

    completions, _ = run(PLAIN, near(PLAIN), on_token=watch)
    assert [tuple(seen[i]) for i in range(len(LENGTHS))] == [c.tokens for c in completions]
    assert completions[1].reason == "stop" and completions[1].tokens == greedy(PLAIN)[1].tokens[:5]
    assert completions[0].tokens == greedy(PLAIN)[0].tokens


def test_rows_end_at_the_last_learned_position():
    family = "gpt2"
    limit = common.tiny_spec(family).length_limit
    prompt = common.random_tokens(family, 1, limit - 9)[0].tolist()
    model, params = common.model(family), common.params(family)
    want = generate(model, params, [prompt], max_new_tokens=9, sampling=GREEDY)
    got, _ = run(family, near(family), [prompt], max_new_tokens=9)
    assert got[0].tokens == want[0].tokens and np.isfinite(got[0].logprobs).all()
    short = Transformer(dataclasses.replace(model.spec, vocab_size=common.tiny_spec(PLAIN).vocab_size), model.compute)
    with pytest.raises(SettingsError, match=rf"draft=.*{limit} positions.*{limit + 1} are needed"):
        run(PLAIN, (short, {}), [prompt], max_new_tokens=10)


def test_draws_are_the_rows_own_and_have_the_models_log_probabilities():
    options = dict(sampling=Sampling(temperature=1.3, top_p=0.95), draft_tokens=GUESSES)
    completions, statistics = run(PLAIN, near(PLAIN), **options)
    assert 0.05 < statistics.acceptance < 0.95
    alone, _ = run(PLAIN, near(PLAIN), [prompts(PLAIN)[2]], **options)
    assert alone[0].tokens == completions[2].tokens
    rows = [[*p, *c.tokens] for p, c in zip(prompts(PLAIN), completions, strict=True)]
    logprobs = np.asarray(jax.nn.log_softmax(full_forward(PLAIN, rows)))
    for i, (length, done) in enumerate(zip(LENGTHS, completions, strict=True)):
        want = logprobs[i, np.arange(length - 1, length - 1 + NEW), done.tokens]
        assert_close(np.array(done.logprobs), want, f"row {i}")


@pytest.mark.parametrize("family", [PLAIN, WITH_MODULE])
def test_after_every_round_both_caches_hold_what_was_kept(family):
    own = family == WITH_MODULE
    model, params = common.model(family), common.params(family)
    draft, draft_params = (OwnModule(model), params) if own else (OtherModel(near(family)[0]), near(family)[1])
    [batch] = make_batches(model, prompts(family), NEW, 0, size=64, chunk=2048)
    method, plan = GREEDY.method(), Plan(batch.capacity, "float32", chunk=2048, slack=GUESSES)
    models, ends = (model, params, draft, draft_params), np.array([-1], np.int32)
    left = np.full(len(LENGTHS), NEW, np.int32)
    progress, _ = rounds.prefill(*models, batch.tokens, batch.lengths, left, batch.seeds, ends, method, plan)
    for _ in range(4):
        progress, _, _ = rounds.run(*models, progress, np.int32(1), ends, method, plan)
        new, last = progress.positions, progress.target.positions
        for row in range(len(LENGTHS)):
            first = int(new[row, 0])
            assert new[row][new[row] >= 0].tolist() == list(range(first, int(last[row]) + 1))
            # A module keeps a token one position earlier, and has none for the first.
            for cache, size in ((progress.target.cache, int(last[row])), (progress.draft, first - own)):
                for layer in jax.tree.leaves(cache, is_leaf=lambda x: hasattr(x, "positions")):
                    held = np.asarray(layer.positions).reshape(-1, *layer.positions.shape[-2:])[:, row]
                    assert all(sorted(p[p >= 0]) == list(range(size)) for p in held)


def test_prompts_of_one_bucket_share_one_program():
    run(PLAIN, near(PLAIN))
    before = rounds.prefill._cache_size(), rounds.run._cache_size()
    run(PLAIN, near(PLAIN), prompts(PLAIN, seed=1), max_new_tokens=NEW - 1, eos_ids=[3], seed=5)
    assert (rounds.prefill._cache_size(), rounds.run._cache_size()) == before


def test_a_mesh_changes_nothing():
    mesh = sharding.make_mesh(Mesh(data=4, tensor=2))
    model = common.model(PLAIN)
    places = initial.param_shardings(model, mesh)
    draft = model, jax.device_put(near(PLAIN)[1], places)
    with jax.set_mesh(mesh):
        placed = jax.device_put(common.params(PLAIN), places)
        completions, _ = speculate(
            model, placed, prompts(PLAIN), draft=draft, draft_tokens=GUESSES, max_new_tokens=NEW, sampling=GREEDY
        )
    assert [c.tokens for c in completions] == [c.tokens for c in greedy(PLAIN)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(draft=None), r"draft=None: the model has no module"),
        (dict(draft_tokens=0), r"draft_tokens=0: use at least 1"),
        (dict(draft=(Transformer(families.build_spec(common.page("gpt2").get_config("small").model.to_dict())), {})),
         r"draft='a model of 50257 tokens': use one of the model's own vocabulary of \d+"),
        (dict(eos_ids=[10**6]), r"eos_ids=1000000: outside"),
        (dict(max_new_tokens=0), r"max_new_tokens=0: use at least 1"),
    ],
)  # fmt: skip
def test_what_can_not_be_done_is_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        run(PLAIN, **({"draft": near(PLAIN)} | options))


def test_nothing_asked_is_nothing_done():
    assert speculate(common.model(PLAIN), {}, [], draft=near(PLAIN), max_new_tokens=1) == ([], Statistics())


def test_statistics_read_well():
    text = str(Statistics(passes=6, rounds=10, guessed=30, kept=12, drawn=22) + Statistics())
    assert text == "draft: kept 12 of 30 guesses (40%), 2.20 tokens a pass, 6 passes of the model"
