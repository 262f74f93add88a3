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
from transformer.training import guard
from transformer.training.optimizer import make_optimizer


class TrainState(struct.PyTreeNode):
    """The step count, the parameters, the optimiser's moments, and what is remembered of earlier steps.

    Attributes:
      average: of the parameters over the steps; None unless `optimizer.average_decay` asks for it.
    """

    step: jax.Array
    params: dict
    opt_state: optax.OptState
    health: guard.Health
    average: dict | None = None

    @property
    def weights(self) -> dict:
        """The parameters to evaluate and generate with."""
        return self.params if self.average is None else self.average


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
    average = jax.tree.map(jnp.copy, params) if settings.optimizer.average_decay else None
    step, opt_state = jnp.zeros((), jnp.int32), make_optimizer(model, settings).init(params)
    return TrainState(step, params, opt_state, guard.start(), average)


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
    params = nn.meta.unbox(initial.abstract_params(model))
    opt_state = jax.eval_shape(optimizer.init, params)
    of_params = {path: (x.shape, place) for (path, x), place in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(places), strict=True
    )}  # fmt: skip
    memory = settings.optimizer.moments_memory

    def where(path: tuple, x: jax.ShapeDtypeStruct) -> NamedSharding:
        # What an optimiser keeps of a parameter lies at the end of the parameter's path.
        owner = next((of_params[path[i:]] for i in range(len(path)) if path[i:] in of_params), None)
        if owner is None:
            return everywhere
        beside = owner[1].update(spec=_beside(x.shape, *owner))
        return beside.with_memory_kind(memory) if memory == HOST_MEMORY else beside

    opt_state = jax.tree_util.tree_map_with_path(where, opt_state)
    health = jax.tree.map(lambda _: everywhere, jax.eval_shape(guard.start))
    average = places if settings.optimizer.average_decay else None
    return TrainState(everywhere, places, opt_state, health, average)


def _beside(shape: tuple[int, ...], whole: tuple[int, ...], place: NamedSharding) -> PartitionSpec:
    """How an array that is a parameter's, or sums of one over an axis, is split: as the parameter is."""
    entries = [*place.spec, *(None for _ in whole[len(place.spec) :])]
    if shape == whole:
        return place.spec
    for axis in range(len(whole)):
        if shape == whole[:axis] + whole[axis + 1 :]:
            return PartitionSpec(*entries[:axis], *entries[axis + 1 :])
    return PartitionSpec()


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
