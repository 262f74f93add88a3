"""Qwen2.5, dense sizes (Yang et al. 2024).

    python train.py --config configs/qwen2.py:tiny --workdir runs/qwen2-tiny

trains the tiny size on the embedded text.
"""

from configs import common

PUBLISHED = dict(max_length=32768, rope_theta=1e6, norm_eps=1e-6)
SMALL = dict(PUBLISHED, vocab_size=151936)
LARGE = dict(PUBLISHED, vocab_size=152064, head_dim=128, tied=False, max_length=131072)
SIZES = {
    "tiny": dict(
        PUBLISHED, vocab_size=264, d_model=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=160,
        max_length=256, tied=True, window=8, full_layers=1,
    ),
    "0.5b": dict(
        SMALL, d_model=896, num_layers=24, num_heads=14, num_kv_heads=2, head_dim=64, d_ff=4864, tied=True
    ),
    "1.5b": dict(
        SMALL, d_model=1536, num_layers=28, num_heads=12, num_kv_heads=2, head_dim=128, d_ff=8960, tied=True,
    ),
    "7b": dict(LARGE, d_model=3584, num_layers=28, num_heads=28, num_kv_heads=4, d_ff=18944),
    "72b": dict(LARGE, d_model=8192, num_layers=80, num_heads=64, num_kv_heads=8, d_ff=29568),
}  # fmt: skip
# Parameters of the released checkpoints, a tied table counted once.
PARAMETERS = {"0.5b": 494_032_768, "1.5b": 1_543_714_304, "7b": 7_615_616_512, "72b": 72_706_203_648}


def get_config(size: str = "tiny"):
    """The run of a size."""
    return common.run("qwen2", SIZES, size)
