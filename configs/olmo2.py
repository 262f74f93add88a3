"""OLMo 2 (OLMo Team 2024, arXiv:2501.00656): OLMo-2-0425-1B, -1124-7B, -1124-13B and -0325-32B.

    python train.py --config configs/olmo2.py:tiny --workdir runs/olmo2-tiny

trains the tiny size on the embedded text.
"""

from configs import common

# The table has rows for 100,278 tokens and 74 unused ones.
PUBLISHED = dict(vocab_size=100352, head_dim=128, max_length=4096, rope_theta=5e5, norm_eps=1e-6)
SIZES = {
    "tiny": dict(
        vocab_size=264, d_model=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=24, d_ff=160, max_length=256,
        rope_theta=1e4, norm_eps=1e-6,
    ),
    "1b": dict(PUBLISHED, d_model=2048, num_layers=16, num_heads=16, num_kv_heads=16, d_ff=8192),
    "7b": dict(PUBLISHED, d_model=4096, num_layers=32, num_heads=32, num_kv_heads=32, d_ff=11008),
    "13b": dict(PUBLISHED, d_model=5120, num_layers=40, num_heads=40, num_kv_heads=40, d_ff=13824),
    "32b": dict(PUBLISHED, d_model=5120, num_layers=64, num_heads=40, num_kv_heads=8, d_ff=27648),
}  # fmt: skip
# Parameters of the released checkpoints.
PARAMETERS = {"1b": 1_484_916_736, "7b": 7_298_617_344, "13b": 13_716_198_400, "32b": 32_234_279_936}


def get_config(size: str = "tiny"):
    """The run of a size."""
    return common.run("olmo2", SIZES, size)
