"""What a decoder computes from a recorded case, beside what was recorded: for the tests, and for docs/families.md.

Models with an encoder are in `parity_encoders.py`, under the same names.
"""

import functools
from typing import NamedTuple

import jax
import numpy as np

from tests import common
from tests.checkpoints import common as golden
from transformer import spec
from transformer.generation import generate
from transformer.nn.model import Transformer
from transformer.ops.sampling import Sampling

LIMIT = 3e-4
ROUTER = ("logits", "index", "weight")
NEW = golden.expected(golden.DECODERS[0])["gen_tokens"].shape[1]


class Result(NamedTuple):
    """Logits [B, T, V], hidden states [L + 1, B, T, D] as `transformers` counts them, and each layer's `ROUTER`."""

    logits: np.ndarray
    hidden: np.ndarray
    routers: list[list[np.ndarray] | None]


@functools.cache
def program(model: Transformer):
    """The jitted forward pass that sees inside."""

    def both(net, tokens, positions):
        x, _ = net.features(tokens, positions)
        return x, net.logits(x)

    def run(params, tokens, positions) -> Result:
        (last, logits), state = model.apply({"params": params}, tokens, positions, method=both, mutable="intermediates")
        inner = state["intermediates"]
        layers = common.layers(model.spec.decoder, inner["decoder"])
        # Theirs end with the normed one in place of the last residual.
        hidden = [inner["embedded"], *(layer["residual"] for layer in layers[:-1]), last]
        routers = [
            [layer["ffn"][f"router_{name}"] for name in ROUTER] if isinstance(block.ffn, spec.MoE) else None
            for block, layer in zip(model.spec.decoder.layers, layers, strict=True)
        ]
        return Result(logits, jax.numpy.stack(hidden), routers)

    return jax.jit(run)


@functools.cache
def forward(case: str, batch: str = "") -> Result:
    """A recorded batch and its recorded continuation in one pass without a cache, so that one program serves all."""
    model, params = golden.imported(case)
    tokens, positions = rows(case, batch)
    return jax.device_get(program(model)(params, tokens, positions))


def mask(case: str, batch: str) -> np.ndarray:
    """Where a batch has tokens."""
    want = golden.expected(case)
    return want[f"{batch}attention_mask"] > 0 if batch else np.ones(want["input_ids"].shape, bool)


def rows(case: str, batch: str) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, positions), each [B, T + NEW]; padding is at position -1."""
    want, real = golden.expected(case), mask(case, batch)
    tokens = want[f"{batch}input_ids"]
    after = want.get(f"{batch}gen_tokens", np.zeros((len(tokens), NEW), np.int32))
    real = np.concatenate([real, np.full(after.shape, f"{batch}gen_tokens" in want)], axis=1)
    positions = np.where(real, np.cumsum(real, axis=1) - 1, -1)
    return np.concatenate([tokens, after], axis=1).astype(np.int32), positions.astype(np.int32)


def error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference of two arrays of one shape."""
    assert np.shape(got) == np.shape(want), f"shape {np.shape(got)}, expected {np.shape(want)}"
    return float(np.abs(np.asarray(got) - want).max())


def close(what: str, got: np.ndarray, want: np.ndarray, limit: float = LIMIT) -> None:
    """Agrees within `limit`; the figure is printed."""
    small(what, error(got, want), limit)


def small(what: str, error: float, limit: float = LIMIT) -> None:
    """An error is within `limit`; the figure is printed."""
    print(f"  {what}: {error:.1e}")
    assert error <= limit, f"{what}: differs by {error:.1e}, limit {limit:.1e}"


def logits_error(case: str) -> float:
    """Of a batch without padding."""
    want = golden.expected(case)["logits"]
    return error(forward(case).logits[:, : want.shape[1]], want)


def hidden_errors(case: str) -> list[float]:
    """Of every hidden state, from the embedding to the final norm."""
    want, got = golden.expected(case)["hidden_states"], forward(case).hidden
    return [error(ours[:, : theirs.shape[1]], theirs) for ours, theirs in zip(got, want, strict=True)]


@functools.cache
def loss_and_gradient_errors(case: str) -> dict[str, float]:
    """Of a batch padded on the right: loss, token table's gradient by its largest, global norm by itself."""
    (model, params), want = golden.imported(case), golden.expected(case)
    tokens, positions = (x[:, :-NEW] for x in rows(case, "padR_"))
    # Their labels lie at the token itself, ours are the next token's.
    labels = np.pad(want["loss_labels"][:, 1:], ((0, 0), (0, 1)), constant_values=-100)
    weights = (labels >= 0).astype(np.float32)
    batch = common.Batch(tokens, np.maximum(labels, 0).astype(np.int32), weights, positions)
    losses, gradients = jax.device_get(common.objective(model)(params, batch))
    gradients = jax.tree.map(lambda x: x / weights.sum(), gradients)
    norm = np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(gradients)))
    scale = float(np.abs(want["grad_embed"]).max())
    return {
        "loss": error(losses.sum() / weights.sum(), want["loss"]),
        "grad_embed": error(gradients["embedding"]["token"] / scale, want["grad_embed"] / scale),
        "grad_global_norm": error(norm / want["grad_global_norm"], 1.0),
    }


def recorded_tokens(case: str) -> np.ndarray:
    """Their greedy continuations [2 B, NEW]: of the batch without padding, then of the one padded on the left."""
    return np.concatenate([golden.expected(case)[f"{batch}gen_tokens"] for batch in ("", "padL_")])


def tokens_without_cache(case: str) -> np.ndarray:
    """Ours, by the argmax of full passes over the recorded continuations."""
    steps = [forward(case, batch).logits[:, -NEW - 1 : -1] for batch in ("", "padL_")]
    return np.concatenate(steps).argmax(axis=-1)


def tokens_with_cache(case: str) -> np.ndarray:
    """Ours, generated from the prompts alone, of unequal lengths in one batch."""
    (model, params), want = golden.imported(case), golden.expected(case)
    prompts = [
        row[there].tolist()
        for batch in ("", "padL_")
        for row, there in zip(want[f"{batch}input_ids"], mask(case, batch), strict=True)
    ]
    got = generate(model, params, prompts, max_new_tokens=NEW, sampling=Sampling(temperature=0.0))
    return np.array([row.tokens for row in got])
