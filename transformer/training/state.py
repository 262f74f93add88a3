"""What a training run carries from step to step: arrays only."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer.nn import initial
from transformer.nn.model import Transformer


class TrainState(struct.PyTreeNode):
    """The step count, the parameters and the optimiser's moments."""

    step: jax.Array
    params: dict
    opt_state: optax.OptState


def _initial(model: Transformer, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    params = initial.init_fn(model, key)
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))


def state_shardings(model: Transformer, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Where each leaf of the state lies: moments with their parameter, counters everywhere."""
    places = initial.param_shardings(model, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    opt_state = optax.tree.map_params(
        optimizer,
        lambda _, place: place,
        jax.eval_shape(optimizer.init, nn.meta.unbox(initial.abstract_params(model))),
        places,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(step=everywhere, params=places, opt_state=opt_state)


def abstract_state(model: Transformer, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state; nothing is computed."""
    shapes = jax.eval_shape(lambda key: _initial(model, optimizer, key), jax.random.key(0))
    places = state_shardings(model, optimizer, mesh)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)


def init_state(model: Transformer, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh) -> TrainState:
    """The state at step 0, every leaf created where it lives."""
    places = state_shardings(model, optimizer, mesh)
    with jax.set_mesh(mesh):
        init = jax.jit(lambda key: _initial(model, optimizer, key), out_shardings=places)
        return init(jax.random.key(seed))


def state_of(params: dict, model: Transformer, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The state at step 0 with parameters that exist, in their shards; they are used up."""

    def start(params: dict) -> TrainState:
        return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))

    places = state_shardings(model, optimizer, mesh)
    with jax.set_mesh(mesh):
        return jax.jit(start, out_shardings=places, donate_argnums=0)(params)
