"""OPUS-MT's translators (Tiedemann and Thottingal 2020): the transformer of 2017 as Marian trains it.

    python -m transformer.explain --config configs/marian.py:opus-mt-en-de

prints it. The other pairs of languages differ in the vocabulary.
"""

from configs import common

SIZES = {
    "tiny": dict(
        vocab_size=264, d_model=72, num_layers=2, num_decoder_layers=3, num_heads=6, d_ff=160, max_length=256,
        activation="silu", decoder_start=263,
    ),
    "opus-mt-en-de": dict(
        vocab_size=58101, d_model=512, num_layers=6, num_decoder_layers=6, num_heads=8, d_ff=2048, max_length=512,
        activation="silu", decoder_start=58100,
    ),
}  # fmt: skip
# The trained tensors and the bias of the logits; the table of sinusoids that the files may hold is not counted.
PARAMETERS = {"opus-mt-en-de": 73_944_309}


def get_config(size: str = "tiny"):
    """The run of a size."""
    return common.run("marian", SIZES, size, data=dict(source="numbers", objective="pairs"))
