"""DeepSeek-V3 (DeepSeek-AI 2024), with its module of multi-token prediction.

    python train.py --config configs/deepseek_v3.py:tiny --workdir runs/deepseek-v3-tiny

trains the tiny size on the embedded text. From the paper (arXiv:2412.19437, section 4.2): the correction moves by
γ = 0.001 a step for the first 14.3T of 14.8T tokens, then no more (`balance.correction_rate=0`); the balance loss of a
sequence weighs α = 0.0001; multi-token prediction weighs λ = 0.3 for the first 10T tokens, then 0.1.
"""

from configs import common

YARN = dict(factor=40.0, beta_fast=32.0, beta_slow=1.0, original_max_length=4096, mscale=1.0, mscale_all_dim=1.0)
SHARED = dict(
    rope_theta=1e4, rope_interleaved=True, attention_bias=False, norm_eps=1e-6, tied=False, normalize=True,
    routed_scale=2.5, num_shared=1, mtp=1,
)  # fmt: skip
SIZES = {
    "tiny": dict(
        SHARED, vocab_size=264, d_model=64, num_layers=3, num_heads=4, q_rank=24, kv_rank=16, nope_dim=16, rope_dim=8,
        v_dim=12, d_ff=160, moe_d_ff=32, num_experts=8, top_k=3, groups=4, top_groups=2, dense_layers=1,
        max_length=256, rope_scaling=dict(YARN, original_max_length=64),
    ),
    "671b": dict(
        SHARED, vocab_size=129280, d_model=7168, num_layers=61, num_heads=128, q_rank=1536, kv_rank=512, nope_dim=128,
        rope_dim=64, v_dim=128, d_ff=18432, moe_d_ff=2048, num_experts=256, top_k=8, groups=8, top_groups=4,
        dense_layers=3, max_length=163840, rope_scaling=YARN,
    ),
}  # fmt: skip
# The main model of the released checkpoint, its correction biases included. Multi-token prediction has 11.5B more.
PARAMETERS = {"671b": 671_026_419_200}


def get_config(size: str = "tiny"):
    """The run of a size."""
    balance = dict(sequence=1e-4, correction_rate=1e-3)
    return common.run("deepseek_v3", SIZES, size, balance=balance, train=dict(mtp_weight=0.3))
