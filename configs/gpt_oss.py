"""gpt-oss (OpenAI 2025): alternating windows, learned sinks, clamped experts.

    python train.py --config configs/gpt_oss.py:tiny --workdir runs/gpt-oss-tiny

trains the tiny size on the embedded text.

How the released models were balanced is not published: `router_aux_loss_coef` is 0.9 in their config.json, beside
`output_router_logits` false, which leaves it unused. The auxiliary loss here weighs 0.01, as in the Switch Transformer
(arXiv:2101.03961, section 2.2).
"""

from configs import common

YARN = dict(factor=32.0, beta_fast=32.0, beta_slow=1.0, original_max_length=4096, truncate=False)
PUBLISHED = dict(
    vocab_size=201088, d_model=2880, num_heads=64, num_kv_heads=8, head_dim=64, d_ff=2880, max_length=131072,
    window=128, top_k=4, swiglu_limit=7.0, rope_theta=1.5e5, rope_scaling=YARN, norm_eps=1e-5,
)  # fmt: skip
SIZES = {
    "tiny": dict(
        PUBLISHED, vocab_size=264, d_model=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=24, d_ff=32,
        max_length=256, window=8, num_experts=6, top_k=3, rope_scaling=dict(YARN, original_max_length=64),
    ),
    "20b": dict(PUBLISHED, num_layers=24, num_experts=32),
    "120b": dict(PUBLISHED, num_layers=36, num_experts=128),
}  # fmt: skip
# Parameters of the released checkpoints.
PARAMETERS = {"20b": 20_914_757_184, "120b": 116_829_156_672}


def get_config(size: str = "tiny"):
    """The run of a size."""
    return common.run("gpt_oss", SIZES, size, balance=dict(auxiliary=1e-2))
