"""Random small `config.json`s of the families with an encoder; the others are in `configs.py`."""

from collections.abc import Callable
from random import Random

from tests.parity.configs import Config


def bert(rng: Random) -> Config:
    """The parts that there are follow from the architecture."""
    heads = rng.randint(1, 4)
    return {
        "model_type": "bert",
        "architectures": [rng.choice(("BertForPreTraining", "BertForMaskedLM", "BertModel"))],
        "vocab_size": rng.randint(20, 60),
        "hidden_size": heads * rng.randint(2, 9),
        "num_hidden_layers": rng.randint(1, 4),
        "num_attention_heads": heads,
        "intermediate_size": rng.randint(3, 40),
        "max_position_embeddings": 64,
        "type_vocab_size": rng.randint(1, 3),
        "layer_norm_eps": rng.choice((1e-12, 1e-5)),
        "hidden_act": "gelu",
    }


def t5(rng: Random) -> Config:
    """Both versions; heads are as wide as they like, and the stacks as deep."""
    gated = rng.random() < 0.5
    return {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "vocab_size": rng.randint(20, 60),
        "d_model": rng.randint(4, 20),
        "d_kv": rng.randint(2, 9),
        "num_heads": rng.randint(1, 4),
        "d_ff": rng.randint(3, 40),
        "num_layers": rng.randint(1, 4),
        "num_decoder_layers": rng.randint(1, 4),
        "relative_attention_num_buckets": rng.choice((8, 32)),
        "relative_attention_max_distance": rng.choice((20, 128)),
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "tie_word_embeddings": not gated,
        "decoder_start_token_id": rng.randint(0, 9),
    }


def marian(rng: Random) -> Config:
    """One table for all, and any of the activations."""
    heads, layers, hidden = rng.randint(1, 4), rng.randint(1, 3), rng.randint(3, 40)
    vocab = rng.randint(20, 60)
    return {
        "model_type": "marian",
        "vocab_size": vocab,
        "decoder_vocab_size": vocab,
        "d_model": heads * 2 * rng.randint(1, 5),
        "encoder_layers": layers,
        "decoder_layers": rng.randint(1, 3),
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": hidden,
        "decoder_ffn_dim": hidden,
        "max_position_embeddings": 64,
        "activation_function": rng.choice(("relu", "swish", "gelu")),
        "scale_embedding": True,
        "static_position_embeddings": True,
        "share_encoder_decoder_embeddings": True,
        "decoder_start_token_id": vocab - 1,
    }


MAKERS: dict[str, Callable[[Random], Config]] = {make.__name__: make for make in (bert, t5, marian)}
