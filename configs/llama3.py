"""Llama 3, 3.1 and 3.2 (Grattafiori et al. 2024).

    python train.py --config configs/llama3.py:mini --workdir runs/mini

trains a Llama of 0.8 million parameters on the embedded text, byte by byte: about two minutes on two cores, to 2.2
validation bits a byte.
"""

from configs import common

BIASES = dict(attention_bias=False, mlp_bias=False)
PUBLISHED = dict(BIASES, vocab_size=128256, norm_eps=1e-5, rope_theta=5e5, num_kv_heads=8)
SCALING = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=8192)
LONG = dict(PUBLISHED, max_length=131072, rope_scaling=SCALING)
SHORT = dict(PUBLISHED, max_length=8192)
SMALL = dict(LONG, rope_scaling=dict(SCALING, factor=32.0), tied=True)
D8B = dict(d_model=4096, num_layers=32, num_heads=32, head_dim=128, d_ff=14336, tied=False)
D70B = dict(d_model=8192, num_layers=80, num_heads=64, head_dim=128, d_ff=28672, tied=False)
TINY = dict(BIASES, vocab_size=264, rope_theta=1e4, norm_eps=1e-5)
SIZES = {
    "tiny": dict(
        TINY,
        d_model=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        d_ff=160,
        max_length=256,
        tied=False,
        rope_scaling=dict(SCALING, original_max_length=64),
    ),
    "mini": dict(
        TINY, d_model=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, d_ff=384, max_length=1024, tied=True
    ),
    "8b": dict(SHORT, **D8B),
    "70b": dict(SHORT, **D70B),
    "3.1-8b": dict(LONG, **D8B),
    "3.1-70b": dict(LONG, **D70B),
    "3.1-405b": dict(LONG, d_model=16384, num_layers=126, num_heads=128, head_dim=128, d_ff=53248, tied=False),
    "3.2-1b": dict(SMALL, d_model=2048, num_layers=16, num_heads=32, head_dim=64, d_ff=8192),
    "3.2-3b": dict(SMALL, d_model=3072, num_layers=28, num_heads=24, head_dim=128, d_ff=8192),
}
# Parameters of the released checkpoints.
PARAMETERS = {
    "8b": 8_030_261_248,
    "70b": 70_553_706_496,
    "3.1-8b": 8_030_261_248,
    "3.1-70b": 70_553_706_496,
    "3.1-405b": 405_853_388_800,
    "3.2-1b": 1_235_814_400,
    "3.2-3b": 3_212_749_824,
}


def get_config(size: str = "mini"):
    """The run of a size."""
    groups = {}
    if size == "mini":  # small batches and many steps: what learns most in two minutes of a laptop
        train = dict(steps=450, eval_every=150, checkpoint_every=150, sample_every=450)
        train["sample_prompts"] = ("The ", "Return ")
        groups = dict(data=dict(batch_size=8), train=train)
    return common.run("llama3", SIZES, size, **groups)
