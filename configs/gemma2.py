"""Gemma 2 (Gemma Team 2024).

    python train.py --config configs/gemma2.py:tiny --workdir runs/gemma2-tiny

trains the tiny size on the embedded text.
"""

from configs import common

PUBLISHED = dict(
    vocab_size=256000, max_length=8192, window=4096, rope_theta=1e4, norm_eps=1e-6, attention_softcap=50.0,
    final_softcap=30.0,
)  # fmt: skip
SIZES = {
    "tiny": dict(
        PUBLISHED, vocab_size=264, d_model=64, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=24, d_ff=160,
        max_length=256, window=8, query_scale=16.0,
    ),
    "2b": dict(
        PUBLISHED, d_model=2304, num_layers=26, num_heads=8, num_kv_heads=4, head_dim=256, d_ff=9216, query_scale=256.0
    ),
    "9b": dict(
        PUBLISHED, d_model=3584, num_layers=42, num_heads=16, num_kv_heads=8, head_dim=256, d_ff=14336,
        query_scale=256.0,
    ),
    "27b": dict(
        PUBLISHED, d_model=4608, num_layers=46, num_heads=32, num_kv_heads=16, head_dim=128, d_ff=36864,
        query_scale=144.0,
    ),
}  # fmt: skip
# Parameters of the released checkpoints, the tied table counted once.
PARAMETERS = {"2b": 2_614_341_888, "9b": 9_241_705_984, "27b": 27_227_128_320}


def get_config(size: str = "tiny"):
    """The run of a size."""
    return common.run("gemma2", SIZES, size)
