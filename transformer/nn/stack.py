"""A stack of blocks: irregular ends around a scanned pattern."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer import axes as ax
from transformer import spec
from transformer.nn import moe
from transformer.nn.block import Block
from transformer.nn.context import Context
from transformer.nn.parameter import parameter
from transformer.nn.projection import Norm
from transformer.ops.cache import LayerCache, StackCache
from transformer.settings import HOST_MEMORY, POINTS, Compute


def remat_policy(compute: Compute) -> Callable[..., Any]:
    """What the backward pass may keep: matmul outputs with no batch dimension in the weights, named points, nothing."""
    match compute.remat:
        case "dots":
            return jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        case "names":
            return jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=compute.remat_names,
                names_which_can_be_offloaded=compute.offload_names,
                offload_src="device",
                offload_dst=HOST_MEMORY,
            )
        case "full":
            return jax.checkpoint_policies.nothing_saveable


def points(stack: spec.Stack) -> set[str]:
    """Which of `settings.POINTS` the blocks of a stack have."""
    dense = [
        f for b in stack.layers for f in (b.ffn, getattr(b.ffn, "shared", None)) if isinstance(f, spec.FeedForward)
    ]
    some = {
        "cross_out": any(block.cross is not None for block in stack.layers),
        "ffn_up": bool(dense),
        "ffn_gate": any(ffn.gated for ffn in dense),
    }
    return {name for name in POINTS if some.get(name, True)}


class Pattern(nn.Module):
    """One repeat of a stack's body: the step of the scan."""

    blocks: tuple[spec.Block, ...]
    compute: Compute
    gain: float

    @nn.compact
    def __call__(
        self,
        carry: tuple[Float[Array, "B T D"], tuple[LayerCache, ...] | None],
        repeat: Int[Array, ""],
        context: Context,
    ):
        x, caches = carry
        written = []
        for i, block in enumerate(self.blocks):
            cache = caches[i].view(repeat) if caches is not None else None
            x, cache = Block(block, self.compute, self.gain, name=f"block_{i}")(x, context, cache)
            written.append(cache.view(None) if cache is not None else None)
        return (x, tuple(written) if caches is not None else None), None


class Stack(nn.Module):
    """head, body × repeats, tail, final norm.

    Body parameters are stored stacked over the repeats whether or not the scan is unrolled. Caches ride in the
    scan's carry as whole buffers, written in place, so that no layer's cache is copied in and out of a step.
    """

    spec: spec.Stack
    compute: Compute

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: StackCache | None
    ) -> tuple[Float[Array, "B T D"], StackCache | None]:
        # Residual branches start small enough that their sum over the depth keeps unit variance (GPT-2).
        gain = 1 / math.sqrt(2 * self.spec.num_layers)
        context = dataclasses.replace(context, bias=self._relative_bias())
        x, cache = self._ends(x, context, cache, "head", gain)
        if self.spec.repeats:
            x, body = self._body(x, context, cache.body if cache is not None else None, gain)
            cache = dataclasses.replace(cache, body=body) if cache is not None else None
        x, cache = self._ends(x, context, cache, "tail", gain)
        if self.spec.final_norm is not None:
            x = Norm(self.spec.final_norm, name="final_norm")(x)
        return x, cache

    def _relative_bias(self) -> Float[Array, "R N"] | None:
        """The table of relative biases that the layers share."""
        if self.spec.relative_bias is None:
            return None
        relative, heads = self.spec.relative_bias
        shape = (relative.num_buckets, heads)
        return parameter(self, "relative_bias", nn.initializers.zeros_init(), shape, (ax.BUCKETS, ax.HEADS))

    def _ends(self, x, context: Context, cache: StackCache | None, which: str, gain: float):
        block_class = self._remat(Block)
        written = []
        for i, block in enumerate(getattr(self.spec, which)):
            layer = getattr(cache, which)[i] if cache is not None else None
            x, layer = block_class(block, self.compute, gain, name=f"{which}_{i}")(x, context, layer)
            written.append(layer)
        if cache is not None:
            cache = dataclasses.replace(cache, **{which: tuple(written)})
        return x, cache

    def _body(self, x, context: Context, caches: tuple[LayerCache, ...] | None, gain: float):
        scanned = nn.scan(
            self._remat(Pattern),
            variable_axes={"params": 0, "intermediates": 0, moe.COLLECTION: 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast),
            length=self.spec.repeats,
            unroll=min(self.compute.unroll, self.spec.repeats),
            metadata_params={nn.PARTITION_NAME: ax.LAYERS},
        )
        repeats = jnp.arange(self.spec.repeats)
        body = scanned(self.spec.body, self.compute, gain, name="body")
        (x, caches), _ = body((x, caches), repeats, context)
        return x, caches

    def _remat(self, module: type[nn.Module]) -> type[nn.Module]:
        if self.compute.remat == "none":
            return module
        # In a loop's body the forward pass isn't there to be found again; elsewhere the compiler would, and keep it.
        looped = module is Pattern and self.compute.unroll < self.spec.repeats
        return nn.remat(module, policy=remat_policy(self.compute), prevent_cse=not looped)
