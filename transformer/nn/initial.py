"""Initial and abstract parameters, with their places on a mesh."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from transformer import axes as ax
from transformer import sharding
from transformer.nn.model import Transformer
from transformer.nn.parameter import Named


def _tokens(model: Transformer) -> jax.Array:
    """Any tokens would do, no parameter depends on them: as few as the mesh in force can split."""
    rows, columns = (sharding.ways(name, model.compute.rules) for name in (ax.BATCH, ax.STREAM_LENGTH))
    return jnp.zeros((rows, 2 * columns), jnp.int32)


def abstract_params(model: Transformer) -> dict:
    """Parameter shapes boxed with their logical axis names; nothing is computed."""
    return jax.eval_shape(lambda: model.init(jax.random.key(0), _tokens(model)))["params"]


def is_named(x) -> bool:
    """True for a boxed parameter: the leaves of `abstract_params`."""
    return isinstance(x, Named)


def param_shardings(model: Transformer, mesh: Mesh) -> dict:
    """Where each parameter lies on the mesh.

    Raises:
      ShardingError: a parameter that the mesh can't divide, named.
    """

    def place(path, box: Named) -> NamedSharding:
        what = jax.tree_util.keystr(path[:-1] if hasattr(path[-1], "name") else path, simple=True, separator="/")
        rules = model.compute.rules
        return NamedSharding(mesh, sharding.partition_spec(box.names, box.value.shape, mesh, rules, what))

    return jax.tree_util.tree_map_with_path(place, abstract_params(model), is_leaf=is_named)


def init_fn(model: Transformer, key: jax.Array) -> dict:
    """Bare initial parameters, to be jitted with the shardings wanted."""
    return nn.meta.unbox(model.init(key, _tokens(model))["params"])


def params(model: Transformer, seed: int, mesh: Mesh | None = None) -> dict:
    """Initial parameters; with a mesh each is created in its shards, never whole on one device."""
    places = None if mesh is None else param_shardings(model, mesh)
    return jax.jit(lambda key: init_fn(model, key), out_shardings=places)(jax.random.key(seed))
