"""T5 (Raffel et al. 2019, arXiv:1910.10683) and T5 1.1: an encoder and a decoder with relative biases.

    python train.py --config configs/t5.py:tiny --workdir runs/spans

fills hidden spans of the embedded text. FLAN-T5 has the sizes of version 1.1.
"""

from configs import common

SHARED = dict(norm_eps=1e-6, num_buckets=32, decoder_start=0)
RELEASED = dict(vocab_size=32128, max_length=512, max_distance=128, **SHARED)
FIRST = dict(gated=False, tied=True, **RELEASED)
SECOND = dict(gated=True, tied=False, **RELEASED)
# num_heads · head_dim is not d_model, and the decoder is not as deep as the encoder. The vocabulary has room for all
# sentinels of the byte tokenizer, so that spans are as short as published.
TINY = dict(
    vocab_size=360, d_model=64, num_layers=3, num_decoder_layers=2, num_heads=4, head_dim=24, max_length=256,
    max_distance=20, **SHARED,
)  # fmt: skip


def _layers(number: int) -> dict[str, int]:
    return dict(num_layers=number, num_decoder_layers=number)


SIZES = {
    "tiny": dict(d_ff=160, gated=False, tied=True, **TINY),
    "tiny-v1.1": dict(d_ff=160, gated=True, tied=False, **TINY),
    "small": dict(d_model=512, num_heads=8, head_dim=64, d_ff=2048, **_layers(6), **FIRST),
    "base": dict(d_model=768, num_heads=12, head_dim=64, d_ff=3072, **_layers(12), **FIRST),
    "large": dict(d_model=1024, num_heads=16, head_dim=64, d_ff=4096, **_layers(24), **FIRST),
    "3b": dict(d_model=1024, num_heads=32, head_dim=128, d_ff=16384, **_layers(24), **FIRST),
    "11b": dict(d_model=1024, num_heads=128, head_dim=128, d_ff=65536, **_layers(24), **FIRST),
    "v1.1-small": dict(d_model=512, num_heads=6, head_dim=64, d_ff=1024, **_layers(8), **SECOND),
    "v1.1-base": dict(d_model=768, num_heads=12, head_dim=64, d_ff=2048, **_layers(12), **SECOND),
    "v1.1-large": dict(d_model=1024, num_heads=16, head_dim=64, d_ff=2816, **_layers(24), **SECOND),
    "v1.1-xl": dict(d_model=2048, num_heads=32, head_dim=64, d_ff=5120, **_layers(24), **SECOND),
    "v1.1-xxl": dict(d_model=4096, num_heads=64, head_dim=64, d_ff=10240, **_layers(24), **SECOND),
}
# Parameters of the released checkpoints.
PARAMETERS = {
    "small": 60_506_624,
    "base": 222_903_552,
    "large": 737_668_096,
    "3b": 2_851_598_336,
    "11b": 11_307_321_344,
    "v1.1-small": 76_961_152,
    "v1.1-base": 247_577_856,
    "v1.1-large": 783_150_080,
    "v1.1-xl": 2_849_757_184,
    "v1.1-xxl": 11_135_332_352,
}


def get_config(size: str = "tiny"):
    """The run of a size."""
    return common.run("t5", SIZES, size, data=dict(objective="spans"))
