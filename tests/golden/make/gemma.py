"""Cases of Gemma 2 and 3."""

import copy

import torch

from tests.golden.make.llama import CAUSAL, llama_like
from tests.golden.make.mutations import W, rope_lt, setc, swap_types
from tests.golden.make.outputs import f32, t


def gemma3_hub(**kw):
    h = llama_like(
        "Gemma3ForCausalLM",
        "gemma3_text",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        head_dim=12,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=16,
        rope_theta=1000000,
        rope_local_base_freq=10000,
        rms_norm_eps=1e-6,
        sliding_window=8,
        sliding_window_pattern=6,
        final_logit_softcapping=None,
        attn_logit_softcapping=None,
        attention_bias=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        cache_implementation="hybrid",
    )
    h.pop("tie_word_embeddings")
    h.pop("hidden_act")
    h.update(kw)
    return h


def bf16_embed_extra(m, x, meta, bad, d):
    """Gemma: first hidden state of the bfloat16 model = bf16(bf16(emb) * bf16(sqrt(d)))."""
    mb = copy.deepcopy(m).to(torch.bfloat16)
    with torch.no_grad():
        return {"hidden0_bf16": f32(mb.model.embed_tokens(t(x["input_ids"])))}


CASES = {}
GMUT = dict(
    W(8),
    **{
        "query scale=head_dim": setc(query_pre_attn_scalar=12),
        "swap layer types": swap_types,
        "one theta (local=global)": rope_lt("sliding_attention", rope_theta=1e6),
        "one theta (global=local)": rope_lt("full_attention", rope_theta=1e4),
        "gelu exact": setc(hidden_activation="gelu"),
        "eps 1e-5": setc(rms_norm_eps=1e-5),
    },
)
CASES["gemma3"] = dict(hub=gemma3_hub(), io=CAUSAL, gains=dict(emb=0.22, qk=1.3), mut=GMUT, extra=bf16_embed_extra)
CASES["gemma3_linear"] = dict(
    hub=gemma3_hub(rope_scaling=dict(factor=8.0, rope_type="linear")),
    io=CAUSAL,
    gains=dict(emb=0.22, qk=1.3),
    mut=dict(
        GMUT,
        **{
            "no linear scaling": rope_lt("full_attention", factor=1.0),
            "scaling on local too": rope_lt("sliding_attention", rope_type="linear", factor=8.0),
        },
    ),
    extra=bf16_embed_extra,
)
CASES["gemma2"] = dict(
    hub=(lambda h: (h.pop("sliding_window_pattern"), h.pop("rope_local_base_freq"), h)[-1])(
        gemma3_hub(
            architectures=["Gemma2ForCausalLM"],
            model_type="gemma2",
            num_hidden_layers=4,
            rope_theta=10000.0,
            attn_logit_softcapping=8.0,
            final_logit_softcapping=6.0,
            hidden_act="gelu_pytorch_tanh",
            intermediate_size=64,
        )
    ),
    io=CAUSAL,
    gains=dict(emb=0.25, qk=2.2),
    mut=dict(
        W(8),
        **{
            "no attn softcap": setc(attn_logit_softcapping=None),
            "no final softcap": setc(final_logit_softcapping=None),
            "query scale=head_dim": setc(query_pre_attn_scalar=12),
            "swap layer types": swap_types,
        },
    ),
    extra=bf16_embed_extra,
)
