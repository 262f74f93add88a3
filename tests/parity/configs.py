"""Random small `config.json`s of every family, as files spell them: what a family may vary, varies."""

from collections.abc import Callable
from random import Random
from typing import Any

# More keys than any window has, more than scaled rotations were trained for.
LENGTH = 40
WINDOWS = (1, 3, 8, 15)
Config = dict[str, Any]


def decoder(rng: Random, model_type: str) -> Config:
    """What nearly every decoder states."""
    kv_heads, halves = rng.randint(1, 3), rng.randint(2, 5)
    heads = kv_heads * rng.randint(1, 3)
    return {
        "model_type": model_type,
        "vocab_size": rng.randint(20, 60),
        "hidden_size": heads * 2 * halves,
        "num_hidden_layers": rng.randint(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * rng.randint(2, 6),
        "intermediate_size": rng.randint(3, 40),
        "max_position_embeddings": 128,
        "rms_norm_eps": rng.choice((1e-6, 1e-5, 1e-3)),
    }


def tied(rng: Random) -> Config:
    """Whether the token table is the head too."""
    return {"tie_word_embeddings": rng.random() < 0.5}


def without_head_dim(rng: Random, config: Config) -> Config:
    """Left out or null, it follows from the width and the heads."""
    kind = rng.choice(("stated", "null", "absent"))
    if kind == "stated":
        return config
    return config | {"head_dim": None} if kind == "null" else {k: v for k, v in config.items() if k != "head_dim"}


def scaling(rng: Random, kinds: tuple[str, ...]) -> Config:
    """The fields of a rope scaling, of lengths that `LENGTH` exceeds; none for "default"."""
    kind = rng.choice(kinds)
    factor, original = rng.choice((2.0, 4.0, 8.0)), rng.choice((8, 16))
    match kind:
        case "linear":
            return {"rope_type": kind, "factor": factor}
        case "llama3":
            bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": original}
            return {"rope_type": kind, "factor": factor, **bounds}
        case "yarn":
            optional = {
                "beta_fast": rng.choice((32.0, 4.0)),
                "beta_slow": rng.choice((1.0, 0.5)),
                "attention_factor": rng.choice((1.0, 1.3)),
                "truncate": rng.random() < 0.5,
                "mscale": rng.choice((1.0, 0.707)),
                "mscale_all_dim": rng.choice((1.0, 0.707)),
                "original_max_position_embeddings": original,
            }
            return {"rope_type": kind, "factor": factor} | {k: v for k, v in optional.items() if rng.random() < 0.5}
    return {}


def rope(rng: Random, *kinds: str, null: bool = True) -> Config:
    """Theta and one of the scalings, in either spelling; `null` where a scaling may be null."""
    theta, scaled = rng.choice((100.0, 1e4, 5e5)), scaling(rng, ("default", *kinds))
    if rng.random() < 0.5 or not (scaled or null):
        return {"rope_parameters": {"rope_type": "default", **scaled, "rope_theta": theta}}
    if scaled and rng.random() < 0.5:
        scaled["type"] = scaled.pop("rope_type")
    return {"rope_theta": theta, "rope_scaling": scaled or None}


def layer_types(slides: list[bool]) -> Config:
    """Which layers slide, said layer by layer."""
    return {"layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides]}


def gpt2(rng: Random) -> Config:
    heads = rng.randint(1, 5)
    width = heads * rng.randint(2, 8)
    return {
        "model_type": "gpt2",
        "vocab_size": rng.randint(20, 60),
        "n_embd": width,
        "n_head": heads,
        "n_layer": rng.randint(1, 4),
        "n_positions": rng.randint(LENGTH, 64),
        "activation_function": rng.choice(("gelu_new", "gelu_pytorch_tanh")),
        "n_inner": rng.choice((None, 4 * width)),
        "layer_norm_epsilon": 1e-5,
    }


def llama(rng: Random) -> Config:
    config = without_head_dim(rng, decoder(rng, "llama"))
    if rng.random() < 0.3:
        del config["num_key_value_heads"]
    biases = {name: rng.random() < 0.5 for name in ("attention_bias", "mlp_bias")}
    return config | tied(rng) | biases | rope(rng, "linear", "llama3", "yarn")


def mistral(rng: Random) -> Config:
    config = without_head_dim(rng, decoder(rng, "mistral"))
    return config | tied(rng) | rope(rng) | {"sliding_window": rng.choice((None, *WINDOWS))}


def olmo2(rng: Random) -> Config:
    return decoder(rng, "olmo2") | rope(rng) | {"attention_bias": False, "tie_word_embeddings": False}


def mixtral(rng: Random) -> Config:
    experts = rng.randint(1, 8)
    picked = rng.randint(1, min(3, experts))
    return mistral(rng) | {
        "model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": picked,
    }  # fmt: skip


def gemma(rng: Random, model_type: str) -> Config:
    return decoder(rng, model_type) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": rng.choice((4, 10, 16)),
        "sliding_window": rng.choice(WINDOWS),
        "final_logit_softcapping": rng.choice((None, 4.0)),
    }


def gemma2(rng: Random) -> Config:
    config = gemma(rng, "gemma2") | rope(rng) | {"attn_logit_softcapping": rng.choice((None, 3.0))}
    said = layer_types([i % 2 == 0 for i in range(config["num_hidden_layers"])])
    return config | (said if rng.random() < 0.5 else {})


def gemma3(rng: Random) -> Config:
    layers, pattern = rng.randint(2, 7), rng.randint(1, 6)
    said = layer_types([(i + 1) % pattern != 0 for i in range(layers)])
    kinds = ({"sliding_window_pattern": pattern}, {"sliding_window_pattern": pattern, **said})
    full, near = rng.choice((1e4, 1e6)), rng.choice((100.0, 1e4))
    scaled = scaling(rng, ("default", "linear"))
    ropes = (
        {"rope_theta": full, "rope_local_base_freq": near, "rope_scaling": scaled or None},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", **scaled, "rope_theta": full},
                "sliding_attention": {"rope_type": "default", "rope_theta": near},
            }
        },
    )
    return gemma(rng, "gemma3_text") | {"num_hidden_layers": layers} | rng.choice(kinds) | rng.choice(ropes)


def qwen2(rng: Random) -> Config:
    config = decoder(rng, "qwen2")
    del config["head_dim"]
    layers, window = config["num_hidden_layers"], rng.choice(WINDOWS)
    used, full = rng.random() < 0.6, rng.randint(0, layers)
    said = layer_types([used and i >= full for i in range(layers)]) if rng.random() < 0.3 else {}
    slides = {"use_sliding_window": used, "sliding_window": window, "max_window_layers": full, **said}
    return config | tied(rng) | rope(rng, "linear", "yarn") | slides


def qwen3(rng: Random) -> Config:
    return qwen2(rng) | {"model_type": "qwen3", "head_dim": 2 * rng.randint(2, 6), "attention_bias": False}


def qwen3_moe(rng: Random) -> Config:
    config, experts = qwen3(rng), rng.randint(2, 8)
    for name in ("layer_types", rng.choice(("layer_types", "head_dim"))):
        config.pop(name, None)
    layers = config["num_hidden_layers"]
    return config | {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": rng.randint(3, 20),
        rng.choice(("num_experts", "num_local_experts")): experts,
        "num_experts_per_tok": rng.randint(1, min(4, experts)),
        "norm_topk_prob": rng.random() < 0.5,
        "decoder_sparse_step": rng.randint(1, 3),
        "mlp_only_layers": sorted(rng.sample(range(layers), rng.randint(0, layers - 1))),
    }


def deepseek(rng: Random, model_type: str) -> Config:
    config = {name: value for name, value in decoder(rng, model_type).items() if name != "head_dim"}
    groups, each = rng.randint(1, 4), rng.randint(2, 4)
    top_groups = rng.randint(1, groups)
    return config | tied(rng) | rope(rng, "yarn") | {
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": rng.choice((None, 6, 11)),
        "kv_lora_rank": rng.choice((5, 8)),
        "qk_nope_head_dim": rng.randint(1, 9),
        "qk_rope_head_dim": 2 * rng.randint(1, 5),
        "v_head_dim": rng.randint(1, 9),
        "attention_bias": rng.random() < 0.5,
        "moe_intermediate_size": rng.randint(3, 20),
        "n_routed_experts": groups * each,
        "n_shared_experts": rng.randint(1, 2),
        "num_experts_per_tok": rng.randint(1, top_groups * each),
        "n_group": groups,
        "topk_group": top_groups,
        "norm_topk_prob": rng.random() < 0.5,
        "routed_scaling_factor": rng.choice((1.0, 2.5)),
        "first_k_dense_replace": rng.randint(0, config["num_hidden_layers"]),
    }  # fmt: skip


def deepseek_v2(rng: Random) -> Config:
    method = rng.choice(("greedy", "group_limited_greedy"))
    config = deepseek(rng, "deepseek_v2") | {"topk_method": method}
    # Theirs reads pairs as complex numbers, which must lie at even places.
    for name in ("kv_lora_rank", "qk_nope_head_dim"):
        config[name] += config[name] % 2
    return config | ({"n_group": None, "topk_group": None} if method == "greedy" and rng.random() < 0.3 else {})


def deepseek_v3(rng: Random) -> Config:
    return deepseek(rng, "deepseek_v3") | {"rope_interleave": rng.random() < 0.5}


def gpt_oss(rng: Random) -> Config:
    config, experts = decoder(rng, "gpt_oss"), rng.randint(2, 6)
    said = layer_types([i % 2 == 0 for i in range(config["num_hidden_layers"])])
    return config | rope(rng, "yarn", null=False) | (said if rng.random() < 0.5 else {}) | {
        "sliding_window": rng.choice(WINDOWS),
        "num_local_experts": experts,
        "num_experts_per_tok": rng.randint(1, min(4, experts)),
        "swiglu_limit": rng.choice((1.0, 7.0)),
    }  # fmt: skip


def gemma3_multimodal(rng: Random) -> Config:
    """The text model within what the larger sizes state."""
    return {"model_type": "gemma3", "text_config": gemma3(rng)}


MAKERS: dict[str, Callable[[Random], Config]] = {
    make.__name__: make
    for make in (
        gpt2, llama, mistral, olmo2, mixtral, gemma2, gemma3, gemma3_multimodal, qwen2, qwen3, qwen3_moe, deepseek_v2,
        deepseek_v3, gpt_oss,
    )
}  # fmt: skip
