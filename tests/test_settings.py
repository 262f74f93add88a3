"""Strictness: whatever can't be used is refused, with the field, its value and the remedy."""

import dataclasses
from dataclasses import dataclass

import pytest
from ml_collections import ConfigDict

from transformer import settings, spec
from transformer.mapping import from_mapping
from transformer.settings import Compute, Data, Mesh, Optimizer, Settings, SettingsError, Train
from transformer.spec import SpecError


def plain() -> dict:
    return dataclasses.asdict(Settings())


def change(path: str, value) -> dict:
    """The default settings as plain data with one field set."""
    values = plain()
    *groups, name = path.split(".")
    inner = values
    for group in groups:
        inner = inner[group]
    inner[name] = value
    return values


def test_plain_data_makes_the_same_settings():
    assert from_mapping(Settings, plain()) == Settings()
    assert from_mapping(Settings, {}) == Settings()
    changed = from_mapping(Settings, change("compute.dtype", "bfloat16"))
    assert changed.compute.dtype == "bfloat16" and dataclasses.replace(changed, compute=Compute()) == Settings()


def test_lists_stand_for_tuples():
    values = change("data.source", "text")
    values["data"]["paths"] = ["a.txt", "b.txt"]
    assert from_mapping(Settings, ConfigDict(values).to_dict()).data.paths == ("a.txt", "b.txt")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("compute.remta", "full", "compute.remta='full': unknown field; did you mean compute.remat?"),
        ("optimiser", 1, "optimiser=1: unknown field; did you mean optimizer?"),
        ("mesh.zzz", 2, "mesh.zzz=2: unknown field; known: slice, data, fsdp, expert, context, tensor"),
        (
            "compute.attention",
            "flash",
            "compute.attention='flash': use one of ['auto', 'reference', 'blockwise', 'splash']",
        ),
        ("compute.dtype", "float64", "compute.dtype='float64': use one of ['float32', 'bfloat16']"),
        ("compute.unroll", True, "compute.unroll=True: expected int, got bool"),
        ("compute.unroll", 1.0, "compute.unroll=1.0: expected int, got float"),
        ("compute.unroll", None, "compute.unroll=None: expected int, got NoneType"),
        ("optimizer.peak_lr", True, "optimizer.peak_lr=True: expected float, got bool"),
        ("optimizer.peak_lr", "1e-3", "optimizer.peak_lr='1e-3': expected float, got str"),
        ("data.paths", "a.txt", "data.paths='a.txt': expected a list; write (\"a.txt\",) for one item"),
        ("train.sample_prompts", ["a", 1], "train.sample_prompts[1]=1: expected str, got int"),
        ("data", 3, "data=3: expected a group of fields"),
    ],
)
def test_wrong_names_and_types_are_refused(path, value, message):
    with pytest.raises(SettingsError) as error:
        from_mapping(Settings, change(path, value))
    assert str(error.value) == message


def test_int_stands_for_float_and_stays_exact():
    got = from_mapping(Settings, change("optimizer.clip_norm", 2)).optimizer.clip_norm
    assert got == 2.0 and type(got) is float


@pytest.mark.parametrize(
    ("group", "values", "field"),
    [
        (Compute, dict(attention_block=8), "compute.attention_block=8"),
        (Compute, dict(attention_block=20), "compute.attention_block=20"),
        (Compute, dict(unroll=0), "compute.unroll=0"),
        (Compute, dict(loss_chunk=127), "compute.loss_chunk=127"),
        (Mesh, dict(fsdp=0), "mesh.fsdp=0"),
        (Mesh, dict(tensor=-2), "mesh.tensor=-2"),
        (Mesh, dict(data=-1, fsdp=-1), "mesh=['data', 'fsdp']"),
        (Data, dict(seq_len=1), "data.seq_len=1"),
        (Data, dict(batch_size=0), "data.batch_size=0"),
        (Data, dict(validation_fraction=0.0), "data.validation_fraction=0.0"),
        (Data, dict(validation_fraction=1.0), "data.validation_fraction=1.0"),
        (Data, dict(paths=("a",)), "data.paths=('a',)"),
        (Data, dict(source="text"), "data.paths=()"),
        (Data, dict(noise_density=0.0), "data.noise_density=0.0"),
        (Data, dict(mean_span=0.5), "data.mean_span=0.5"),
        (Data, dict(objective="spans", target_len=1), "data.target_len=1"),
        (Data, dict(noise_density=0.3), "data.noise_density=0.3"),
        (Data, dict(objective="masked", mean_span=4.0), "data.mean_span=4.0"),
        (Data, dict(objective="spans", whole_word=True), "data.whole_word=True"),
        (Data, dict(target_len=8), "data.target_len=8"),
        (Data, dict(source="numbers"), "data.objective='causal'"),
        (Data, dict(objective="pairs"), "data.objective='pairs'"),
        (Data, dict(source="pairs", objective="pairs"), "data.paths=()"),
        (Data, dict(source="sort", objective="pairs", paths=("a",)), "data.paths=('a',)"),
        (Data, dict(source="sort", objective="pairs", direction="backward"), "data.direction='backward'"),
        (Data, dict(source="pairs", objective="pairs", paths=("a",), direction="both"), "data.direction='both'"),
        (Optimizer, dict(schedule="inverse_sqrt", warmup_steps=0), "optimizer.warmup_steps=0"),
        (Optimizer, dict(schedule="constant", end_lr_fraction=0.2), "optimizer.end_lr_fraction=0.2"),
        (Train, dict(z_loss=-1e-4), "train.z_loss=-0.0001"),
        (Train, dict(label_smoothing=1.0), "train.label_smoothing=1.0"),
        (Train, dict(label_smoothing=0.1, mtp_weight=0.3), "train.label_smoothing=0.1"),
        (Optimizer, dict(peak_lr=0.0), "optimizer.peak_lr=0.0"),
        (Optimizer, dict(end_lr_fraction=1.5), "optimizer.end_lr_fraction=1.5"),
        (Optimizer, dict(warmup_steps=-1), "optimizer.warmup_steps=-1"),
        (Optimizer, dict(b1=1.0), "optimizer.b1=1.0"),
        (Optimizer, dict(b2=-0.1), "optimizer.b2=-0.1"),
        (Optimizer, dict(eps=0.0), "optimizer.eps=0.0"),
        (Optimizer, dict(weight_decay=-0.1), "optimizer.weight_decay=-0.1"),
        (Optimizer, dict(clip_norm=0.0), "optimizer.clip_norm=0.0"),
        (Optimizer, dict(b2=0.999, moments_dtype="bfloat16"), "optimizer.b2=0.999"),
        (Optimizer, dict(b1=0.995, moments_dtype="bfloat16"), "optimizer.b1=0.995"),
        (Compute, dict(remat="names"), "compute.remat='names'"),
        (Compute, dict(remat="full", remat_names=("q",)), "compute.remat_names=('q',)"),
        (Compute, dict(remat="names", remat_names=("keys",)), "compute.remat_names=('keys',)"),
        (Compute, dict(remat="names", offload_names=("q", "x")), "compute.offload_names=('q', 'x')"),
        (Compute, dict(remat="names", remat_names=("q",), offload_names=("q",)), "compute.offload_names=('q',)"),
        (Train, dict(accumulate_dtype="bfloat16"), "train.accumulate_dtype='bfloat16'"),
        (Train, dict(steps=0), "train.steps=0"),
        (Train, dict(accumulate=0), "train.accumulate=0"),
        (Train, dict(eval_every=-1), "train.eval_every=-1"),
        (Train, dict(keep_checkpoints=0), "train.keep_checkpoints=0"),
        (Train, dict(sample_temperature=-0.5), "train.sample_temperature=-0.5"),
        (Settings, dict(train=Train(accumulate=3)), "train.accumulate=3"),
        (Settings, dict(train=Train(mtp_weight=0.3), data=Data(objective="prefix")), "train.mtp_weight=0.3"),
        (Settings, dict(optimizer=Optimizer(warmup_steps=300)), "optimizer.warmup_steps=300"),
    ],
)
def test_values_out_of_range_are_refused_with_a_remedy(group, values, field):
    with pytest.raises(SettingsError) as error:
        group(**values)
    named, _, remedy = str(error.value).partition(": ")
    assert named == field and len(remedy) > 8


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Every kind of annotation that dims and settings use."""

    size: int
    scaling: spec.LinearScaling | spec.YarnScaling | None
    window: int | None
    ratio: float = 1.0
    items: tuple[int, ...] = ()


def test_missing_fields_are_named_all_at_once():
    with pytest.raises(SettingsError, match=r"^model\.size, model\.window: required and not given"):
        from_mapping(Sample, {"scaling": None}, "model.")


def test_unions_take_none_or_the_one_group_that_fits():
    values = dict(size=3, window=None, scaling=None)
    assert from_mapping(Sample, values) == Sample(size=3, window=None, scaling=None)
    got = from_mapping(Sample, {**values, "window": 8, "scaling": {"factor": 4}})
    assert got == Sample(size=3, window=8, scaling=spec.LinearScaling(factor=4.0))
    yarn = dict(factor=4.0, beta_fast=32.0, beta_slow=1.0, original_max_length=64)
    assert from_mapping(Sample, {**values, "scaling": yarn}).scaling == spec.YarnScaling(**yarn)
    # None of the groups fits: the message has every reason.
    with pytest.raises(SettingsError, match=r"scaling\.fctor=4: unknown field.*; or .*scaling\.fctor=4"):
        from_mapping(Sample, {**values, "scaling": {"fctor": 4}})
    with pytest.raises(SettingsError, match="size=None: expected int"):
        from_mapping(Sample, {**values, "size": None})


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().seed = 1


def test_check_names_the_field_the_value_and_the_remedy():
    settings.check(True, "a.b", 1, "use 2")
    with pytest.raises(SettingsError, match=r"^a\.b=1: use 2$"):
        settings.check(False, "a.b", 1, "use 2")


NORM = dict(kind="rms", eps=1e-6, offset=0.0, bias=False, scale_in_float32=False)
ATTENTION = dict(
    num_heads=4, num_kv_heads=2, head_dim=8, mask=spec.Mask(causal=True), scale=1.0, rope=None,
    qkv_bias=False, out_bias=False,
)  # fmt: skip
FFN = dict(d_ff=8, activation="silu", gated=True, bias=False)
BLOCK = dict(
    mixer=spec.Attention(**ATTENTION), ffn=spec.FeedForward(**FFN), norm=spec.Norm(**NORM), placement="pre"
)  # fmt: skip
STACK = dict(body=(spec.Block(**BLOCK),), repeats=2, final_norm=None)
MODEL = dict(
    vocab_size=8, d_model=8, max_length=8, embedding=spec.Embedding(scale=None, positions=None),
    decoder=spec.Stack(**STACK), head=spec.Head(tied=True, bias=False),
)  # fmt: skip
ROPE = dict(theta=1e4, dim=8, interleaved=False)
PIECEWISE = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=64)
SINUSOIDS = spec.Embedding(scale=None, positions=spec.SinusoidalPositions(base=1e4, interleaved=True))


@pytest.mark.parametrize(
    ("kind", "good", "bad", "field"),
    [
        (spec.Mask, dict(causal=True), dict(window=0), "mask.window=0"),
        (spec.PiecewiseScaling, PIECEWISE, dict(low_freq_factor=4.0), "low_freq_factor=4.0"),
        (spec.Rope, ROPE, dict(dim=7), "rope.dim=7"),
        (spec.Rope, ROPE, dict(dim=0), "rope.dim=0"),
        (spec.Rope, ROPE, dict(theta=1.0), "rope.theta=1.0"),
        (spec.Norm, NORM, dict(kind="batch"), "norm.kind='batch'"),
        (spec.Norm, NORM, dict(eps=0.0), "norm.eps=0.0"),
        (spec.Norm, NORM, dict(bias=True), "norm.bias=True"),
        (spec.Attention, ATTENTION, dict(num_kv_heads=3), "num_heads=4"),
        (spec.Attention, ATTENTION, dict(num_kv_heads=0), "num_kv_heads=0"),
        (spec.Attention, ATTENTION, dict(head_dim=0), "head_dim=0"),
        (spec.Attention, ATTENTION, dict(rope=spec.Rope(**{**ROPE, "dim": 16})), "rope.dim=16"),
        (spec.Attention, ATTENTION, dict(softcap=0.0), "softcap=0.0"),
        (spec.Attention, ATTENTION, dict(qk_norm_joint=True), "qk_norm_joint=True"),
        (spec.FeedForward, FFN, dict(d_ff=0), "d_ff=0"),
        (spec.FeedForward, FFN, dict(activation="swish"), "activation='swish'"),
        (spec.Block, BLOCK, dict(placement="middle"), "placement='middle'"),
        (spec.Stack, STACK, dict(repeats=-1), "repeats=-1"),
        (spec.Stack, STACK, dict(repeats=0), "stack.body"),
        (spec.Stack, STACK, dict(body=(), repeats=0), "stack"),
        (spec.LearnedPositions, dict(max_length=8), dict(max_length=0), "positions.max_length=0"),
        (spec.Model, MODEL, dict(vocab_size=1), "vocab_size=1"),
        (spec.Model, MODEL, dict(d_model=0), "d_model=0"),
        (spec.Model, MODEL, dict(d_model=7, embedding=SINUSOIDS), "d_model=7"),
    ],
)
def test_specs_that_contradict_themselves_are_refused(kind, good, bad, field):
    kind(**good)
    with pytest.raises(SpecError) as error:
        kind(**{**good, **bad})
    named, _, remedy = str(error.value).partition(": ")
    assert named == field and len(remedy) > 8


def test_published_numbers_have_no_default():
    """Only an absent mechanism may be left out."""
    for kind in (getattr(spec, name) for name in spec.__all__):
        for f in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
            # YaRN's published configs leave `truncate` out where it is true.
            absent = (dataclasses.MISSING, None, False, ()) + ((True,) if f.name == "truncate" else ())
            assert f.default in absent, f"{kind.__name__}.{f.name}"


def test_stack_cuts_layers_into_body_and_tail():
    a = spec.Block(**BLOCK)
    b = spec.Block(**{**BLOCK, "placement": "post"})
    stack = spec.Stack.of((a, a, b, a, a, b, a), 3, None)
    assert (stack.body, stack.repeats, stack.tail, stack.head) == ((a, a, b), 2, (a,), ())
    assert stack.layers == (a, a, b, a, a, b, a) and stack.num_layers == 7
    # Fewer layers than a period: all of them are the tail.
    short = spec.Stack.of((a, a), 3, None)
    assert (short.body, short.repeats, short.tail) == ((), 0, (a, a))
    with pytest.raises(SpecError, match="period=2: the layers don't repeat with it"):
        spec.Stack.of((a, a, b), 2, None)
