"""Cases of GPT-2, GPT-Neo and gpt-oss."""

import torch

from tests.golden.make.llama import CAUSAL, llama_like
from tests.golden.make.mutations import W, rope, rope_default, setc, swap_types
from tests.golden.make.outputs import fwd_logits


def gpt_oss_hub(**kw):
    h = llama_like(
        "GptOssForCausalLM",
        "gpt_oss",
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=4,
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=3,
        experts_per_token=3,
        sliding_window=8,
        swiglu_limit=7.0,
        attention_bias=True,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_theta=150000,
        router_aux_loss_coef=0.9,
        output_router_logits=False,
        max_position_embeddings=2048,
        initial_context_length=64,
        eos_token_id=2,
        pad_token_id=0,
        rope_scaling=dict(
            rope_type="yarn",
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            original_max_position_embeddings=64,
            truncate=False,
        ),
    )
    h.pop("bos_token_id")
    h.update(kw)
    return h


def clamp_extra(m, x, meta, bad, d):
    """gpt-oss: what share of the gate/up pre-activations hits the clamp, and what if there were no clamp?"""
    lim = m.config.swiglu_limit
    st = []
    orig = type(m.model.layers[0].mlp.experts)._apply_gate

    def spy(self, gu):
        g, u = gu[..., ::2], gu[..., 1::2]
        st.append(torch.stack([(g > lim).float().mean(), (u.abs() > lim).float().mean()]))
        return orig(self, gu)

    type(m.model.layers[0].mlp.experts)._apply_gate = spy
    fwd_logits(m, "causal", x)
    type(m.model.layers[0].mlp.experts)._apply_gate = orig
    s = torch.stack(st).mean(0)
    meta["clamped_gate_up_share"] = [float(s[0]), float(s[1])]
    if s.min() < 0.002:
        bad.append(f"clamp barely used {s}")
    return {}


CASES = {}
CASES["gpt2"] = dict(
    hub=dict(
        architectures=["GPT2LMHeadModel"],
        model_type="gpt2",
        vocab_size=160,
        n_positions=64,
        n_ctx=64,
        n_embd=40,
        n_layer=3,
        n_head=4,
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
        attn_pdrop=0.1,
        embd_pdrop=0.1,
        resid_pdrop=0.1,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.02,
        summary_type="cls_index",
        summary_use_proj=True,
    ),
    io=dict(kind="causal", T=40),
    gains=dict(emb=0.45, lin=2.0, down=3.0),
    mut={
        "gelu exact": setc(activation_function="gelu"),
        "eps 1e-6": setc(layer_norm_epsilon=1e-6),
        "no attn scale": setc(scale_attn_weights=False),
    },
)
CASES["gpt_neo_local"] = dict(
    hub=dict(
        architectures=["GPTNeoForCausalLM"],
        model_type="gpt_neo",
        vocab_size=160,
        max_position_embeddings=64,
        hidden_size=40,
        num_layers=4,
        num_heads=4,
        intermediate_size=80,
        attention_types=[[["global", "local"], 2]],
        attention_layers=["global", "local", "global", "local"],
        window_size=6,
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
        bos_token_id=0,
        eos_token_id=0,
    ),
    io=dict(kind="causal", T=40),
    gains=dict(emb=0.45, lin=2.0, down=2.5),
    mut={
        "window-1": setc(window_size=5),
        "window+1": setc(window_size=7),
        "gelu exact": setc(activation_function="gelu"),
    },
)
OMUT = dict(
    W(8),
    **{
        "swap layer types": swap_types,
        "no clamp": setc(swiglu_limit=1e9),
        "alpha 1 (silu)": setc(swiglu_alpha=1.0),
        "truncate true": rope(truncate=True),
        "no yarn": rope_default,
        "attention_factor 1": rope(attention_factor=1.0),
        "top2": setc(num_experts_per_tok=2),
    },
)
CASES["gpt_oss"] = dict(
    hub=gpt_oss_hub(), io=CAUSAL, gains=dict(gate_up=4.5, down=0.6, router=2.0, bias=0.4), mut=OMUT, extra=clamp_extra
)
