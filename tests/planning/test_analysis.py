"""Analysis against traced programs: what is multiplied, and what is multiplied again; what decoding reads."""

import dataclasses
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from tests.common import DECODERS, FAMILIES, build_spec, page, tiny_spec
from transformer import config, spec
from transformer.nn import initial
from transformer.nn.model import Transformer
from transformer.ops import cache
from transformer.planning import accounting, analysis, decoding, topology
from transformer.planning.matmuls import matmul_flops
from transformer.planning.report import Request, from_json
from transformer.settings import Compute

ROWS, LENGTH = 2, 48
TOKENS = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
POLICIES = {
    "none": {},
    "full": dict(remat="full"),
    "dots": dict(remat="dots"),
    "attended": dict(remat="names", remat_names=("attended",)),
    "many": dict(remat="names", remat_names=("q", "k", "v", "attended", "ffn_up")),
}


def shapes_of(net: Transformer):
    return nn.meta.unbox(initial.abstract_params(net))


def all_scores():
    """Traced attention multiplies masked scores, too."""
    return mock.patch.object(accounting, "mean_visible", lambda mask, length: length)


@pytest.mark.parametrize(
    ("family", "policy"),
    [*(("llama3", policy) for policy in POLICIES), ("gpt2", "full"), ("gemma2", "full"), ("gemma2", "many")],
)
def test_what_remat_multiplies_again_is_what_the_traced_step_does(family, policy):
    built = tiny_spec(family)
    compute = Compute(attention="reference", **POLICIES[policy])
    net = Transformer(built, compute)

    def loss(params, tokens):
        ones = jnp.ones(tokens.shape)
        return net.apply({"params": params}, ones, tokens, tokens, method="weighed_losses").total

    traced = matmul_flops(jax.grad(loss), shapes_of(net), TOKENS)
    with all_scores():
        products, attention = analysis.executed(built, compute, LENGTH, training=True)
        scores = accounting.flops_per_token(built, LENGTH, training=False).scores
    # A kernel makes scores again for either gradient; traced attention has four products backwards, not seven.
    attention -= scores * (analysis.BACKWARD / analysis.FORWARD - 2)
    if "attended" in compute.remat_names:  # kernels keep the sums of the softmax; traced attention makes scores again
        attention += scores / 2
    assert traced == pytest.approx((products + attention) * ROWS * LENGTH, rel=1e-9)


@pytest.mark.parametrize("family", [f for f in DECODERS if tiny_spec(f).decoder is not None])
def test_decoding_multiplies_what_one_token_over_a_cache_does(family):
    built = tiny_spec(family)
    net = Transformer(built, Compute(attention="reference", experts="dense", decode_attention="xla"))
    held = jax.eval_shape(lambda: cache.init(built.decoder, ROWS, LENGTH, "float32"))
    token = jax.ShapeDtypeStruct((ROWS, 1), jnp.int32)

    def step(params, tokens, positions, held):
        x, _ = net.apply({"params": params}, tokens, positions, cache=held, method="features")
        return net.apply({"params": params}, x, method="logits")

    traced = matmul_flops(step, shapes_of(net), token, token, held)
    flops = decoding.step_flops(built, LENGTH)
    # The reference bodies multiply every token by all experts, and weights of attention by rotary keys, too.
    more = 0.0
    for block in built.decoder.layers:
        if isinstance(block.ffn, spec.MoE):
            idle = block.ffn.num_experts - block.ffn.top_k
            more += 2.0 * 3 * idle * built.d_model * block.ffn.expert.d_ff
        if isinstance(block.mixer, spec.LatentAttention):
            more += 2.0 * block.mixer.num_heads * block.mixer.rope_dim * LENGTH
    assert traced == pytest.approx((flops.total + more) * ROWS, rel=1e-9)


def test_decoding_reads_what_any_row_needs():
    built = build_spec("qwen3_moe", "30b-a3b")
    count = accounting.parameters(built)
    table = built.vocab_size * built.d_model
    assert decoding.weights_read(built, 1) == pytest.approx(count.active - table + built.d_model)
    many = decoding.weights_read(built, 10_000)
    assert many == pytest.approx(count.total - table + 10_000 * built.d_model)
    reads = [decoding.weights_read(built, rows) for rows in (1, 4, 16, 64)]
    assert reads == sorted(reads)
    weights, held = decoding.step_bytes(built, 8, 4096, "bfloat16", "int8")
    assert weights == 2 * decoding.weights_read(built, 8)
    assert held == 8 * 48 * 4096 * (2 * 4 * 128 + 2 * 4 * 4)  # keys and values of 4 heads, a scale for each


def test_no_tokens_are_refused():
    with pytest.raises(ValueError, match="length=0: use at least 1 token"):
        decoding.step_flops(tiny_spec("llama3"), 0)
    with pytest.raises(ValueError, match="an encoder alone writes no text"):
        decoding.step_flops(tiny_spec("bert"), 8)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_a_kind_add_up_to_the_model(family):
    built = tiny_spec(family)
    kinds = accounting.flops_by_layer(built, LENGTH)
    whole = accounting.flops_per_token(built, LENGTH, training=False)
    assert sum(n for n, _ in kinds.values()) == len(built.layers)
    assert sum(flops.total for _, flops in kinds.values()) == pytest.approx(whole.total - whole.head)


def requested(reference: str, name: str, asked: dict[str, int], kind: str = "train", rows: int = 64, **model):
    values = config.load_config(reference).to_dict()
    values["model"] |= model
    values["train"]["mtp_weight"] = 0.3 if values["model"].get("mtp") else 0.0
    values["compute"] |= dict(dtype="bfloat16", remat="full")
    values["data"] |= dict(seq_len=256, batch_size=rows)
    on = topology.parse(name)
    mesh = topology.mesh_sizes(on, asked)
    request = Request(
        config=reference, topology=name, chip=on.chip.name, devices=on.devices, chips=on.chips * on.slices,
        slices=on.slices, mesh=mesh, kind=kind, rows=rows, length=256, tokens=1e12,
    )  # fmt: skip
    return request, config.resolve(values)


@pytest.mark.parametrize("kind", ["train", "prefill", "decode"])
@pytest.mark.parametrize("family", DECODERS)
def test_every_family_has_a_plan(family, kind):
    size = next(iter(page(family).SIZES))
    report = analysis.report(*requested(f"{family}:{size}", "v5p:2x2x2", {"fsdp": 8}, kind))
    assert from_json(report.to_json()) == report
    assert 0 < report.estimate.mfu < 1 and report.estimate.step >= max(
        report.estimate.terms["matmul"], report.estimate.terms["hbm"]
    )
    assert report.memory.parts.total > 0 and report.estimate.assumptions


def test_slower_links_and_more_work_take_longer():
    def step(name: str, mesh: dict, **changes) -> float:
        request, run = requested("llama3:8b", name, mesh, **changes)
        return analysis.report(request, run).estimate.step

    assert step("v5p:2x2x2", {"fsdp": 8}) < step("v5e:2x4", {"fsdp": 8})
    assert step("v5p:2x2x2", {"fsdp": 8}) < step("v5p:2x2x2", {"fsdp": 8}, rows=128)
    two = analysis.report(*requested("llama3:8b", "2*v5p:2x2x2", {"fsdp": 8}, rows=128))
    assert two.estimate.terms["dcn"] > 0 and any("data centre" in text for text in two.estimate.assumptions)
    assert two.estimate.step > step("v5p:2x2x2", {"fsdp": 8})


def test_decoding_waits_for_memory():
    report = analysis.report(*requested("llama3:8b", "v5p:2x2x1", {"tensor": 4}, "decode", rows=8))
    weights, held = decoding.step_bytes(config.resolve(config.load_config("llama3:8b")).spec, 8, 256)
    assert report.bytes.minimal == pytest.approx((weights + held) / 4, rel=0.1)
    assert report.estimate.terms["hbm"] > report.estimate.terms["matmul"]
    assert dataclasses.asdict(report.request)["kind"] == "decode"
