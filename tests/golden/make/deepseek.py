"""Cases of DeepSeek-V2 and V3."""

from tests.golden.make.llama import CAUSAL, llama_like
from tests.golden.make.mutations import rope, rope_default, setc


def deepseek_hub(arch, mt, **kw):
    h = llama_like(
        arch,
        mt,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=12,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=10,
        n_routed_experts=16,
        n_shared_experts=1,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        attention_bias=False,
        max_position_embeddings=5120,
        rms_norm_eps=1e-6,
        rope_theta=10000,
        bos_token_id=0,
        eos_token_id=1,
        num_nextn_predict_layers=0,
        rope_scaling=dict(
            type="yarn",
            factor=40,
            beta_fast=32,
            beta_slow=1,
            mscale=1.0,
            mscale_all_dim=1.0,
            original_max_position_embeddings=128,
        ),
    )
    h.update(kw)
    return h


CASES = {}
DMUT = {
    "rope not interleaved": setc(rope_interleave=False),
    "n_group 1": setc(n_group=1, topk_group=1),
    "topk_group 1": setc(topk_group=1),
    "no norm_topk": setc(norm_topk_prob=False),
    "routed_scaling 1": setc(routed_scaling_factor=1.0),
    "no yarn": rope_default,
    "mscale_all_dim dropped": rope(mscale_all_dim=None),
    "mscale dropped": rope(mscale=None),
    "truncate false": rope(truncate=False),
    "theta 1e5": rope(rope_theta=1e5),
}
CASES["deepseek_v3"] = dict(
    hub=deepseek_hub("DeepseekV3ForCausalLM", "deepseek_v3"), io=CAUSAL, gains=dict(router=2.5), mut=DMUT
)
CASES["deepseek_v3_noqlora"] = dict(
    hub=deepseek_hub(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        q_lora_rank=None,
        qk_rope_head_dim=12,
        rope_scaling=dict(
            type="yarn",
            factor=40,
            beta_fast=32,
            beta_slow=1,
            mscale=1.0,
            mscale_all_dim=0.7,
            original_max_position_embeddings=128,
        ),
    ),
    io=CAUSAL,
    gains=dict(router=2.5),
    mut=dict(DMUT, **{"attention_factor 1": rope(attention_factor=1.0)}),
)
CASES["deepseek_v2"] = dict(
    hub=deepseek_hub(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        q_lora_rank=None,
        n_routed_experts=8,
        moe_intermediate_size=16,
        n_shared_experts=2,
        num_experts_per_tok=3,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        scoring_func="softmax",
        topk_method="greedy",
        aux_loss_alpha=0.001,
        seq_aux=True,
        rope_scaling=dict(
            type="yarn",
            factor=40,
            beta_fast=32,
            beta_slow=1,
            mscale=0.707,
            mscale_all_dim=0.707,
            original_max_position_embeddings=128,
        ),
    ),
    io=CAUSAL,
    mut={
        "no yarn": rope_default,
        "mscale_all_dim dropped": rope(mscale_all_dim=None),
        "routed_scaling 2": setc(routed_scaling_factor=2.0),
        "top2": setc(num_experts_per_tok=2),
    },
)
