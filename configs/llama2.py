"""Llama 2 (Touvron et al. 2023).

    python train.py --config configs/llama2.py:tiny --workdir runs/llama2-tiny

trains the tiny size on the embedded text.
"""

from configs import common

PUBLISHED = dict(
    vocab_size=32000, head_dim=128, max_length=4096, rope_theta=1e4, norm_eps=1e-5, tied=False,
    attention_bias=False, mlp_bias=False,
)  # fmt: skip
SIZES = {
    "tiny": dict(
        PUBLISHED, vocab_size=264, d_model=64, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16, d_ff=160,
        max_length=256,
    ),
    "7b": dict(PUBLISHED, d_model=4096, num_layers=32, num_heads=32, num_kv_heads=32, d_ff=11008),
    "13b": dict(PUBLISHED, d_model=5120, num_layers=40, num_heads=40, num_kv_heads=40, d_ff=13824),
    "70b": dict(PUBLISHED, d_model=8192, num_layers=80, num_heads=64, num_kv_heads=8, d_ff=28672),
}  # fmt: skip
# Parameters of the released checkpoints.
PARAMETERS = {"7b": 6_738_415_616, "13b": 13_015_864_320, "70b": 68_976_648_192}


def get_config(size: str = "tiny"):
    """The run of a size."""
    return common.run("llama2", SIZES, size)
