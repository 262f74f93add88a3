"""How large gradients, parameters and activations are, layer by layer: what tells where a run goes wrong."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer import axes as ax
from transformer.nn import initial
from transformer.nn.model import Transformer
from transformer.nn.parameter import Named
from transformer.settings import Settings
from transformer.training.step import Batch, conditions, gradients, terms

Norms = dict[str, Float[Array, "*L"]]


def make_norms(model: Transformer, settings: Settings) -> Callable[[dict, Batch], Norms]:
    """A pure (params, batch) -> norms; jit it. It takes a gradient of its own, so that steps cost nothing more.

    Of each parameter "gradient/PATH" and "parameter/PATH", the Euclidean norm; of what leaves each layer
    "activation/PATH", the root mean square over all tokens. Of a stack's repeats an entry each.
    """
    train, boxes = settings.train, initial.abstract_params(model)

    def norms(params: dict, batch: Batch) -> Norms:
        found: Norms = {}
        grads, _ = gradients(model, params, batch, train.accumulate, settings.balance, **terms(train))
        for kind, tree in (("gradient", grads), ("parameter", params)):
            sizes = jax.tree.map(_norm, boxes, tree, is_leaf=initial.is_named)
            found |= {f"{kind}/{_name(path)}": x for path, x in jax.tree_util.tree_leaves_with_path(sizes)}
        texts = batch["tokens"], batch["targets"], batch["positions"], batch["segment_ids"]
        extra = dict(method="token_losses", mutable=["intermediates"])
        _, collections = model.apply({"params": params}, *texts, **conditions(batch), **extra)
        for path, x in jax.tree_util.tree_leaves_with_path(collections["intermediates"]):
            if path[-1].key == "residual":
                found[f"activation/{_name(path[:-1])}"] = _root_mean_square(x)
        return found

    return norms


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _norm(box: Named, x: Array) -> Float[Array, "*L"]:
    own = tuple(i for i, name in enumerate(box.names) if name != ax.LAYERS)
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), own))


def _root_mean_square(x: Float[Array, "*L B T D"]) -> Float[Array, "*L"]:
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), (-3, -2, -1)))
