"""The form in which a model decodes fastest: every layer with arrays of its own, weights turned as products read them.

A scan reads one layer's weights out of a stack. Where a product takes a batch of tokens that is nothing; where it takes
one token, the copy costs more than the product (on a CPU, 7 GB/s of weights against 26: benchmarks/decode.py). The
three functions here go together in the order of `unroll`, `quantize`, `turn`; each alone is right, too.
"""

import dataclasses
from typing import Any

import jax

from transformer import spec
from transformer.nn import initial
from transformer.nn.model import Transformer
from transformer.nn.parameter import Named
from transformer.ops import products


def for_decoding(model: Transformer) -> Transformer:
    """The same model, laid out over a mesh as single tokens ask for: rows are split, and no length is."""
    return model.clone(compute=dataclasses.replace(model.compute, rules="decode"))


def unrolled(model: Transformer) -> Transformer:
    """The same model with no layer repeated; its parameters are those of `unroll`."""
    return model.clone(spec=dataclasses.replace(model.spec, decoder=model.spec.decoder.unrolled))


def unroll(model: Transformer, params: dict[str, Any]) -> tuple[Transformer, dict[str, Any]]:
    """(model, parameters) with no layer repeated: the same function of the same numbers, in new arrays."""
    return unrolled(model), {**params, "decoder": _separate(model.spec.decoder, params["decoder"])}


def _separate(stack: spec.Stack, params: dict[str, Any]) -> dict[str, Any]:
    layers = [params[f"head_{i}"] for i in range(len(stack.head))]
    for repeat in range(stack.repeats):
        for i in range(len(stack.body)):
            layers.append(jax.tree.map(lambda x: x[repeat], params["body"][f"block_{i}"]))
    layers += [params[f"tail_{i}"] for i in range(len(stack.tail))]
    rest = {name: params[name] for name in ("final_norm", "relative_bias") if name in params}
    return {f"head_{i}": layer for i, layer in enumerate(layers)} | rest


def quantize(model: Transformer, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters with every weight that products read in int8, a scale an output feature; the rest as it is."""

    def narrow(box: Named, x: jax.Array) -> Any:
        return jax.jit(products.quantize, static_argnums=1)(x, box.summed) if box.summed else x

    return jax.tree.map(narrow, initial.abstract_params(model), params, is_leaf=initial.is_named)


def turn(model: Transformer, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters with the kernel of every linear map stored outputs first; of a stack's repeats as it is."""

    def move(path, box: Named, x: Any) -> Any:
        # Not what is summed over one axis here and another there, nor experts, whose kernels are read as they lie.
        if path[-1].key != "kernel" or -len(box.names) not in box.summed:
            return x
        return jax.jit(products.turn, static_argnums=1)(x, len(box.summed))

    boxes = initial.abstract_params(model)
    return jax.tree.map_with_path(move, boxes, params, is_leaf=initial.is_named)
