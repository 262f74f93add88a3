"""Cases of Llama's kind: Llama, Mistral, Mixtral, Qwen."""

from tests.golden.make.mutations import W, rope, rope_default, setc

CAUSAL = dict(kind="causal", T=32)
TIED = dict(emb=0.45, lin=1.6, down=2.5)  # tied embedding: logits = emb . unit-rms vector
COMMON = dict(torch_dtype="float32", initializer_range=0.02, use_cache=True)


def llama_like(arch, mt, **kw):
    h = dict(
        architectures=[arch],
        model_type=mt,
        vocab_size=160,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_act="silu",
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        attention_dropout=0.0,
        bos_token_id=1,
        eos_token_id=2,
        **COMMON,
    )
    h.update(kw)
    return h


CASES = {}
CASES["llama2"] = dict(
    hub=llama_like(
        "LlamaForCausalLM",
        "llama",
        num_key_value_heads=4,
        rms_norm_eps=1e-6,
        pretraining_tp=1,
        attention_bias=False,
        mlp_bias=False,
    ),
    io=CAUSAL,
    mut={"theta 5e5": rope(rope_theta=5e5), "eps 1e-5": setc(rms_norm_eps=1e-5)},
)
CASES["llama3"] = dict(
    hub=llama_like(
        "LlamaForCausalLM",
        "llama",
        rope_theta=500000.0,
        max_position_embeddings=512,
        attention_bias=False,
        mlp_bias=False,
        pretraining_tp=1,
        rope_scaling=dict(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
            rope_type="llama3",
        ),
    ),
    io=dict(kind="causal", T=48),
    mut={
        "no rope scaling": rope_default,
        "factor 4": rope(factor=4.0),
        "high_freq 2": rope(high_freq_factor=2.0),
        "theta 1e4": rope(rope_theta=1e4),
    },
)
CASES["mistral"] = dict(hub=llama_like("MistralForCausalLM", "mistral", sliding_window=8), io=CAUSAL, mut=W(8))
CASES["olmo2"] = dict(
    hub=llama_like("Olmo2ForCausalLM", "olmo2", rope_theta=500000.0, rms_norm_eps=1e-6, attention_bias=False),
    io=CAUSAL,
    mut={"theta 1e4": rope(rope_theta=1e4), "eps 1e-5": setc(rms_norm_eps=1e-5)},
)
CASES["qwen2"] = dict(
    hub=llama_like(
        "Qwen2ForCausalLM",
        "qwen2",
        rope_theta=1000000.0,
        rms_norm_eps=1e-6,
        sliding_window=32768,
        use_sliding_window=False,
        max_window_layers=3,
        tie_word_embeddings=True,
    ),
    io=CAUSAL,
    gains=TIED,
    mut={"theta 1e4": rope(rope_theta=1e4)},
)
MIX = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_experts_per_tok=2,
    rope_theta=1e6,
    sliding_window=None,
    output_router_logits=False,
    router_aux_loss_coef=0.02,
)
CASES["mixtral_4e"] = dict(
    hub=llama_like("MixtralForCausalLM", "mixtral", num_local_experts=4, **MIX),
    io=CAUSAL,
    mut={"top1": setc(num_experts_per_tok=1), "top3": setc(num_experts_per_tok=3)},
)
CASES["mixtral_8e"] = dict(
    hub=llama_like("MixtralForCausalLM", "mixtral", num_local_experts=8, **dict(MIX, intermediate_size=36)),
    io=dict(kind="causal", T=40),
    mut={"top1": setc(num_experts_per_tok=1), "theta 1e4": rope(rope_theta=1e4)},
)
Q3 = dict(
    head_dim=16,
    rope_theta=1000000,
    rms_norm_eps=1e-6,
    attention_bias=False,
    sliding_window=None,
    use_sliding_window=False,
    max_window_layers=3,
)
CASES["qwen3"] = dict(
    hub=llama_like("Qwen3ForCausalLM", "qwen3", **Q3),
    io=CAUSAL,
    mut={"theta 1e4": rope(rope_theta=1e4), "eps 1e-5": setc(rms_norm_eps=1e-5)},
)
CASES["qwen3_yarn"] = dict(
    hub=llama_like(
        "Qwen3ForCausalLM",
        "qwen3",
        **dict(
            Q3,
            max_position_embeddings=2048,
            rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512),
        ),
    ),
    io=dict(kind="causal", T=48),
    mut={
        "no yarn": rope_default,
        "attention_factor 1": rope(attention_factor=1.0),
        "truncate false": rope(truncate=False),
        "factor 2": rope(factor=2.0),
        "beta_fast 4": rope(beta_fast=4.0),
    },
)
QM = dict(
    Q3,
    hidden_size=32,
    moe_intermediate_size=24,
    intermediate_size=56,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    output_router_logits=False,
    router_aux_loss_coef=0.001,
)
CASES["qwen3_moe"] = dict(
    hub=llama_like("Qwen3MoeForCausalLM", "qwen3_moe", **QM),
    io=CAUSAL,
    mut={"no norm_topk": setc(norm_topk_prob=False), "top3": setc(num_experts_per_tok=3)},
)
CASES["qwen3_moe_sparse"] = dict(
    hub=llama_like(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        **dict(
            QM,
            num_hidden_layers=6,
            head_dim=10,
            num_experts=6,
            moe_intermediate_size=16,
            intermediate_size=40,
            num_experts_per_tok=3,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
        ),
    ),
    io=CAUSAL,
    mut={"no norm_topk": setc(norm_topk_prob=False)},
)
