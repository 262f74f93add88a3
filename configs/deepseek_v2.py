"""DeepSeek-V2 and V2-Lite (DeepSeek-AI 2024).

    python train.py --config configs/deepseek_v2.py:tiny --workdir runs/deepseek-v2-tiny

trains the tiny size on the embedded text.
"""

from configs import common

YARN = dict(factor=40.0, beta_fast=32.0, beta_slow=1.0, original_max_length=4096, mscale=0.707, mscale_all_dim=0.707)
SHARED = dict(
    rope_theta=1e4, rope_interleaved=True, attention_bias=False, norm_eps=1e-6, tied=False, normalize=False,
    num_shared=2, dense_layers=1,
)  # fmt: skip
PUBLISHED = dict(
    SHARED, vocab_size=102400, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128, top_k=6, max_length=163840,
    rope_scaling=YARN,
)  # fmt: skip
SIZES = {
    "tiny": dict(
        SHARED, vocab_size=264, d_model=64, num_layers=3, num_heads=4, q_rank=None, kv_rank=16, nope_dim=16,
        rope_dim=8, v_dim=12, d_ff=160, moe_d_ff=32, num_experts=8, top_k=2, groups=4, top_groups=2,
        method="group_limited_greedy", routed_scale=4.0, max_length=256,
        rope_scaling=dict(YARN, original_max_length=64),
    ),
    "lite": dict(
        PUBLISHED, d_model=2048, num_layers=27, num_heads=16, q_rank=None, d_ff=10944, moe_d_ff=1408, num_experts=64,
        groups=1, top_groups=1, method="greedy", routed_scale=1.0,
    ),
    "236b": dict(
        PUBLISHED, d_model=5120, num_layers=60, num_heads=128, q_rank=1536, d_ff=12288, moe_d_ff=1536,
        num_experts=160, groups=8, top_groups=3, method="group_limited_greedy", routed_scale=16.0,
    ),
}  # fmt: skip
# Parameters of the released checkpoints.
PARAMETERS = {"lite": 15_706_484_224, "236b": 235_741_434_880}


def get_config(size: str = "tiny"):
    """The run of a size."""
    return common.run("deepseek_v2", SIZES, size, balance=dict(sequence=1e-3))
