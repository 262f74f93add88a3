"""What a training run carries from step to step: arrays only."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer import sharding
from transformer.nn import initial, stack
from transformer.nn.model import Transformer
from transformer.settings import HOST_MEMORY, Settings, check
from transformer.training.optimizer import make_optimizer


class TrainState(struct.PyTreeNode):
    """The step count, the parameters and the optimiser's moments."""

    step: jax.Array
    params: dict
    opt_state: optax.OptState


def check_memory(model: Transformer, settings: Settings, mesh: Mesh) -> None:
    """Raises `SettingsError` if what is to be kept, or the memory where it is to be kept, isn't there."""
    compute, platform = model.compute, mesh.devices.flat[0].platform
    there = set().union(*(stack.points(layers) for layers in model.spec.stacks.values()))
    for name in ("remat_names", "offload_names"):
        asked = getattr(compute, name)
        missing = sorted({*asked} - there)
        check(not missing, f"compute.{name}", asked, f"the model has no {missing}; it has {', '.join(sorted(there))}")
    remedy = f"devices of platform {platform!r} have no host memory beside their own; use"
    host = platform != "cpu"
    check(host or not compute.offload_names, "compute.offload_names", compute.offload_names, f"{remedy} remat_names")
    memory = settings.optimizer.moments_memory
    check(host or memory != HOST_MEMORY, "optimizer.moments_memory", memory, f'{remedy} "device"')


def check_sums(model: Transformer, mesh: Mesh) -> None:
    """Raises `SettingsError` if a dtype is asked for in which nothing is summed."""
    asked, alone = model.compute.reduce_dtype, not sharding.token_axes(mesh, model.compute.rules)
    check(not (asked and alone), "compute.reduce_dtype", asked, "no device of the mesh has tokens of its own; use None")


def _initial(model: Transformer, settings: Settings, key: jax.Array) -> TrainState:
    return _start(model, settings, initial.init_fn(model, key))


def _start(model: Transformer, settings: Settings, params: dict) -> TrainState:
    return TrainState(jnp.zeros((), jnp.int32), params, make_optimizer(model, settings).init(params))


def state_shardings(model: Transformer, settings: Settings, mesh: Mesh) -> TrainState:
    """Where each leaf of the state lies: moments with their parameter or beside it, counters everywhere.

    Raises:
      ShardingError: the mesh can't split the model.
      SettingsError: as `check_memory` and `check_sums`.
    """
    check_memory(model, settings, mesh)
    check_sums(model, mesh)
    places, optimizer = initial.param_shardings(model, mesh), make_optimizer(model, settings)
    everywhere = NamedSharding(mesh, PartitionSpec())
    memory = settings.optimizer.moments_memory
    opt_state = optax.tree.map_params(
        optimizer,
        lambda _, place: place.with_memory_kind(memory) if memory == HOST_MEMORY else place,
        jax.eval_shape(optimizer.init, nn.meta.unbox(initial.abstract_params(model))),
        places,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(step=everywhere, params=places, opt_state=opt_state)


def abstract_state(model: Transformer, settings: Settings, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state; nothing is computed. Errors as of `state_shardings`."""
    shapes = jax.eval_shape(lambda key: _initial(model, settings, key), jax.random.key(0))
    places = state_shardings(model, settings, mesh)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)


def init_state(model: Transformer, settings: Settings, mesh: Mesh) -> TrainState:
    """The state at step 0 from `settings.seed`, every leaf created where it lives."""
    places = state_shardings(model, settings, mesh)
    with jax.set_mesh(mesh):
        init = jax.jit(lambda key: _initial(model, settings, key), out_shardings=places)
        return init(jax.random.key(settings.seed))


def state_of(params: dict, model: Transformer, settings: Settings, mesh: Mesh) -> TrainState:
    """The state at step 0 with parameters that exist, in their shards; they are used up."""
    places = state_shardings(model, settings, mesh)
    with jax.set_mesh(mesh):
        start = jax.jit(lambda params: _start(model, settings, params), out_shardings=places, donate_argnums=0)
        return start(params)
