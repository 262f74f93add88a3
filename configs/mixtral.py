"""Mixtral (Jiang et al. 2024): eight experts, two a token.

    python train.py --config configs/mixtral.py:tiny --workdir runs/mixtral-tiny

trains the tiny size on the embedded text.

The auxiliary loss weighs what `router_aux_loss_coef` in the config.json of Mixtral-8x7B-v0.1 and Mixtral-8x22B-v0.1
says (0.02, 0.001); the paper has no recipe. Hugging Face's loss of that name is `top_k` where experts are used evenly,
over all layers at once; ours is Switch's: 1, in each layer.
"""

from configs import common

PUBLISHED = dict(window=None, rope_theta=1e6, norm_eps=1e-5, num_experts=8, top_k=2, tied=False)
SIZES = {
    "tiny": dict(
        PUBLISHED, vocab_size=264, d_model=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=48,
        max_length=256,
    ),
    "8x7b": dict(
        PUBLISHED, vocab_size=32000, d_model=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
        d_ff=14336, max_length=32768,
    ),
    "8x22b": dict(
        PUBLISHED, vocab_size=32768, d_model=6144, num_layers=56, num_heads=48, num_kv_heads=8, head_dim=128,
        d_ff=16384, max_length=65536,
    ),
}  # fmt: skip
# Parameters of the released checkpoints, and those that a token uses.
PARAMETERS = {"8x7b": 46_702_792_704, "8x22b": 140_630_071_296}
ACTIVE = {"8x7b": 12_879_925_248}
AUXILIARY = {"tiny": 0.02, "8x7b": 0.02, "8x22b": 0.001}


def get_config(size: str = "tiny"):
    """The run of a size."""
    return common.run("mixtral", SIZES, size, balance=dict(auxiliary=AUXILIARY.get(size)))
