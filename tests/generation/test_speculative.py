"""Law: a draft changes how many passes generation takes, and nothing else."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from scipy import stats

from tests import common
from tests.generation.common import GREEDY, LENGTHS, NEW, assert_close, full_forward, greedy, prompts
from transformer import families, sharding, spec
from transformer.generation import generate, rounds
from transformer.generation.decode import Plan
from transformer.generation.drafts import OtherModel, OwnModule
from transformer.generation.prompts import make_batches
from transformer.generation.speculative import Statistics, speculate
from transformer.nn import initial
from transformer.nn.model import Transformer
from transformer.ops.sampling import Sampling, filter_logits
from transformer.settings import Compute, Mesh, SettingsError

GUESSES = 3
PLAIN = "llama3"
WITH_MODULE = next(family for family in common.FAMILIES if common.tiny_spec(family).mtp)


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


@pytest.mark.parametrize("family", common.FAMILIES)
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


@pytest.mark.parametrize(("family", "draft"), [("mistral", "gpt2"), ("gemma3", "llama3"), ("deepseek_v2", "gpt_oss")])
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


VOCAB, ROWS = 5, 1500


@functools.cache
def small(family: str, seed: int) -> tuple[Transformer, dict]:
    """A model of five tokens whose parameters are large enough for its logits to differ."""
    few = dataclasses.replace(common.tiny_spec(family), vocab_size=VOCAB)
    model = Transformer(few, Compute(attention="reference"))
    sharper = jax.tree.map_with_path(
        lambda path, x: x * 1.5 if path[0].key in ("head", "embedding") else x, initial.params(model, seed)
    )
    return model, sharper


def law(model: Transformer, params: dict, prompt: list[int], sampling: Sampling) -> np.ndarray:
    """Exact probability [V ** 3] of the next three tokens, from full forwards over every prefix."""
    ends = list(itertools.product(range(VOCAB), repeat=2))
    rows = np.array([[*prompt, *end] for end in ends], np.int32)
    logits = model.apply({"params": params}, rows)[:, len(prompt) - 1 :]
    filtered = [filter_logits(logits[:, i], sampling.method()) for i in range(3)]
    p = np.stack([jax.nn.softmax(x) for x in filtered], axis=1).astype(np.float64)
    pairs = np.array([p[row, 0, one] * p[row, 1, two] for row, (one, two) in enumerate(ends)])
    triples = (pairs[:, None] * p[:, 2]).reshape(-1)
    return triples / triples.sum()


@pytest.mark.parametrize(
    ("sampling", "own"),
    [(Sampling(), False), (Sampling(temperature=0.7, top_k=4, top_p=0.95, min_p=0.02), False), (Sampling(), True)],
)
def test_three_tokens_are_distributed_as_the_models_own(sampling, own):
    prompt = [1, 4, 2, 0]
    model, params = small(WITH_MODULE if own else PLAIN, 0)
    draft = None if own else small("gpt2", 1)
    options = dict(draft_tokens=2, max_new_tokens=3, sampling=sampling, draft=draft)
    completions, statistics = speculate(model, params, [prompt] * ROWS, **options)
    assert 0.1 < statistics.acceptance < 0.9
    tokens = np.array([c.tokens for c in completions])
    counts = np.bincount(tokens @ [VOCAB**2, VOCAB, 1], minlength=VOCAB**3)
    want = law(model, params, prompt, sampling) * ROWS
    assert counts[want == 0].sum() == 0
    # Rare triples together, so that every cell of the statistic has some.
    rare = want < 5
    pooled, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, want))
    kept = expected > 0
    assert kept.sum() >= 20 and stats.chisquare(pooled[kept], expected[kept]).pvalue > 1e-6


def test_a_module_guesses_what_it_foretells_from_the_models_features_and_then_from_its_own():
    """By full forwards: its guesses are right as often as in the loop, with its cache and after refused guesses."""
    (model, params), prompt, new = small(WITH_MODULE, 0), [1, 4, 2, 0, 3, 3], 24
    (done,), got = speculate(
        model, params, [prompt], draft_tokens=GUESSES, max_new_tokens=new, sampling=GREEDY, draft=None
    )
    text = np.array([*prompt, *done.tokens, *[0] * GUESSES], np.int32)[None]
    features, _ = model.apply({"params": params}, text, method="features")
    index = np.arange(text.shape[1], dtype=np.int32)[None]

    @jax.jit
    def foretell(features, after):
        x, _ = model.apply({"params": params}, 0, features, after, index, method="further")
        return x, model.apply({"params": params}, x, method="logits").argmax(-1)

    last, left, want = len(prompt), new - 1, Statistics()
    while left:
        x, after = np.array(features), np.roll(text, -1, axis=1)
        for i in range(GUESSES):
            further, tokens = foretell(x, after)
            if i + last < text.shape[1]:
                x[:, last + i], after[:, last + i] = further[:, last + i - 1], tokens[:, last + i - 1]
        right = after[0, last : last + GUESSES] == text[0, last + 1 : last + 1 + GUESSES]
        room = min(GUESSES, left)
        kept = int(np.cumprod(right[:room]).sum())
        drawn = min(kept + 1, left)
        want += Statistics(passes=1, rounds=1, guessed=room, kept=kept, drawn=drawn)
        last, left = last + drawn, left - drawn
    assert got == want and 0 < got.kept < got.guessed


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
