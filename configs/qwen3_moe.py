"""Qwen3, mixture-of-experts sizes (Yang et al. 2025): 128 experts, eight a token, none shared.

    python train.py --config configs/qwen3_moe.py:tiny --workdir runs/qwen3-moe-tiny

trains the tiny size on the embedded text.

The auxiliary loss weighs 0.001, `router_aux_loss_coef` in the published config.json; the report (arXiv:2505.09388,
section 2) names its kind and no number: by the load of the global batch, as here.
"""

from configs import common

PUBLISHED = dict(
    vocab_size=151936, num_kv_heads=4, head_dim=128, max_length=40960, rope_theta=1e6, norm_eps=1e-6, tied=False,
    num_experts=128, top_k=8, normalize=True, sparse_step=1, dense_layers=(),
)  # fmt: skip
SIZES = {
    "tiny": dict(
        PUBLISHED, vocab_size=264, d_model=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=96,
        max_length=256, moe_d_ff=32, num_experts=8, top_k=3, sparse_step=2,
    ),
    "30b-a3b": dict(PUBLISHED, d_model=2048, num_layers=48, num_heads=32, d_ff=6144, moe_d_ff=768),
    "235b-a22b": dict(PUBLISHED, d_model=4096, num_layers=94, num_heads=64, d_ff=12288, moe_d_ff=1536),
}  # fmt: skip
# Parameters of the released checkpoints.
PARAMETERS = {"30b-a3b": 30_532_122_624, "235b-a22b": 235_093_634_560}


def get_config(size: str = "tiny"):
    """The run of a size."""
    return common.run("qwen3_moe", SIZES, size, balance=dict(auxiliary=1e-3))
