"""Cross-entropy that never keeps the logits of all positions."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from transformer import axes as ax
from transformer import sharding
from transformer.ops.products import Weight, over_tokens, turns_first
from transformer.ops.sums import Plan, Sums


@dataclass(frozen=True)
class Call:
    """The static part of a loss.

    Attributes:
      chunk: positions of a device whose logits are alive at once.
      softcap: logits become c·tanh(logits / c).
      smoothing: share of the targets that is spread evenly over the vocabulary.
      z: times log²Z is added to what is trained on, Z the sum of the exponentials of a position's logits, which so
        stays near 1 (Chowdhery et al. 2022, PaLM, section 5).
      rules: preset of `transformer.sharding`.
      dtype: in which the gradient of the table is summed over devices; None: that of the features.
    """

    chunk: int
    softcap: float | None = None
    smoothing: float = 0.0
    z: float = 0.0
    rules: str = "default"
    dtype: str | None = None


class Losses(NamedTuple):
    """Of each position, in nats and float32: against its target; and what is trained on, with smoothing and z-loss."""

    nats: Float[Array, "B T"]
    trained: Float[Array, "B T"]


def cross_entropy(
    call: Call, x: Float[Array, "B T D"], table: Weight, bias: Float[Array, " V"] | None, targets: Int[Array, "B T"]
) -> Losses:
    """Negative log-likelihood of `targets` from features and the head's table [V, D].

    Positions are walked in chunks, each with the logits of the whole vocabulary, which are computed again in the
    backward pass: memory is chunk·V, not B·T·V. On a mesh each device walks its own positions, with its own part of
    the vocabulary.

    Smoothed targets are (1 - smoothing) · one-hot + smoothing / V (Szegedy et al. 2016, arXiv:1512.00567, section 7).

    Raises:
      ShardingError: the mesh can't split the positions or the vocabulary.
    """
    plan, table = _Plan.of(call, x, table.shape), table.astype(x.dtype)

    def run(x, table, offsets, targets):
        whole = plan.whole(table)

        def step(_, piece):
            rows, aims = piece
            return (), _Softmax.of(plan, _logits(rows, whole, offsets)).losses(plan, aims)

        return _walk(call.chunk, step, (), (x, targets))[1]

    run = plan.on_each_device(run, plan.inputs[:-1], Losses(plan.rows, plan.rows))
    return run(x, table, _offsets(bias, table), targets)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def weighed_cross_entropy(
    call: Call,
    x: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
) -> tuple[Float[Array, ""], Float[Array, "B T"]]:
    """(sum of weights · what is trained on, plain nats) of `cross_entropy`; the sum has a gradient, the rest has none.

    As it is one number, its gradient is made in the forward pass, from the logits while they are there: by three
    products, where `cross_entropy` and its gradient take four. Errors as there.
    """
    losses = cross_entropy(call, x, table, bias, targets)
    return jnp.sum(weights * losses.trained), losses.nats


def _forward(call: Call, x, table, bias, targets, weights):
    plan = _Plan.of(call, x, table.shape)

    def run(x, table, offsets, targets, weights):
        whole = plan.whole(table)

        def step(sums, piece):
            rows, aims, shares = piece
            losses, d = _losses_and_gradient(plan, _logits(rows, whole, offsets), aims, shares)
            total, d_offsets, d = jnp.sum(shares * losses.trained), jnp.sum(d, axis=(0, 1)), d.astype(rows.dtype)
            d_rows = plan.of_vocabulary(jax.lax.psum, jnp.einsum("btv,vd->btd", d, whole))
            sums = jax.tree.map(jnp.add, sums, (total, plan.table_gradient(rows, d), d_offsets))
            return sums, (d_rows, *losses)

        (total, d_table, d_offsets), outputs = _walk(call.chunk, step, plan.zeros(whole), (x, targets, weights))
        d_table = plan.summed(d_table if call.dtype else d_table.astype(x.dtype))
        total, d_offsets = (plan.of_tokens(jax.lax.psum, value) for value in (total, d_offsets))
        return total, d_table, d_offsets, *outputs

    rows, features, vocabulary = plan.rows, plan.inputs[0], plan.inputs[2]
    run = plan.on_each_device(run, plan.inputs, (PartitionSpec(), plan.inputs[1], vocabulary, features, rows, rows))
    total, d_table, d_offsets, d_x, nats, trained = run(
        x, table.astype(x.dtype), _offsets(bias, table), targets, weights
    )
    # Summed before the backward pass, not whenever a compiler likes: until then each device has a whole table of it.
    d_table, d_x = jax.lax.optimization_barrier((d_table, d_x))
    d_bias = None if bias is None else d_offsets.astype(bias.dtype)
    return (total, nats), (d_x, d_table.astype(table.dtype), d_bias, None, trained)


def _backward(call: Call, gradients, d):
    return jax.tree.map(lambda g: g * d[0].astype(g.dtype), gradients)


weighed_cross_entropy.defvjp(_forward, _backward)


class _Plan(NamedTuple):
    """Which device has what.

    Attributes:
      size: V.
      tokens, parts: mesh axes that split positions, and the vocabulary.
      rows: of [B, T] arrays.
      inputs: of features, table, offsets, targets and weights.
      sums: of the table's gradient; None without a mesh.
      turned: True where the table's gradient is summed with its features in front.
    """

    size: int
    smoothing: float
    z: float
    softcap: float | None
    tokens: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    rows: PartitionSpec = PartitionSpec()
    inputs: tuple[PartitionSpec, ...] = (PartitionSpec(),) * 5
    sums: Plan | None = None
    turned: bool = False

    @staticmethod
    def of(call: Call, x: Array, shape: tuple[int, int]) -> "_Plan":
        """For the mesh in force."""
        mesh, what = jax.sharding.get_abstract_mesh(), (shape[0], call.smoothing, call.z, call.softcap)
        if mesh.empty or mesh.size == 1:
            return _Plan(*what, turned=turns_first(x.dtype) and shape[0] > shape[1])
        sums = Sums((ax.VOCAB, ax.EMBED), call.rules, call.dtype).plan(shape)
        rows = sharding.partition_spec((ax.BATCH, ax.LENGTH), x.shape[:2], mesh, call.rules, "losses")
        inputs = PartitionSpec(*rows, None), sums.place, PartitionSpec(sums.place[0]), rows, rows
        parts = sharding.mesh_axes(ax.VOCAB, mesh, call.rules)
        return _Plan(*what, sums.tokens, parts, rows, inputs, sums, turned=sums.first == 1)

    def on_each_device(self, run: Callable, inputs: Any, outputs: Any) -> Callable:
        """`run` under `jax.shard_map`, or as it is where there is no mesh."""
        return run if self.sums is None else jax.shard_map(run, in_specs=inputs, out_specs=outputs)

    def of_vocabulary(self, reduce: Callable, x: Array) -> Array:
        """A reduction over the devices that have the rest of the vocabulary."""
        return reduce(x, self.parts) if self.parts else x

    def of_tokens(self, reduce: Callable, x: Array) -> Array:
        """A reduction over the devices that have other positions."""
        return reduce(x, self.tokens) if self.tokens else x

    def whole(self, table: Array) -> Array:
        """This device's part of the vocabulary with all features."""
        axes = () if self.sums is None else self.sums.scattered().get(1, ())
        return jax.lax.all_gather(table, axes, axis=1, tiled=True) if axes else table

    def table_gradient(self, rows: Array, d: Array) -> Array:
        """By some of this device's positions, in float32."""
        return over_tokens(rows, d, 2) if self.turned else over_tokens(d, rows, 2)

    def zeros(self, whole: Array) -> tuple[Array, Array, Array]:
        """What the sums of `weighed_cross_entropy` begin with: the loss, and the gradients of table and offsets."""
        shape = whole.shape[::-1] if self.turned else whole.shape
        zeros = jnp.zeros(()), jnp.zeros(shape), jnp.zeros(whole.shape[:1])
        axes = self.tokens, (*self.tokens, *self.parts), (*self.tokens, *self.parts)
        return tuple(jax.lax.pcast(z, a, to="varying") if a else z for z, a in zip(zeros, axes, strict=True))

    def summed(self, d_table: Array) -> Array:
        """The table's gradient by the positions of all devices."""
        if self.sums is not None:
            return self.sums.sum(d_table, (1, 0) if self.turned else (0, 1))
        return d_table.T if self.turned else d_table


def _offsets(bias: Array | None, table: Array) -> Float[Array, " V"]:
    return jnp.zeros(table.shape[0], jnp.float32) if bias is None else bias.astype(jnp.float32)


def _logits(x: Float[Array, "B t D"], table: Float[Array, "v D"], offsets: Float[Array, " v"]) -> Float[Array, "B t v"]:
    return jnp.einsum("btd,vd->btv", x, table, preferred_element_type=jnp.float32) + offsets


def _losses_and_gradient(
    plan: _Plan, logits: Float[Array, "B t v"], targets: Int[Array, "B t"], weights: Float[Array, "B t"]
) -> tuple[Losses, Float[Array, "B t v"]]:
    """And the gradient of the sum of weights · what is trained on, written out: by the fewest walks over the logits."""
    softmax = _Softmax.of(plan, logits)
    slope = weights / softmax.total
    if plan.z:
        slope = slope * (1 + 2 * plan.z * softmax.norm)
    sure = weights * (1 - plan.smoothing)
    d = softmax.exponentials * slope[..., None] - jnp.where(_aimed(plan, logits, targets), sure[..., None], 0)
    if plan.smoothing:
        d = d - (plan.smoothing / plan.size * weights)[..., None]
    if plan.softcap is not None:
        d = d * (1 - jnp.square(softmax.logits / plan.softcap))
    return softmax.losses(plan, targets), d


class _Softmax(NamedTuple):
    """Of this device's part of the vocabulary.

    Attributes:
      logits: with the cap.
      exponentials: of logits less the highest of all.
      total: their sum over the whole vocabulary.
      norm: log of the sum of the logits' own.
    """

    logits: Float[Array, "B t v"]
    exponentials: Float[Array, "B t v"]
    total: Float[Array, "B t"]
    norm: Float[Array, "B t"]

    @staticmethod
    def of(plan: _Plan, logits: Float[Array, "B t v"]) -> "_Softmax":
        if plan.softcap is not None:
            logits = plan.softcap * jnp.tanh(logits / plan.softcap)
        top = plan.of_vocabulary(jax.lax.pmax, jax.lax.stop_gradient(jnp.max(logits, axis=-1)))
        exponentials = jnp.exp(logits - top[..., None])
        total = _sum(plan, exponentials)
        return _Softmax(logits, exponentials, total, top + jnp.log(total))

    def losses(self, plan: _Plan, targets: Int[Array, "B t"]) -> Losses:
        picked = _picked(plan, self.logits, targets)
        trained = self.norm - picked
        if plan.smoothing:
            spread = plan.smoothing / plan.size * _sum(plan, self.logits)
            trained = self.norm - (1 - plan.smoothing) * picked - spread
        if plan.z:
            trained = trained + plan.z * jnp.square(self.norm)
        return Losses(self.norm - picked, trained)


def _sum(plan: _Plan, x: Float[Array, "B t v"]) -> Float[Array, "B t"]:
    return plan.of_vocabulary(jax.lax.psum, jnp.sum(x, axis=-1))


def _aimed(plan: _Plan, logits: Float[Array, "B t v"], targets: Int[Array, "B t"]) -> Bool[Array, "B t v"]:
    """True at the target's logit, if this device has it."""
    first = jax.lax.axis_index(plan.parts) * logits.shape[-1] if plan.parts else 0
    return first + jnp.arange(logits.shape[-1], dtype=jnp.int32) == targets[..., None]


def _picked(plan: _Plan, logits: Float[Array, "B t v"], targets: Int[Array, "B t"]) -> Float[Array, "B t"]:
    """The target's logit."""
    if sharding.platform() == "cpu" and not plan.parts:  # a sum would be one more walk; a TPU adds it to another
        return jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]
    return _sum(plan, jnp.where(_aimed(plan, logits, targets), logits, 0))


def _walk(chunk: int, step: Callable, carry: Any, rows: tuple[Array, ...]) -> tuple[Any, Any]:
    """`jax.lax.scan` of `step` over chunks of [B, T, …] arrays, the last one filled up with zeros.

    A gradient of several chunks runs each step again.
    """
    batch, length = rows[0].shape[:2]
    width = -(-length // min(-(-batch * length // chunk), length))
    pieces = -(-length // width)
    if pieces == 1:
        return step(carry, rows)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, pieces * width - length), *((0, 0),) * (x.ndim - 2)))
        return jnp.swapaxes(x.reshape(batch, pieces, width, *x.shape[2:]), 0, 1)

    def joined(x: Array) -> Array:
        return jnp.swapaxes(x, 0, 1).reshape(batch, pieces * width, *x.shape[3:])[:, :length]

    carry, outputs = jax.lax.scan(jax.checkpoint(step), carry, jax.tree.map(cut, rows))
    return carry, jax.tree.map(joined, outputs)
