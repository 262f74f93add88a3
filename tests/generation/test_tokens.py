"""Generation from token ids: ends, hooks, seeds, refusals, compilations, memory, meshes."""

import dataclasses
import functools
import warnings

import flax.linen as nn
import jax
import numpy as np
import pytest

from tests import common
from tests.generation.common import GREEDY, NEW, full_forward, greedy, prompts
from transformer import generation, sharding
from transformer.generation import decode as programs
from transformer.generation.prompts import bucket, make_batches
from transformer.nn.model import Transformer
from transformer.ops.sampling import Sampling
from transformer.settings import Mesh, SettingsError

FAMILY = "llama3"
WARM = Sampling(temperature=1.0)


def generate(rows, family=FAMILY, **options):
    options = {"max_new_tokens": NEW, "sampling": GREEDY, **options}
    return generation.generate(common.model(family), common.params(family), rows, **options)


def test_an_end_token_ends_its_row_alone():
    want = greedy(FAMILY)
    end = want[1].tokens[5]
    for done, whole in zip(generate(prompts(FAMILY), eos_ids=[end]), want, strict=True):
        cut = whole.tokens.index(end) if end in whole.tokens else None
        assert done.tokens == whole.tokens[:cut]
        assert len(done.logprobs) == len(done.tokens)
        assert done.reason == ("length" if cut is None else "eos")


def test_a_row_that_ended_draws_and_writes_nothing_more(monkeypatch):
    end = greedy(FAMILY)[1].tokens[5]
    results, run = [], programs.decode
    monkeypatch.setattr(generation.tokens, "decode", lambda *args: results.append(out := run(*args)) or out)
    done = generate(prompts(FAMILY), eos_ids=[end])[1]
    ((state, drawn),) = results
    assert (np.asarray(drawn.tokens)[1, len(done.tokens) :] == programs.NOTHING).all()
    # The end token itself is never read.
    written = np.asarray(state.cache.body[0].mixer.positions)[:, 1].max()
    assert written == len(prompts(FAMILY)[1]) + len(done.tokens) - 1


def test_an_end_token_drawn_first_gives_an_empty_completion():
    first = greedy(FAMILY)[0].tokens[0]
    done = generate(prompts(FAMILY), eos_ids=[first])[0]
    assert (done.tokens, done.reason) == ((), "eos")


@pytest.mark.parametrize("count", [1, 8, 9, 11])
def test_a_watcher_sees_every_token_and_ends_its_row_exactly(count):
    """Before, on and after the edges of chunks."""
    seen = {i: [] for i in range(4)}

    def watch(row, token):
        seen[row].append(token)
        return row == 2 and len(seen[row]) == count

    want = greedy(FAMILY)
    completions = generate(prompts(FAMILY), on_token=watch)
    for i, done in enumerate(completions):
        assert tuple(seen[i]) == done.tokens == want[i].tokens[: count if i == 2 else None]
        assert done.reason == ("stop" if i == 2 else "length")


def test_a_row_stopped_by_its_watcher_is_finished_on_the_device(monkeypatch):
    states = []
    run = programs.decode

    def spy(model, params, state, *rest):
        states.append(np.asarray(state.left))
        return run(model, params, state, *rest)

    monkeypatch.setattr(generation.tokens, "decode", spy)
    generate(prompts(FAMILY), on_token=lambda row, token: row == 2)
    assert states[-1][2] == 0 and (np.delete(states[-1], 2) > 0).all()


@pytest.mark.parametrize("count", [1, NEW - 5, NEW - 4])
def test_the_number_of_tokens_is_the_one_asked_for(count):
    for done, whole in zip(generate(prompts(FAMILY), max_new_tokens=count), greedy(FAMILY), strict=True):
        assert (done.tokens, done.reason) == (whole.tokens[:count], "length")


def test_samples_do_not_depend_on_the_batch():
    mine, other = prompts(FAMILY), prompts(FAMILY, seed=1)
    want = generate(mine, sampling=WARM, seed=7)
    mixed = generate([other[0], mine[3], other[1], mine[0]], sampling=WARM, seed=7)
    assert [mixed[1].tokens, mixed[3].tokens] == [want[3].tokens, want[0].tokens]
    assert generate([mine[1]], sampling=WARM, seed=7)[0].tokens == want[1].tokens


def test_equal_prompts_are_several_samples_unless_each_has_its_seed():
    prompt, other = prompts(FAMILY)[0], prompts(FAMILY)[1]
    samples = [c.tokens for c in generate([prompt, other, prompt, prompt], sampling=WARM, seed=7)]
    assert len(set(samples)) == 4
    # The first of several draws what it draws alone.
    assert generate([other, prompt, other, other], sampling=WARM, seed=7)[1].tokens == samples[0]
    seeded = [c.tokens for c in generate([prompt, prompt, other, prompt], sampling=WARM, seed=[7, 8, 7, 7])]
    assert seeded[0] == seeded[3] == samples[0]
    assert seeded[1] != seeded[0]


def test_different_prompts_draw_independently():
    """One seed is no common noise: on a flat distribution, equal keys would draw equal tokens."""
    flat = Sampling(temperature=1e6)
    a, b = (c.tokens for c in generate([prompts(FAMILY)[0], prompts(FAMILY, seed=1)[0]], sampling=flat))
    assert sum(x == y for x, y in zip(a, b, strict=True)) < NEW // 2


REFUSALS = {
    r"prompts\[1\]=\[\]: has no tokens": dict(rows=[[1], []]),
    r"prompts\[0\]=264: token id outside": dict(rows=[[3, 264]]),
    r"prompts\[0\]=-1: token id outside": dict(rows=[[-1]]),
    r"prompts\[0\]=\[1\.5\]: expected": dict(rows=[[1.5]]),
    r"max_new_tokens=0: use at least 1": dict(rows=[[1]], max_new_tokens=0),
    r"eos_ids=300: outside": dict(rows=[[1]], eos_ids=[300]),
    r"cache_dtype='float16': use one of": dict(rows=[[1]], cache_dtype="float16"),
    "batch_size=0": dict(rows=[[1]], batch_size=0),
    "prefill_chunk=0": dict(rows=[[1]], prefill_chunk=0),
    r"seed=-1: use an integer": dict(rows=[[1]], seed=-1),
    r"seed=\[1\]: use one seed, or one for each of 2": dict(rows=[[1], [1]], seed=[1]),
    r"max_new_tokens=250: .* ends at 256: .*\(7 tokens\) at most 249 fit": dict(
        rows=[[1], [1] * 7], family="gpt2", max_new_tokens=250
    ),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_cannot_be_generated_is_refused(message):
    with pytest.raises(SettingsError, match=message):
        generate(**REFUSALS[message])


def test_a_learned_position_table_can_be_filled_to_the_end():
    done = generate([[1] * 250], "gpt2", max_new_tokens=6)[0]
    assert len(done.tokens) == 6 and np.isfinite(done.logprobs).all()


@pytest.mark.parametrize("dtype", [None, "bfloat16", "int8"])
def test_the_cache_has_the_dtype_asked_for(dtype, monkeypatch):
    states, run = [], programs.prefill
    monkeypatch.setattr(generation.tokens, "prefill", lambda *args: states.append(out := run(*args)) or out)
    generate(prompts(FAMILY), max_new_tokens=1, cache_dtype=dtype)
    assert states[0][0].cache.body[0].mixer.keys.dtype == (dtype or "float32")


def test_no_prompts_give_no_completions():
    assert generate([]) == []


def test_buckets_hold_their_lengths_and_waste_at_most_half():
    sizes = [bucket(n) for n in range(1, 3000)]
    assert all(n <= size <= max(16, 1.5 * n) for n, size in enumerate(sizes, start=1))
    assert len(set(sizes)) < 20


def test_new_lengths_seeds_and_end_tokens_within_a_bucket_compile_nothing():
    rows = prompts(FAMILY)
    generate(rows, sampling=WARM)
    before = programs_made()
    again = [row[:-1] for row in rows]
    generate(again, sampling=Sampling(temperature=1.0), seed=3, max_new_tokens=NEW - 1, eos_ids=[9])
    generate(again, sampling=WARM, seed=[1, 2, 3, 4], on_token=lambda row, token: token == 7)
    generate(rows, sampling=Sampling(temperature=0.3))
    # An equal model, made anew, is the same program.
    same = Transformer(common.tiny_spec(FAMILY), common.model(FAMILY).compute)
    generation.generate(same, common.params(FAMILY), rows, max_new_tokens=NEW, sampling=WARM)
    assert programs_made() == before


@pytest.mark.parametrize("chunk", [1, 8, 29, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (12, 30))])
def test_prompts_read_in_chunks_draw_the_same(chunk):
    """Edges of chunks on and off the window's, and prompts that end in any of them."""
    for family in ("gemma3", "deepseek_v3"):
        assert [c.tokens for c in generate(prompts(family), family, prefill_chunk=chunk)] == [
            c.tokens for c in greedy(family)
        ]


def test_a_long_prompt_of_another_length_is_read_by_the_same_program():
    generate([[1] * 45], prefill_chunk=16)
    before = programs_made()
    generate([[2] * 41], prefill_chunk=16)
    assert programs_made() == before


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("size", [1, 3])
def test_batches_of_any_size_draw_the_same(size, sampling):
    rows = [*prompts(FAMILY), prompts(FAMILY)[1]]
    told = []
    got = generate(rows, sampling=sampling, batch_size=size, on_batch=lambda *counts: told.append(counts))
    assert [c.tokens for c in got] == [c.tokens for c in generate(rows, sampling=sampling)]
    assert told[-1] == (len(rows), len(rows) * NEW) and len(told) == -(-len(rows) // size)


def test_a_repetition_penalty_counts_the_prompt_and_what_was_drawn():
    rows, penalty = prompts(FAMILY), 1.3
    done = generate(rows, sampling=Sampling(temperature=0.0, repetition_penalty=penalty))
    logits = full_forward(FAMILY, [[*p, *c.tokens] for p, c in zip(rows, done, strict=True)])
    for i, (prompt, completion) in enumerate(zip(rows, done, strict=True)):
        for n, token in enumerate(completion.tokens):
            seen = [*prompt, *completion.tokens[:n]]
            scores = logits[i, len(seen) - 1].copy()
            old = scores[seen]
            scores[seen] = np.where(old > 0, old / penalty, old * penalty)
            assert scores[token] >= scores.max() - 1e-4
    assert [c.tokens for c in done] != [c.tokens for c in greedy(FAMILY)]


def programs_made() -> tuple[int, ...]:
    """How many programs of each kind exist."""
    return tuple(f._cache_size() for f in (programs.absorb, programs.begin, programs.decode))


def compiled_decode(layers: int, cache_dtype: str = "float32"):
    """Memory of the compiled decode program of a deep model with long caches, and bytes of its whole cache."""
    spec = common.tiny_spec(FAMILY)
    decoder = dataclasses.replace(spec.decoder, repeats=layers)
    model = Transformer(dataclasses.replace(spec, decoder=decoder), common.model(FAMILY).compute)
    params = nn.unbox(common.abstract_params(model))
    [batch] = make_batches(model, [[1] * 100] * 4, 900, seed=0, size=4, chunk=2048)
    plan, method, ends = programs.Plan(batch.capacity, cache_dtype, 2048), GREEDY.method(), np.array([-1], np.int32)
    absorb = functools.partial(programs.absorb.__wrapped__, model, read=None, plan=plan)
    read = jax.eval_shape(absorb, params, batch.tokens, np.int32(0), batch.lengths)
    begin = functools.partial(programs.begin.__wrapped__, model)
    rest = batch.tokens, batch.lengths, batch.lengths, batch.seeds, ends, method
    state, _ = jax.eval_shape(begin, params, read.features, read.cache, *rest)
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache))
    return programs.decode.lower(model, params, state, np.int32(8), ends, method).compile().memory_analysis(), whole


@pytest.mark.parametrize("cache_dtype", ["float32", "int8"])
def test_decoding_writes_the_donated_cache_in_place(cache_dtype):
    layers = 12
    memory, whole = compiled_decode(layers, cache_dtype)
    assert whole <= memory.alias_size_in_bytes <= whole + 1024
    # Room to bring one layer into the shape of a matmul, never a second cache.
    assert memory.temp_size_in_bytes < whole / 3


MESHES = {"data_tensor": Mesh(data=4, tensor=2), "fsdp_context_tensor": Mesh(data=1, fsdp=2, context=2, tensor=2)}


@pytest.mark.parametrize("family", [FAMILY, "gemma3"])
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_a_mesh_changes_nothing(family, sizes):
    mesh = sharding.make_mesh(sizes)
    model = common.model(family)
    params = jax.device_put(common.params(family), common.shardings(model, mesh))
    ask = functools.partial(generation.generate, model, params, max_new_tokens=NEW, sampling=GREEDY)
    want = greedy(family)
    before = programs_made()
    with jax.set_mesh(mesh), warnings.catch_warnings():
        # A cache that comes back laid out otherwise could not be reused: JAX would warn.
        warnings.simplefilter("error")
        completions = ask(prompts(family), on_token=lambda row, token: False)
        # Fewer prompts than the mesh has parts: empty rows fill it up.
        some = ask(prompts(family)[:3])
    assert [c.tokens for c in completions] == [c.tokens for c in want]
    assert [c.tokens for c in some] == [c.tokens for c in completions[:3]]
    assert programs_made() == tuple(n + 1 for n in before)
