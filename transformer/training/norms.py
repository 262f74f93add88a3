"""How large gradients, parameters and activations are, layer by layer: what tells where a run goes wrong."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from transformer import axes as ax
from transformer.nn import initial
from transformer.nn.model import Transformer
from transformer.nn.parameter import Named
from transformer.ops.experts import products
from transformer.settings import Settings
from transformer.training.boards import Histogram
from transformer.training.step import Batch, conditions, gradients, terms

Norms = dict[str, Float[Array, "*L"]]
BINS = 64


def make_norms(model: Transformer, settings: Settings) -> Callable[[dict, Batch], tuple[Norms, dict[str, Histogram]]]:
    """A pure (params, batch) -> (norms, histograms); jit it. It takes a gradient of its own: steps cost nothing more.

    Of each parameter "gradient/PATH" and "parameter/PATH", the Euclidean norm; of what leaves each layer
    "activation/PATH", the root mean square over all tokens. Of a stack's repeats an entry each. Histograms are of all
    numbers of each parameter and of its gradient.
    """
    train, boxes = settings.train, initial.abstract_params(model)

    def norms(params: dict, batch: Batch) -> tuple[Norms, dict[str, Histogram]]:
        found: Norms = {}
        histograms: dict[str, Histogram] = {}
        grads, _ = gradients(model, params, batch, train.accumulate, settings.balance, **terms(train))
        for kind, tree in (("gradient", grads), ("parameter", params)):
            sizes = jax.tree.map(_norm, boxes, tree, is_leaf=initial.is_named)
            found |= {f"{kind}/{_name(path)}": x for path, x in jax.tree.leaves_with_path(sizes)}
            histograms |= {f"{kind}/{_name(path)}": histogram(x) for path, x in jax.tree.leaves_with_path(tree)}
        texts = batch["tokens"], batch["targets"], batch["positions"], batch["segment_ids"]
        extra = dict(method="token_losses", mutable=["intermediates"])
        _, collections = model.apply({"params": params}, *texts, **conditions(batch), **extra)
        for path, x in jax.tree.leaves_with_path(collections["intermediates"]):
            if path[-1].key == "residual":
                found[f"activation/{_name(path[:-1])}"] = _root_mean_square(x)
        return found, histograms

    return norms


def compile_norms(model: Transformer, settings: Settings, mesh: Mesh):
    """`make_norms` under jit, whose results every process has."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(make_norms(model, settings), out_shardings=everywhere, compiler_options=products.compiler_options())


def histogram(x: Float[Array, "..."]) -> Histogram:
    """As `numpy.histogram`: bins of one width from the least number to the largest.

    Numbers are compared with each edge in turn where they lie, so that nothing is sorted, gathered or kept.
    """
    x = jnp.atleast_1d(x.astype(jnp.float32))
    edges = jnp.linspace(jnp.min(x), jnp.max(x), BINS + 1)

    def below(edge: Float[Array, ""]) -> Float[Array, ""]:
        return jnp.sum(jnp.sum(x < edge, axis=-1).astype(jnp.float32))  # an int32 may not count all

    counts = jnp.diff(jax.lax.map(below, edges[1:-1]), prepend=0.0, append=float(x.size))
    return Histogram(edges, counts, jnp.sum(x), jnp.sum(jnp.square(x)))


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _norm(box: Named, x: Array) -> Float[Array, "*L"]:
    own = tuple(i for i, name in enumerate(box.names) if name != ax.LAYERS)
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), own))


def _root_mean_square(x: Float[Array, "*L B T D"]) -> Float[Array, "*L"]:
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), (-3, -2, -1)))
