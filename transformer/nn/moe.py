"""The mixture-of-experts layer: a router, its experts, and the one that all tokens share."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from transformer import axes as ax
from transformer import spec
from transformer.nn.context import Context
from transformer.nn.feed_forward import FeedForward
from transformer.nn.parameter import parameter
from transformer.nn.projection import capture, capturing
from transformer.ops import balance, experts, routing, zigzag
from transformer.ops.products import product
from transformer.ops.sums import Sums
from transformer.settings import Compute
from transformer.sharding import into_branch, into_stream, partition_spec

# Where a forward pass leaves the `balance.Load` of every layer, if it is mutable.
COLLECTION = "router"


class Router(nn.Module):
    """Logits of every expert in float32, and the correction that only picks."""

    spec: spec.Router
    num_experts: int
    compute: Compute

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T E"], Float[Array, " E"] | None]:
        init = nn.initializers.truncated_normal(1 / math.sqrt(x.shape[-1]))
        names = ax.EMBED, ax.ROUTES
        kernel = parameter(self, "kernel", init, (x.shape[-1], self.num_experts), names)
        sums = Sums(names, self.compute.rules, self.compute.reduce_dtype)
        logits = product(x.astype(jnp.float32), kernel, 1, sums)
        zeros = nn.initializers.zeros_init()
        if self.spec.bias:
            logits = logits + parameter(self, "bias", zeros, (self.num_experts,), (ax.ROUTES,))
        if not self.spec.correction:
            return logits, None
        return logits, parameter(self, "correction", zeros, (self.num_experts,), (ax.ROUTES,))


class Experts(nn.Module):
    """The weights of all experts, stacked."""

    spec: spec.FeedForward
    num_experts: int
    d_model: int
    gain: float

    @nn.compact
    def __call__(self) -> experts.ExpertWeights:
        width, hidden = self.d_model, self.spec.d_ff
        up, up_bias = self._linear("up", width, hidden)
        gate, gate_bias = self._linear("gate", width, hidden) if self.spec.gated else (None, None)
        down, down_bias = self._linear("down", hidden, width, self.gain)
        return experts.ExpertWeights(up, gate, down, up_bias, gate_bias, down_bias)

    def _linear(self, name: str, width: int, out: int, gain: float = 1.0):
        init = nn.initializers.truncated_normal(gain / math.sqrt(width))
        names = getattr(experts.AXES, name)
        kernel = parameter(self, f"{name}_kernel", init, (self.num_experts, width, out), names, (-2,))
        if not self.spec.bias:
            return kernel, None
        zeros, names = nn.initializers.zeros_init(), getattr(experts.AXES, f"{name}_bias")
        return kernel, parameter(self, f"{name}_bias", zeros, (self.num_experts, out), names)


class MoE(nn.Module):
    """Routed experts plus the shared one; `gain` scales the initial down projections."""

    spec: spec.MoE
    compute: Compute
    gain: float

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], context: Context) -> Float[Array, "B T D"]:
        s, compute = self.spec, self.compute
        x = into_branch(x, compute.rules)
        logits, correction = Router(s.router, s.num_experts, compute, name="router")(x)
        index, weight = self._route(logits, correction)
        for name, value in (("logits", logits), ("index", index), ("weight", weight)):
            capture(self, f"router_{name}", value)
        # Padding goes to no expert.
        index = jnp.where(context.real[..., None], index, s.num_experts)
        call = experts.Call(
            s.expert,
            s.num_experts,
            compute.expert_capacity,
            compute.expert_exchange,
            compute.expert_buffer,
            compute.rules,
            compute.remat == "full",
            compute.reduce_dtype,
        )
        weights = Experts(s.expert, s.num_experts, x.shape[-1], self.gain, name="experts")()
        y, dropped = experts.apply(compute.experts, call, x, index, weight, weights)
        self._report(logits, index, context, dropped)
        if s.shared is not None:
            y = y + FeedForward(s.shared, compute, self.gain, name="shared")(x)
        return into_stream(y, compute.rules)

    def _route(self, logits: Float[Array, "B T E"], correction: Float[Array, " E"] | None):
        """`routing.route` on each device: no compiler splits a top-k, but gathers the scores of all tokens."""
        route = functools.partial(routing.route, self.spec.router, self.spec.top_k)
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return route(logits, correction)
        rows = partition_spec((ax.BATCH, ax.LENGTH, None), logits.shape, mesh, self.compute.rules, "tokens")
        return jax.shard_map(route, in_specs=(rows, PartitionSpec()), out_specs=rows)(logits, correction)

    def _report(self, logits, index, context: Context, dropped) -> None:
        """Hands out what the router did to those who asked for it: training, and figures."""
        wanted = self.is_mutable_collection(COLLECTION) and not self.is_initializing()
        if not (wanted or capturing(self)):
            return
        real, segments = context.real, context.segments
        if context.zigzag:  # documents lie in one piece only in the rows' own order
            rows = logits, index, real, segments
            logits, index, real, segments = jax.tree.map(lambda x: zigzag.collect(x, self.compute.rules), rows)
        probability = balance.probabilities(self.spec.router, logits)
        capture(self, "router_probabilities", probability)
        load = balance.measure(logits, probability, index, real, segments, dropped)
        self.sow(COLLECTION, "load", load, reduce_fn=lambda _, new: new, init_fn=lambda: None)
