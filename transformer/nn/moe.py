"""The mixture-of-experts layer: a router, its experts, and the one that all tokens share."""

import math

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer import axes as ax
from transformer import spec
from transformer.nn.feed_forward import FeedForward
from transformer.nn.parameter import parameter
from transformer.nn.projection import capture
from transformer.ops import experts, routing
from transformer.settings import Compute
from transformer.sharding import constrain


class Router(nn.Module):
    """Logits of every expert in float32, and the correction that only picks."""

    spec: spec.Router
    num_experts: int

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T E"], Float[Array, " E"] | None]:
        init = nn.initializers.truncated_normal(1 / math.sqrt(x.shape[-1]))
        kernel = parameter(self, "kernel", init, (x.shape[-1], self.num_experts), (ax.EMBED, ax.ROUTES))
        logits = jnp.einsum("btd,de->bte", x.astype(jnp.float32), kernel, preferred_element_type=jnp.float32)
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
        inward = self._linear("up", self.d_model, self.spec.d_ff, (ax.EMBED, ax.MLP), 1.0)
        gate = (None, None)
        if self.spec.gated:
            gate = self._linear("gate", self.d_model, self.spec.d_ff, (ax.EMBED, ax.MLP), 1.0)
        down = self._linear("down", self.spec.d_ff, self.d_model, (ax.MLP, ax.EMBED), self.gain)
        return experts.ExpertWeights(inward[0], gate[0], down[0], inward[1], gate[1], down[1])

    def _linear(self, name: str, width: int, out: int, names: tuple[str, str], gain: float):
        init = nn.initializers.truncated_normal(gain / math.sqrt(width))
        kernel = parameter(self, f"{name}_kernel", init, (self.num_experts, width, out), (ax.EXPERTS, *names), (-2,))
        if not self.spec.bias:
            return kernel, None
        zeros = nn.initializers.zeros_init()
        return kernel, parameter(self, f"{name}_bias", zeros, (self.num_experts, out), (ax.EXPERTS, names[1]))


class MoE(nn.Module):
    """Routed experts plus the shared one; `gain` scales the initial down projections."""

    spec: spec.MoE
    compute: Compute
    gain: float

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        s = self.spec
        logits, correction = Router(s.router, s.num_experts, name="router")(x)
        index, weight = routing.route(s.router, s.top_k, logits, correction)
        for name, value in (("logits", logits), ("index", index), ("weight", weight)):
            capture(self, f"router_{name}", value)
        weights = Experts(s.expert, s.num_experts, x.shape[-1], self.gain, name="experts")()
        y = experts.dense(s.expert, x, index, weight, weights)
        if s.shared is not None:
            y = y + FeedForward(s.shared, self.compute, self.gain, name="shared")(x)
        return constrain(y, (ax.BATCH, ax.LENGTH, ax.ACT_EMBED), self.compute.rules)
