"""Tokens through the experts of other devices: what runs on each device of the expert axis, under `jax.shard_map`.

`axis` is the mesh axis that splits the experts, `w` holds this device's E / ways; indices count all E. Devices at the
same place of the other mesh axes form a group.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer.ops.experts import local, products, slots
from transformer.ops.experts.call import Call, ExpertWeights
from transformer.sharding import device_kind, platform, varying_axes

# Where rows begin here, how many go to each device, where they begin there, how many come from each.
Way = tuple[Int[Array, " ways"], Int[Array, " ways"], Int[Array, " ways"], Int[Array, " ways"]]
# Whose compiler refuses ragged all-to-all on slices of more than 4x4 (libtpu 0.0.50, docs/experts.md).
WITHOUT_RAGGED = ("TPU v5 lite",)
# With fewer assignments than this on a device, the latency of three messages in a row outweighs their bytes.
FEW_ROWS = 256


def capacity(
    call: Call,
    x: Float[Array, "N D"],
    index: Int[Array, "N k"],
    weight: Float[Array, "N k"],
    w: ExpertWeights,
    axis: str | None,
) -> tuple[Float[Array, "N D"], Float[Array, ""]]:
    """A fixed number of slots for each pair of device and expert (GShard, arXiv:2006.16668); and how many it drops."""
    room = min(math.ceil(call.capacity * index.size / call.num_experts), index.shape[0])
    seats = slots.capacity(index, call.num_experts, room)
    rows = slots.spread(x, seats).reshape(call.num_experts, room, -1)
    if axis is not None:
        rows = jax.lax.all_to_all(rows, axis, split_axis=0, concat_axis=1, tiled=True)
    rows = products.batched(call.expert, rows, w)
    if axis is not None:
        rows = jax.lax.all_to_all(rows, axis, split_axis=1, concat_axis=0, tiled=True)
    parts = slots.collect(rows.reshape(-1, x.shape[-1]), seats)
    dropped = jnp.sum(jnp.maximum(seats.sizes - room, 0))
    return local.combine(parts, weight), dropped.astype(jnp.float32)


def grouped(
    call: Call,
    x: Float[Array, "N D"],
    index: Int[Array, "N k"],
    weight: Float[Array, "N k"],
    w: ExpertWeights,
    axis: str | None,
) -> tuple[Float[Array, "N D"], Float[Array, ""]]:
    """Exact, at a cost that follows the assignments (`local.grouped`); by the exchange that `call` names."""
    if axis is None:
        y = local.combine(local.grouped(call, x, index, w, index.size), weight)
    else:
        ways = jax.lax.axis_size(axis)
        name = choose(index.shape[0], index.shape[1], ways) if call.exchange == "auto" else call.exchange
        y = (all_gather if name == "all_gather" else all_to_all)(call, x, index, weight, w, axis)
    return y, jnp.zeros(())


def choose(tokens: int, top_k: int, ways: int) -> str:
    """The exchange that "auto" stands for: the one that moves fewer rows, or fewer messages where there are few rows.

    Off a device go N·k·(ways - 1)/ways rows by all-to-all, N·(ways - 1) by all-gather, and as many come back.
    """
    if device_kind() in WITHOUT_RAGGED:
        return "all_gather"
    return "all_gather" if ways <= top_k or tokens * top_k <= FEW_ROWS else "all_to_all"


def all_gather(
    call: Call,
    x: Float[Array, "N D"],
    index: Int[Array, "N k"],
    weight: Float[Array, "N k"],
    w: ExpertWeights,
    axis: str,
    in_turns: bool = False,
) -> Float[Array, "N D"]:
    """Every device sees all tokens of its group, adds what its own experts make of them, and the sums are scattered.

    Args:
      in_turns: one device's tokens at a time, for the memory of that many, instead of all at once.
    """
    near = w.up.shape[0]
    most = x.shape[0] * min(index.shape[1], near)

    def share(x, index, weight, most=most):
        here = index - near * jax.lax.axis_index(axis)
        here = jnp.where((here >= 0) & (here < near), here, near)
        expected = here.size * near // call.num_experts
        return local.combine(local.grouped(call, x, here, w, expected, most), weight)

    all_x, all_index, all_weight = (jax.lax.all_gather(a, axis) for a in (x, index, weight))
    if in_turns:
        y = jax.lax.map(lambda part: jax.checkpoint(share)(*part), (all_x, all_index, all_weight))
    else:
        flat = (a.reshape(-1, a.shape[-1]) for a in (all_x, all_index, all_weight))
        y = share(*flat, most=most * all_x.shape[0]).reshape(all_x.shape)
    return jax.lax.psum_scatter(y, axis)


def all_to_all(
    call: Call,
    x: Float[Array, "N D"],
    index: Int[Array, "N k"],
    weight: Float[Array, "N k"],
    w: ExpertWeights,
    axis: str,
) -> Float[Array, "N D"]:
    """Tokens travel to their experts and back, unless some device of the group would receive more than it has room for.

    The buffer is bounded, the routing is not: a crowded step runs `all_gather` in turns instead, and drops nothing.
    """
    ways, near = jax.lax.axis_size(axis), w.up.shape[0]
    room = min(math.ceil(call.buffer * index.size), ways * x.shape[0] * min(index.shape[1], near))
    seats = slots.grouped(index, call.num_experts, 1)
    sent = seats.sizes.reshape(ways, near)
    # The same on all devices of the group, which therefore take the same branch.
    crowded = jnp.max(jax.lax.psum(jnp.sum(sent, axis=1), axis)) > room

    def travel(x, weight, w):
        rows = _there_and_back(call, slots.spread(x, seats), sent, w, axis, room)
        return local.combine(slots.collect(rows, seats), weight)

    # Without remat, the residuals of the branch not taken would take memory beside those of the one taken.
    @jax.checkpoint
    def stay(x, weight, w):
        return all_gather(call, x, index, weight, w, axis, in_turns=True)

    if call.remat:  # all layers are computed again: so are these rows, where they are needed, and none leaves a branch
        travel = jax.checkpoint(travel)
    return jax.lax.cond(crowded, stay, travel, x, weight, w)


def _there_and_back(
    call: Call, rows: Float[Array, "M D"], sent: Int[Array, "ways near"], w: ExpertWeights, axis: str, room: int
) -> Float[Array, "M D"]:
    """Rows sorted by expert, each through its expert; `sent` counts them by device and expert of that device."""
    near, me = w.up.shape[0], jax.lax.axis_index(axis)
    everyone = jax.lax.all_gather(sent, axis)
    counts = jnp.sum(everyone, axis=2)  # [from, to]
    going, coming = counts[me], counts[:, me]
    # Where the rows of each pair of devices begin: at the sender, and at the receiver.
    leave, arrive = jnp.cumsum(counts, axis=1) - counts, jnp.cumsum(counts, axis=0) - counts
    there, back = (leave[me], going, arrive[me], coming), (arrive[:, me], coming, leave[:, me], going)
    size = rows.shape[0], room
    received = _moved(rows, there, back, size, axis)
    ends = jnp.cumsum(everyone[:, me].reshape(-1))
    block = jnp.searchsorted(ends, jnp.arange(room), side="right")
    expert = jnp.where(block < ends.shape[0], block % near, near)
    done = local.grouped(call, received, expert[:, None], w, min(rows.shape[0], room), most=room)[:, 0]
    return _moved(done, back, there, size[::-1], axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _moved(rows: Float[Array, "M D"], there: Way, back: Way, size: tuple[int, int], axis: str) -> Float[Array, "R D"]:
    """What other devices sent, in places of a buffer; its other rows hold anything, and nobody may read them.

    Gradients go `back`. JAX's own would fill the buffers with zeros first, which takes TPUs as long as to send them.

    Args:
      size: M and R.
    """
    exchange = emulated if platform() == "cpu" else jax.lax.ragged_all_to_all
    free = jax.lax.empty((size[1], rows.shape[1]), rows.dtype)
    free = jax.lax.pcast(free, varying_axes(rows), to="varying")
    return exchange(rows, free, *there, axis_name=axis)


def _moved_forward(rows, there: Way, back: Way, size: tuple[int, int], axis: str):
    return _moved(rows, there, back, size, axis), (there, back)


def _moved_backward(size: tuple[int, int], axis: str, ways: tuple[Way, Way], d):
    there, back = ways
    return _moved(d, back, there, size[::-1], axis), None, None


_moved.defvjp(_moved_forward, _moved_backward)


def emulated(
    operand: Float[Array, "M D"],
    output: Float[Array, "R D"],
    input_offsets: Int[Array, " ways"],
    send_sizes: Int[Array, " ways"],
    output_offsets: Int[Array, " ways"],
    recv_sizes: Int[Array, " ways"],
    *,
    axis_name: str,
) -> Float[Array, "R D"]:
    """`jax.lax.ragged_all_to_all` where there is none: on CPUs. Each device gathers all operands and takes its rows.

    Device i's rows input_offsets[j] … + send_sizes[j] go to device j's rows output_offsets[j] … ; other rows of
    `output` stay.
    """
    me = jax.lax.axis_index(axis_name)
    everything = jax.lax.all_gather(operand, axis_name, tiled=True)
    begin, size, place = (jax.lax.all_gather(a, axis_name)[:, me] for a in (input_offsets, send_sizes, output_offsets))
    size = jnp.minimum(size, recv_sizes)
    row = jnp.arange(output.shape[0])[:, None]
    inside = (row >= place) & (row < place + size)  # [R, from]
    sender = jnp.argmax(inside, axis=1)
    source = sender * operand.shape[0] + begin[sender] + row[:, 0] - place[sender]
    return jnp.where(jnp.any(inside, axis=1)[:, None], everything[source], output)
