"""GPT-2 (Radford et al. 2019).

    python train.py --config configs/gpt2.py:tiny --workdir runs/gpt2-tiny

trains the tiny size on the embedded text. The published sizes are those of the released checkpoints.
"""

from configs import common

PUBLISHED = dict(vocab_size=50257, max_length=1024)
SIZES = {
    "tiny": dict(vocab_size=264, d_model=64, num_layers=3, num_heads=4, max_length=256),
    "small": dict(d_model=768, num_layers=12, num_heads=12, **PUBLISHED),
    "medium": dict(d_model=1024, num_layers=24, num_heads=16, **PUBLISHED),
    "large": dict(d_model=1280, num_layers=36, num_heads=20, **PUBLISHED),
    "xl": dict(d_model=1600, num_layers=48, num_heads=25, **PUBLISHED),
}
# Parameters of the released checkpoints, the tied table counted once.
PARAMETERS = {"small": 124_439_808, "medium": 354_823_168, "large": 774_030_080, "xl": 1_557_611_200}


def get_config(size: str = "tiny"):
    """The run of a size."""
    return common.run("gpt2", SIZES, size)
