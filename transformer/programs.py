"""What runs on a slice, as jitted functions with abstract arguments: the training step, reading prompts, decoding.

These are the functions that training and generation call, none made for the purpose; nothing is computed here.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer import axes as ax
from transformer import sharding
from transformer.config import Run
from transformer.generation import decode as decoding
from transformer.generation.layout import for_decoding, unrolled
from transformer.generation.prompts import SHORTEST, check_writes
from transformer.nn import initial
from transformer.nn.context import Source
from transformer.nn.model import Transformer
from transformer.nn.parameter import Named
from transformer.ops import cache as caches
from transformer.ops.sampling import Sampling
from transformer.training.state import abstract_state
from transformer.training.step import compile_train_step

# What makes a jitted function, to be called inside `jax.set_mesh(mesh)`, and its arguments.
Program = tuple[Callable[[], Any], tuple]
# Steps of one call of `generation.decode.decode`.
STEPS = decoding.MAX_STEPS


def model_of(run: Run, kind: str, apart: bool = False) -> Transformer:
    """The model as a step of this kind takes it.

    Args:
      apart: every layer has arrays of its own (`generation.unroll`); for "decode" and "prefill".
    """
    model = Transformer(run.spec, run.settings.compute)
    if kind == "train":
        return model
    check_writes(model.spec)
    model = for_decoding(model)
    return unrolled(model) if apart else model


def train(run: Run, mesh: Mesh) -> Program:
    """The training step on a batch of `data.batch_size` rows, state donated.

    Raises:
      ShardingError: the mesh can't hold the model or the batch.
    """
    model, settings = model_of(run, "train"), run.settings
    sharding.check_batch(settings.data.batch_size // settings.train.accumulate, mesh, settings.compute.rules)
    args = abstract_state(model, settings, mesh), abstract_batch(run, mesh)
    return lambda: compile_train_step(model, settings), args


def abstract_batch(run: Run, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """What the reader of `training.data` makes: rows of `data.seq_len` tokens, or those that answer as many."""
    data, place = run.settings.data, sharding.batch_sharding(mesh, run.settings.compute.rules)
    two_sided = run.spec.trunk.crosses
    columns = (data.target_len or data.seq_len) if two_sided else data.seq_len
    names = dict.fromkeys(("tokens", "targets", "target_bytes", "segment_ids", "positions"), columns)
    if two_sided:
        names |= dict.fromkeys(("source_tokens", "source_positions", "source_segment_ids"), data.seq_len)
    elif data.objective in ("prefix", "pairs"):
        names["orders"] = columns
    batch = {name: _like((data.batch_size, length), jnp.int32, place) for name, length in names.items()}
    return batch | {"weights": _like((data.batch_size, columns), jnp.float32, place)}


def prefill(run: Run, mesh: Mesh, rows: int, length: int, apart: bool = False) -> Program:
    """Reading `rows` prompts of `length` tokens in one piece, into a cache of as many slots."""
    model = model_of(run, "prefill", apart)
    plan = decoding.Plan(length, run.settings.compute.dtype, length)
    everywhere, by_row = NamedSharding(mesh, PartitionSpec()), _rows(model, mesh)
    source, width = None, length
    if model.spec.encoder is not None:
        source, width = Source(*[_like((rows, length), jnp.int32, by_row)] * 2), min(SHORTEST, length)
    tokens, first = _like((rows, width), jnp.int32, by_row), _like((), jnp.int32, everywhere)
    lengths = _like((rows,), jnp.int32, by_row)
    args = model, abstract_params(model, mesh), tokens, first, lengths, None, plan, source
    return lambda: decoding.absorb, args


def decode(run: Run, mesh: Mesh, rows: int, length: int, apart: bool = False) -> Program:
    """`STEPS` steps of one token a row, the most likely one, over a cache of `length` slots; the state donated."""
    model = model_of(run, "decode", apart)
    by_row, everywhere = _rows(model, mesh), NamedSharding(mesh, PartitionSpec())
    source = length if model.spec.encoder is not None else 0
    dtype = run.settings.compute.dtype
    cache = jax.eval_shape(lambda: caches.init(model.spec.decoder, rows, length, dtype, source_length=source))
    each = _like((rows,), jnp.int32, by_row)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    state = decoding.State(
        cache=cache.map(lambda layer: _placed(layer, model, mesh)),
        tokens=each,
        positions=each,
        left=each,
        keys=_like(keys.shape, keys.dtype, everywhere),
    )
    ends, steps = _like((1,), jnp.int32, everywhere), _like((), jnp.int32, everywhere)
    method = Sampling(temperature=0.0).method()
    return lambda: decoding.decode, (model, abstract_params(model, mesh), state, steps, ends, method)


def abstract_params(model: Transformer, mesh: Mesh) -> dict:
    """Parameters as generation keeps them: in the dtype of the activations, in their places."""
    places, dtype = initial.param_shardings(model, mesh), model.compute.dtype

    def put(box: Named, place: NamedSharding) -> jax.ShapeDtypeStruct:
        return _like(box.value.shape, dtype, place)

    return jax.tree.map(put, initial.abstract_params(model), places, is_leaf=initial.is_named)


def _placed(layer: caches.KVCache, model: Transformer, mesh: Mesh) -> caches.KVCache:
    fields = {}
    for name, axes in layer.axes.items():
        x = getattr(layer, name)
        place = sharding.partition_spec(axes, x.shape, mesh, model.compute.rules, f"cache {name}")
        fields[name] = _like(x.shape, x.dtype, NamedSharding(mesh, place))
    return dataclasses.replace(layer, **fields)


def _rows(model: Transformer, mesh: Mesh) -> NamedSharding:
    axes = sharding.mesh_axes(ax.BATCH, mesh, model.compute.rules)
    return NamedSharding(mesh, PartitionSpec(axes or None))


def _like(shape: tuple[int, ...], dtype: Any, place: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)
