"""Gemma 3, text models (Gemma Team 2025).

    python train.py --config configs/gemma3.py:tiny --workdir runs/gemma3-tiny

trains the tiny size on the embedded text. Published counts are of the text model alone: the vision tower of the
larger checkpoints is not part of it.
"""

from configs import common

SHARED = dict(pattern=6, rope_theta=1e6, rope_theta_local=1e4, norm_eps=1e-6)
LONG = dict(SHARED, vocab_size=262208, max_length=131072, window=1024, rope_scaling=dict(factor=8.0))
SIZES = {
    "tiny": dict(
        vocab_size=264,
        d_model=64,
        num_layers=7,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        d_ff=160,
        max_length=256,
        window=8,
        pattern=3,
        query_scale=16.0,
        rope_theta=1e5,
        rope_theta_local=1e4,
        norm_eps=1e-6,
        rope_scaling=dict(factor=2.0),
    ),
    "1b": dict(
        SHARED,
        vocab_size=262144,
        max_length=32768,
        window=512,
        d_model=1152,
        num_layers=26,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        d_ff=6912,
        query_scale=256.0,
    ),
    "4b": dict(
        LONG, d_model=2560, num_layers=34, num_heads=8, num_kv_heads=4, head_dim=256, d_ff=10240, query_scale=256.0
    ),
    "12b": dict(
        LONG, d_model=3840, num_layers=48, num_heads=16, num_kv_heads=8, head_dim=256, d_ff=15360, query_scale=256.0
    ),
    "27b": dict(
        LONG, d_model=5376, num_layers=62, num_heads=32, num_kv_heads=16, head_dim=128, d_ff=21504, query_scale=168.0
    ),
}
# Parameters of the released text models, the tied table counted once.
PARAMETERS = {
    "1b": 999_885_952,
    "4b": 3_880_263_168,
    "12b": 11_766_034_176,
    "27b": 27_009_346_304,
}


def get_config(size: str = "tiny"):
    """The run of a size."""
    return common.run("gemma3", SIZES, size)
