"""Picking a token's experts, and their weights."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer.spec import Router


def route(
    router: Router,
    top_k: int,
    logits: Float[Array, "*B E"],
    correction: Float[Array, " E"] | None = None,
) -> tuple[Int[Array, "*B k"], Float[Array, "*B k"]]:
    """(index, weight) of each token's `top_k` experts, best first; all in float32.

    Sources: Mixtral (arXiv:2401.04088, section 2), gpt-oss (openai/gpt-oss, torch/model.py), DeepSeek-V3
    (arXiv:2412.19437, section 2.1.2: the correction picks, the unbiased score weighs).
    """
    logits = logits.astype(jnp.float32)
    match router.score:
        case "softmax":
            scores = jax.nn.softmax(logits, axis=-1)
        case "sigmoid":
            scores = jax.nn.sigmoid(logits)
        case "softmax_picked":
            scores = logits
    ranked = scores if correction is None else scores + jax.lax.stop_gradient(correction.astype(jnp.float32))
    if router.groups > 1:
        ranked = _best_groups(router, ranked)
    _, index = jax.lax.top_k(ranked, top_k)
    weight = jnp.take_along_axis(scores, index, axis=-1)
    if router.score == "softmax_picked":
        weight = jax.nn.softmax(weight, axis=-1)
    if router.normalize:
        weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
    return index, weight * router.scale


def _best_groups(router: Router, ranked: Float[Array, "*B E"]) -> Float[Array, "*B E"]:
    """Experts outside the best `top_groups` groups at -inf."""
    groups = ranked.reshape(*ranked.shape[:-1], router.groups, -1)
    best = jax.lax.top_k(groups, 1 if router.group_score == "max" else 2)[0].sum(axis=-1)
    kept = jax.nn.one_hot(jax.lax.top_k(best, router.top_groups)[1], router.groups, dtype=bool).any(axis=-2)
    return jnp.where(kept[..., None], groups, -jnp.inf).reshape(ranked.shape)
