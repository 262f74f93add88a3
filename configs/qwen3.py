"""Qwen3, dense sizes (Yang et al. 2025).

    python train.py --config configs/qwen3.py:tiny --workdir runs/qwen3-tiny

trains the tiny size on the embedded text.
"""

from configs import common

PUBLISHED = dict(vocab_size=151936, num_kv_heads=8, head_dim=128, max_length=40960, rope_theta=1e6, norm_eps=1e-6)
SIZES = {
    "tiny": dict(
        vocab_size=264,
        d_model=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        d_ff=160,
        max_length=256,
        rope_theta=1e4,
        norm_eps=1e-6,
        tied=True,
        rope_scaling=dict(factor=4.0, beta_fast=32.0, beta_slow=1.0, original_max_length=64),
    ),
    "0.6b": dict(PUBLISHED, d_model=1024, num_layers=28, num_heads=16, d_ff=3072, tied=True),
    "1.7b": dict(PUBLISHED, d_model=2048, num_layers=28, num_heads=16, d_ff=6144, tied=True),
    "4b": dict(PUBLISHED, d_model=2560, num_layers=36, num_heads=32, d_ff=9728, tied=True),
    "8b": dict(PUBLISHED, d_model=4096, num_layers=36, num_heads=32, d_ff=12288, tied=False),
    "14b": dict(PUBLISHED, d_model=5120, num_layers=40, num_heads=40, d_ff=17408, tied=False),
    "32b": dict(PUBLISHED, d_model=5120, num_layers=64, num_heads=64, d_ff=25600, tied=False),
}
# Parameters of the released checkpoints, a tied table counted once.
PARAMETERS = {
    "0.6b": 596_049_920,
    "1.7b": 1_720_574_976,
    "4b": 4_022_468_096,
    "8b": 8_190_735_360,
    "14b": 14_768_307_200,
    "32b": 32_762_123_264,
}


def get_config(size: str = "tiny"):
    """The run of a size."""
    return common.run("qwen3", SIZES, size)
