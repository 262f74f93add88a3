"""Cross-entropy that never keeps the logits of all positions."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LOWEST = -1e30


def cross_entropy(
    x: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    *,
    bias: Float[Array, " V"] | None = None,
    softcap: float | None = None,
    chunk: int,
    shards: int = 1,
) -> Float[Array, "B T"]:
    """Negative log-likelihood of `targets` in nats, float32, from features and the head's table.

    The vocabulary is walked in chunks of at most `chunk` columns with a running log-sum-exp, and each chunk's
    logits are computed again in the backward pass: memory is B·T·chunk, not B·T·V. `shards` is the number of
    parts in which the mesh holds V: every chunk takes an equal slice of each part, so nothing is gathered.
    """
    norm, picked, _ = _walk(x, table, targets, bias, softcap, chunk, shards, summed=False)
    return norm - picked


def smoothed_cross_entropy(
    x: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    smoothing: float,
    *,
    bias: Float[Array, " V"] | None = None,
    softcap: float | None = None,
    chunk: int,
    shards: int = 1,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """`cross_entropy`, and the same against targets of which a share is spread evenly over the vocabulary.

    The second is against (1 - smoothing) · one-hot + smoothing / V (Szegedy et al. 2016, arXiv:1512.00567, section 7).
    """
    norm, picked, total = _walk(x, table, targets, bias, softcap, chunk, shards, summed=True)
    return norm - picked, norm - (1 - smoothing) * picked - smoothing / table.shape[0] * total


def _walk(x, table, targets, bias, softcap, chunk, shards, summed: bool) -> tuple[Array, Array, Array]:
    """Of each position's logits: the log-sum-exp, the target's, and if `summed` their sum (else 0); [B, T] each."""
    vocab, dim = table.shape
    if vocab % shards:
        raise ValueError(f"vocab_size={vocab}: the mesh splits it {shards} ways, which doesn't divide it")
    part = vocab // shards
    pieces = -(-part * shards // chunk)
    width = -(-part // pieces)
    table = table.astype(x.dtype).reshape(shards, part, dim)
    offsets = jnp.zeros(vocab, jnp.float32) if bias is None else bias.astype(jnp.float32)
    ids = jnp.arange(vocab, dtype=jnp.int32).reshape(shards, part)
    spare = ((0, 0), (0, pieces * width - part))
    # Columns that only pad the last chunk get id -1 and a logit that adds nothing to the sum.
    ids = jnp.pad(ids, spare, constant_values=-1).reshape(shards, pieces, width).swapaxes(0, 1)
    offsets = jnp.pad(offsets.reshape(shards, part), spare).reshape(shards, pieces, width).swapaxes(0, 1)
    table = jnp.pad(table, (*spare, (0, 0))).reshape(shards, pieces, width, dim).swapaxes(0, 1)

    def step(carry, piece):
        top, total, picked, all_of_them = carry
        columns, offset, column = piece
        logits = jnp.einsum("btd,svd->btsv", x, columns, preferred_element_type=jnp.float32) + offset
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        logits = jnp.where(column >= 0, logits, LOWEST)
        higher = jnp.maximum(top, jax.lax.stop_gradient(jnp.max(logits, axis=(2, 3))))
        total = total * jnp.exp(top - higher) + jnp.sum(jnp.exp(logits - higher[..., None, None]), axis=(2, 3))
        hit = column == targets[..., None, None]
        picked = picked + jnp.sum(jnp.where(hit, logits, 0), axis=(2, 3))
        if summed:
            all_of_them = all_of_them + jnp.sum(jnp.where(column >= 0, logits, 0), axis=(2, 3))
        return (higher, total, picked, all_of_them), None

    zero = jnp.zeros(targets.shape, jnp.float32)
    carry = (jnp.full(targets.shape, LOWEST), zero, zero, zero)
    if pieces == 1:
        (top, total, picked, all_of_them), _ = step(carry, (table[0], offsets[0], ids[0]))
    else:
        (top, total, picked, all_of_them), _ = jax.lax.scan(jax.checkpoint(step), carry, (table, offsets, ids))
    return jnp.log(total) + top, picked, all_of_them
