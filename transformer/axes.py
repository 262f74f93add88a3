"""The closed list of logical axis names.

A parameter or activation names its dimensions with these where it is created; `sharding.py` alone says which
mesh axes they lie on. Anything that is not in `ALL` is refused.
"""

# Parameters.
VOCAB = "vocab"  # V, rows of the token table and columns of the head
POSITION = "position"  # rows of a learned position table
BUCKETS = "buckets"  # rows of a table of relative biases
TYPES = "types"  # rows of a table of token types
CLASSES = "classes"  # C, what a classifier tells apart
EMBED = "embed"  # D, the model dimension of a parameter
EMBED_OUT = "embed_out"  # D where it comes out of a projection that D goes into
HEADS = "heads"  # N, query heads
KV_HEADS = "kv_heads"  # K, key/value heads
HEAD_DIM = "head_dim"  # H
MLP = "mlp"  # F, the hidden dimension of a feed-forward layer
EXPERTS = "experts"  # E, experts of a mixture
EXPERT_EMBED = "expert_embed"  # D of an expert's parameters, which lie on the expert axis already
ROUTES = "routes"  # E as a router's output: small, and every device needs all of it
LATENT = "latent"  # R, width of a compressed query or key/value, where it goes into a projection
LATENT_OUT = "latent_out"  # R where it comes out of one
LAYERS = "layers"  # the repeats of a stack's body
NORM = "norm"  # a norm's scale or bias: small, one number per feature

# Activations.
BATCH = "batch"  # B
LENGTH = "length"  # T or S
STREAM_LENGTH = "stream_length"  # T or S of the residual stream, between what the branches do
ACT_EMBED = "act_embed"  # D of the residual stream
ACT_HEADS = "act_heads"  # N or K of activations
ACT_MLP = "act_mlp"  # F of activations
ACT_VOCAB = "act_vocab"  # V of logits

ALL = frozenset({
    VOCAB, POSITION, BUCKETS, TYPES, CLASSES, EMBED, EMBED_OUT, HEADS, KV_HEADS, HEAD_DIM, MLP, EXPERTS, EXPERT_EMBED,
    ROUTES, LATENT, LATENT_OUT, LAYERS, NORM, BATCH, LENGTH, STREAM_LENGTH, ACT_EMBED, ACT_HEADS, ACT_MLP, ACT_VOCAB,
})  # fmt: skip
