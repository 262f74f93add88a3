"""BERT (Devlin et al. 2018, arXiv:1810.04805): an encoder with token types, a masked language model and a pooler.

    python train.py --config configs/bert.py:tiny --workdir runs/masked

guesses hidden bytes of the embedded text. Both published sizes are the uncased ones; the cased have 28,996 tokens.
"""

from configs import common

PARTS = dict(token_types=2, norm_eps=1e-12, masked_lm=True, pooler=True, next_sentence=True)
PUBLISHED = dict(vocab_size=30522, max_length=512, **PARTS)
SIZES = {
    "tiny": dict(vocab_size=264, d_model=72, num_layers=3, num_heads=6, d_ff=160, max_length=256, **PARTS),
    "base": dict(d_model=768, num_layers=12, num_heads=12, d_ff=3072, **PUBLISHED),
    "large": dict(d_model=1024, num_layers=24, num_heads=16, d_ff=4096, **PUBLISHED),
}
# All that pre-training has: the encoder, the head's transform and bias, the pooler and its classifier; the token table
# once. Without head and classifier these are 109,482,240 and 335,141,888, the paper's 110M and 340M.
PARAMETERS = {"base": 110_106_428, "large": 336_226_108}


def get_config(size: str = "tiny"):
    """The run of a size."""
    return common.run("bert", SIZES, size, data=dict(objective="masked"))
