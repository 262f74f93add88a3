"""Memory by analysis: the laws that it obeys, arguments against real shardings, and peaks against compiled programs."""

import dataclasses
import importlib.util
import itertools
import math

import jax
import pytest

from tests.common import FAMILIES, page, tiny_spec
from tests.planning import cuts
from transformer import config, sharding
from transformer.nn.model import Transformer
from transformer.planning import memory, moments, serving
from transformer.planning.caches import cache_numbers
from transformer.planning.leaves import leaves, padded
from transformer.settings import Compute
from transformer.training.state import abstract_state

ONE = dict.fromkeys(sharding.MESH_AXES, 1)


def big(family: str, **compute):
    """A published size, and settings of a training run of it."""
    size = next(name for name in page(family).SIZES if name not in ("tiny", "mini") and not name.startswith("tiny"))
    values = config.load_config(f"{family}:{size}").to_dict()
    values["compute"] |= dict(dtype="bfloat16", remat="full") | compute
    run = config.resolve(values)
    return run.spec, run.settings


@pytest.mark.parametrize(
    ("shape", "tiles"),
    [
        ((256, 512), 256 * 512), ((50257, 256), 50264 * 256), ((4, 256, 16, 64), 4 * 256 * 16 * 64),
        ((4, 16, 64), 4 * 16 * 128), ((3, 5), 8 * 128 // 2), ((7,), 128), ((1536,), 2048), ((30522,), 30720), ((), 128),
    ],
)  # fmt: skip
def test_arrays_come_in_tiles(shape, tiles):
    """Sizes that compiled programs had: the two axes that waste least are the last two."""
    assert padded(shape) == 4 * tiles


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama3", dict(fsdp=8)),
        ("gpt2", dict(data=2, fsdp=2, tensor=2)),
        pytest.param("deepseek_v3", dict(fsdp=2, expert=4), marks=pytest.mark.slow),
    ],
)
def test_parts_of_the_state_are_those_of_the_real_one(family, sizes):
    """Parameters and moments as `training.state` places them, number for number."""
    run = config.resolve(config.load_config(f"{family}:tiny"))
    mesh = sharding.make_mesh(dataclasses.replace(run.settings.mesh, **{"data": 1} | sizes))
    state = abstract_state(Transformer(run.spec, run.settings.compute), run.settings, mesh)
    real = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(state.params))
    beside = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(state.opt_state) if x.ndim)
    ours = sum(math.prod(leaf.local(dict(mesh.shape), "default")) for leaf in leaves(run.spec))
    assert (ours, 2 * ours) == (real, beside)


@pytest.mark.parametrize(
    "fields",
    [
        dict(name="adamw", average_decay=0.9), dict(name="adamw", b2=0.99, moments_dtype="bfloat16"),
        dict(name="lion"), dict(name="adafactor"), dict(name="adafactor", b1=0.0), dict(name="muon"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("family", "sizes"), [("llama3", dict(fsdp=4, tensor=2)), ("mixtral", dict(fsdp=2, expert=4))])
def test_what_an_optimiser_keeps_is_what_the_real_one_does(family, sizes, fields):
    """Whichever it is, byte for byte, on each device, beside counters."""
    values = config.load_config(f"{family}:tiny").to_dict()
    values["model"]["d_model"] = 256  # Adafactor keeps sums of matrices of 128 rows and columns and more
    values["optimizer"] |= fields
    run = config.resolve(values)
    mesh = sharding.make_mesh(dataclasses.replace(run.settings.mesh, **{"data": 1} | sizes))
    state = abstract_state(Transformer(run.spec, run.settings.compute), run.settings, mesh)
    arrays = [x for x in jax.tree.leaves((state.opt_state, state.average)) if x.ndim]
    real = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)
    ours = moments.kept(run.spec, run.settings.optimizer)
    kept = sum(math.prod(k.leaf.local(dict(mesh.shape), "default")) * k.item for k in ours)
    assert real - kept == (12 if fields["name"] == "muon" else 0)  # its three coefficients are no parameter's


@pytest.mark.parametrize("family", FAMILIES)
def test_more_tokens_need_more_and_more_devices_less(family):
    built, run = big(family)
    mesh = ONE | {"fsdp": 8}
    small = memory.train(built, run, mesh, 8, 512)
    assert small.total < memory.train(built, run, mesh, 16, 512).total
    assert small.total < memory.train(built, run, mesh, 8, 1024).total
    wider = memory.train(built, run, ONE | {"fsdp": 16}, 16, 512)
    assert wider.parameters < 0.6 * small.parameters and wider.total < small.total


@pytest.mark.parametrize("family", FAMILIES)
def test_remat_that_keeps_more_needs_more(family):
    """In the order of what is computed again; of rows long enough that layers are the worst moment."""
    needs = []
    for remat, names in (("full", ()), ("names", ("attended",)), ("dots", ()), ("none", ())):
        built, run = big(family, remat=remat, remat_names=names)
        needs.append(memory.train(built, run, ONE | {"fsdp": 8}, 64, 512).total)
    assert all(less < more for less, more in itertools.pairwise(needs))


def test_what_settings_move_out_of_memory_is_gone():
    built, run = big("llama3")
    mesh = ONE | {"fsdp": 64}

    def parts(**groups):
        changed = {n: dataclasses.replace(getattr(run, n), **v) for n, v in groups.items()}
        return memory.train(built, dataclasses.replace(run, **changed), mesh, 256, 4096)

    plain = parts(data=dict(batch_size=256))
    assert plain.optimizer == 2 * plain.parameters
    assert parts(optimizer=dict(moments_dtype="bfloat16")).optimizer == plain.parameters
    assert parts(optimizer=dict(moments_memory="pinned_host")).optimizer == 0
    summed = parts(train=dict(accumulate=4), data=dict(batch_size=256))
    assert summed.gradients >= plain.parameters
    assert sum(summed.activations.values()) < sum(plain.activations.values())
    kept = parts(compute=dict(remat="names", remat_names=("attended", "ffn_up")))
    tokens = 256 * 4096 // 64
    layers = built.decoder.num_layers
    assert kept.activations["attended"] == tokens * 32 * 128 * 2 * layers
    assert kept.activations["ffn_up"] == tokens * 14336 * 2 * layers


@pytest.mark.parametrize("family", [f for f in FAMILIES if tiny_spec(f).decoder is not None])
def test_the_cache_of_decoding_is_the_one_counted(family):
    built, compute = tiny_spec(family), Compute(dtype="bfloat16", rules="decode")
    numbers = cache_numbers(built, 64)
    alone = serving.decode(built, compute, ONE, 4, 64)
    assert alone.cache == 4 * (numbers.bytes("bfloat16") + 4 * sum(numbers.slots))
    split = serving.decode(built, compute, ONE | {"data": 4}, 4, 64)
    assert split.cache * 4 == alone.cache and split.parameters == alone.parameters
    assert serving.prefill(built, compute, ONE, 4, 64).activations["layer"] > alone.activations["layer"]


NAMES = {"compute.remat": "names", "compute.remat_names": ("attended", "ffn_up")}
EXCHANGE = {"compute.expert_exchange": "all_to_all"}
# Cuts at real widths: a page, changes of its model, mesh, rows, tokens, and more settings.
CUTS = {
    "llama3": ("llama3:8b", dict(num_layers=4), {}, 16, 4096, {}),
    "names": ("llama3:8b", dict(num_layers=4), {}, 16, 4096, NAMES),
    "dots": ("llama3:8b", dict(num_layers=4), {}, 16, 4096, {"compute.remat": "dots"}),
    "accumulate": ("llama3:8b", dict(num_layers=4), {}, 16, 4096, {"train.accumulate": 4}),
    "tensor": ("llama3:8b", dict(num_layers=4), {"tensor": 4}, 4, 4096, {}),
    "gpt2": ("gpt2:medium", dict(num_layers=4), {}, 16, 1024, {}),
    "gpt3": ("gpt3:6.7b", dict(num_layers=4), {}, 8, 2048, {}),
    "bert": ("bert:large", dict(num_layers=6), {}, 32, 512, {}),
    "t5": ("t5:3b", {}, {}, 8, 512, {}),
    "vaswani": ("vaswani:big", {}, {}, 32, 512, {}),
    "marian": ("marian:opus-mt-en-de", {}, {}, 32, 512, {}),
    "llama2": ("llama2:7b", dict(num_layers=4), {}, 8, 4096, {}),
    "mistral": ("mistral:7b-v0.1", dict(num_layers=4), {}, 4, 8192, {}),
    "qwen2": ("qwen2:7b", dict(num_layers=6), {}, 8, 4096, {}),
    "qwen3": ("qwen3:4b", dict(num_layers=6), {}, 8, 4096, {}),
    "gemma3": ("gemma3:4b", dict(num_layers=12), {}, 8, 4096, {}),
    "gemma2": ("gemma2:9b", dict(num_layers=8), {}, 8, 4096, {}),
    "olmo2": ("olmo2:7b", dict(num_layers=4), {}, 8, 4096, {}),
    "exchange": ("qwen3_moe:30b-a3b", dict(num_layers=4), {"expert": 4}, 8, 4096, EXCHANGE),
    "mixtral": ("mixtral:8x7b", dict(num_layers=2), {"expert": 4}, 8, 4096, {}),
    "gpt_oss": ("gpt_oss:20b", dict(num_layers=4), {"expert": 4}, 8, 4096, {}),
    "qwen3_moe": ("qwen3_moe:30b-a3b", dict(num_layers=4), {"expert": 4}, 8, 4096, {}),
    "deepseek_v2": ("deepseek_v2:lite", dict(num_layers=3), {"expert": 4}, 8, 4096, {}),
    "deepseek_v3": ("deepseek_v3:671b", dict(num_layers=3, dense_layers=1, num_experts=32), {"expert": 4}, 4, 4096, {}),
}  # fmt: skip


def cut(name: str) -> tuple[config.Run, dict[str, int], dict]:
    reference, changes, mesh, rows, length, more = CUTS[name]
    values = config.load_config(reference).to_dict()
    values["model"] |= changes
    values["train"]["mtp_weight"] = 0.3 if values["model"].get("mtp") else 0.0
    values["compute"] |= dict(dtype="bfloat16", remat="full")
    values["data"] |= dict(seq_len=length, target_len=None, batch_size=rows)
    values["mesh"] = ONE | {"fsdp": 4 // math.prod(mesh.values())} | mesh
    for field, value in more.items():
        group, _, field = field.partition(".")
        values[group][field] = value
    return config.resolve(values), values["mesh"], values


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the libtpu of jax[tpu]")
@pytest.mark.slow
@pytest.mark.parametrize("name", CUTS)
def test_the_peak_is_the_compiled_one(name, tmp_path):
    """Within a tenth, on four chips that aren't there; arguments to the byte."""
    run, mesh, values = cut(name)
    rows, length = run.settings.data.batch_size, run.settings.data.seq_len
    (found,) = cuts.planned([dict(reference=name, values=values, slices="v5p:2x2x1")], tmp_path)
    assert memory.arguments(run.spec, run.settings, mesh, rows, length) == found.arguments
    parts = memory.train(run.spec, run.settings, mesh, rows, length, device_kind="TPU v5")
    assert parts.total == pytest.approx(found.peak, rel=0.1), parts
