"""One layer: its residual branches and the placement of their norms."""

from collections.abc import Callable

import flax.linen as nn
from jaxtyping import Array, Float

from transformer import spec
from transformer.nn.attention import Attention
from transformer.nn.context import Context
from transformer.nn.feed_forward import FeedForward
from transformer.nn.latent_attention import LatentAttention
from transformer.nn.moe import MoE
from transformer.nn.projection import Norm, point
from transformer.ops.cache import LayerCache
from transformer.settings import Compute

MIXERS = {spec.Attention: Attention, spec.LatentAttention: LatentAttention}
FFNS = {spec.FeedForward: FeedForward, spec.MoE: MoE}


class Block(nn.Module):
    """Attention, cross-attention where there is another text, then the feed-forward, each on a residual branch.

    `gain` scales the initial output of each branch.
    """

    spec: spec.Block
    compute: Compute
    gain: float

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: LayerCache | None
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        s = self.spec
        attention = MIXERS[type(s.mixer)](s.mixer, self.compute, self.gain, name="attention")
        ffn = FFNS[type(s.ffn)](s.ffn, self.compute, self.gain, name="ffn")
        own, other = (cache.mixer, cache.cross) if cache is not None else (None, None)

        def attend(h):
            nonlocal own
            h, own = attention(h, context, own)
            return point(self, "attention_out", h)

        def look_across(h):
            nonlocal other
            h, other = Attention(s.cross, self.compute, self.gain, crosses=True, name="cross")(h, context, other)
            return point(self, "cross_out", h)

        def feed(h):
            return point(self, "ffn_out", ffn(h, context))

        x = self._branch(x, attend, "attention")
        if s.cross is not None:
            x = self._branch(x, look_across, "cross")
        x = self._branch(x, feed, "ffn")
        x = point(self, "residual", x)
        return x, LayerCache(own, other) if cache is not None else None

    def _branch(self, x: Array, function: Callable[[Array], Array], name: str) -> Array:
        """x plus a sublayer, with its norms before it, after the sum, after the sublayer, or around it."""

        def norm(which: str, h: Array) -> Array:
            return Norm(self.spec.norm, name=f"{name}_{which}")(h)

        match self.spec.placement:
            case "pre":
                return x + function(norm("norm", x))
            case "post":
                return norm("norm", x + function(x))
            case "after":
                return x + norm("post_norm", function(x))
            case "sandwich":
                return x + norm("post_norm", function(norm("norm", x)))
