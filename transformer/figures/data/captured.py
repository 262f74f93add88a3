"""What happens inside a model, layer by layer."""

from typing import Any

import jax
import numpy as np

from transformer import spec
from transformer.nn.model import Transformer


def run(model: Transformer, params: dict, tokens: np.ndarray) -> tuple[np.ndarray, dict]:
    """Logits [B, T, V] of tokens [B, T], and all captured points (docs/architecture.md lists them)."""
    logits, seen = model.apply({"params": params}, np.asarray(tokens, np.int32), mutable="intermediates")
    return jax.device_get((logits, seen["intermediates"]))


def layers(stack: spec.Stack, tree: dict[str, Any]) -> list[dict[str, Any]]:
    """The subtrees of a stack's tree (parameters or captured points) in the order in which its layers run."""
    body = [
        jax.tree.map(lambda x, r=repeat: x[r], tree["body"][f"block_{i}"])
        for repeat in range(stack.repeats)
        for i in range(len(stack.body))
    ]
    ends = {part: [tree[f"{part}_{i}"] for i in range(len(getattr(stack, part)))] for part in ("head", "tail")}
    return ends["head"] + body + ends["tail"]
