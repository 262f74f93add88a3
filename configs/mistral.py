"""Mistral 7B (Jiang et al. 2023): a window of 4,096 keys in every layer.

    python train.py --config configs/mistral.py:tiny --workdir runs/mistral-tiny

trains the tiny size on the embedded text.
"""

from configs import common

D7B = dict(
    d_model=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    d_ff=14336,
    max_length=32768,
    norm_eps=1e-5,
    tied=False,
)
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
        window=8,
        rope_theta=1e4,
        norm_eps=1e-5,
        tied=False,
    ),
    "7b-v0.1": dict(D7B, vocab_size=32000, window=4096, rope_theta=1e4),
    "7b-v0.3": dict(D7B, vocab_size=32768, window=None, rope_theta=1e6),
}
# Parameters of the released checkpoints.
PARAMETERS = {"7b-v0.1": 7_241_732_096, "7b-v0.3": 7_248_023_552}


def get_config(size: str = "tiny"):
    """The run of a size."""
    return common.run("mistral", SIZES, size)
