"""The dense and gated feed-forward layer."""

import flax.linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from transformer import axes as ax
from transformer import spec
from transformer.nn.context import Context
from transformer.nn.projection import Projection
from transformer.ops.activations import activate, gate
from transformer.settings import Compute
from transformer.sharding import constrain, into_branch, into_stream


class FeedForward(nn.Module):
    """down(act(up x)), or down(act(gate x) · up x) when gated; `gain` scales the initial down projection.

    It works on each position alone; the context is there because some feed-forwards need it.
    """

    spec: spec.FeedForward
    compute: Compute
    gain: float

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], context: Context | None = None) -> Float[Array, "B T D"]:
        s, rules, width = self.spec, self.compute.rules, x.shape[-1]
        x = into_branch(x, rules)
        inward = (width,), (s.d_ff,), (ax.EMBED, ax.MLP), s.bias, self.compute
        y = checkpoint_name(Projection(*inward, name="up")(x), "ffn_up")
        if s.gated:
            y = gate(s, checkpoint_name(Projection(*inward, name="gate")(x), "ffn_gate"), y)
        else:
            y = activate(s.activation, y)
        y = constrain(y, (ax.BATCH, ax.LENGTH, ax.ACT_MLP), rules)
        outward = (s.d_ff,), (width,), (ax.MLP, ax.EMBED), s.bias, self.compute
        y = Projection(*outward, self.gain, name="down")(y)
        return into_stream(y, rules)
