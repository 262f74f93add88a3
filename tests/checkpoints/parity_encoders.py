"""What a model with an encoder computes from a recorded case, beside what was recorded, as `parity.py` does."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests import common
from tests.checkpoints import common as golden
from tests.checkpoints.parity import error
from transformer import spec
from transformer.nn.context import Source
from transformer.nn.model import Transformer

CASES = golden.ENCODERS + golden.PAIRS


class Result(NamedTuple):
    """Logits [B, T, V], hidden states [L + 1, B, T, D] of each stack, and what the pooler makes of the encoder's."""

    logits: np.ndarray
    hidden: dict[str, np.ndarray]
    pooled: np.ndarray | None
    classes: np.ndarray | None


class Inputs(NamedTuple):
    """What the encoder reads, [B, S] each, padding at position -1; and what the decoder does [B, T]."""

    tokens: np.ndarray
    positions: np.ndarray
    token_types: np.ndarray | None = None
    decoder_tokens: np.ndarray | None = None


@functools.cache
def program(model: Transformer):
    """The jitted forward pass that sees inside."""

    def alone(net, inputs: Inputs):
        x, _ = net.features(inputs.tokens, inputs.positions, token_types=inputs.token_types)
        return {"encoder": x}, {}, net.logits(x), *net.pool(x)

    def both(net, inputs: Inputs):
        memory = net.encode(Source(inputs.tokens, inputs.positions))
        x, _ = net.features(inputs.decoder_tokens, source=memory)
        begun = {"encoder": net.embedding(inputs.tokens, inputs.positions)}
        return {"encoder": memory.features, "decoder": x}, begun, net.logits(x), None, None

    def run(params, inputs: Inputs) -> Result:
        method = both if model.spec.decoder else alone
        found, state = model.apply({"params": params}, inputs, method=method, mutable="intermediates")
        last, begun, logits, pooled, classes = found
        inner, hidden = state["intermediates"], {}
        for name, stack in model.spec.stacks.items():
            residuals = [layer["residual"] for layer in common.layers(stack, inner[name])]
            hidden[name] = jnp.stack([begun.get(name, inner["embedded"]), *residuals[:-1], last[name]])
        return Result(logits, hidden, pooled, classes)

    return jax.jit(run)


def inputs(case: str, batch: str = "", decoder_tokens: np.ndarray | None = None) -> Inputs:
    """A recorded batch; the decoder reads the recorded targets, or `decoder_tokens`, padded to one length."""
    want = golden.expected(case)
    tokens = want[f"{batch}input_ids"]
    real = want[f"{batch}attention_mask"] > 0 if batch else np.ones(tokens.shape, bool)
    positions = np.where(real, np.arange(tokens.shape[1]), -1)
    if case in golden.ENCODERS:
        return Inputs(tokens, positions, want[f"{batch}token_type_ids"])
    targets = want["decoder_input_ids"]
    if decoder_tokens is not None:  # what comes later is not seen, so that one program serves all
        targets = np.pad(decoder_tokens, ((0, 0), (0, targets.shape[1] - decoder_tokens.shape[1])))
    return Inputs(tokens, positions, None, targets)


@functools.cache
def forward(case: str, batch: str = "") -> Result:
    """A recorded batch."""
    model, params = golden.imported(case)
    return jax.device_get(program(model)(params, inputs(case, batch)))


def logits_error(case: str) -> float:
    """Of a batch without padding."""
    return error(forward(case).logits, golden.expected(case)["logits"])


def hidden_errors(case: str) -> list[float]:
    """Of every hidden state of every stack, from the embedding to the last norm."""
    want, got = golden.expected(case), forward(case).hidden
    names = {"encoder": "hidden_states"} if case in golden.ENCODERS else {n: f"{n}_hidden_states" for n in got}
    return [
        error(ours, theirs) for name, key in names.items() for ours, theirs in zip(got[name], want[key], strict=True)
    ]


@functools.cache
def loss_and_gradient_errors(case: str) -> dict[str, float]:
    """Of a batch whose source is padded: loss, token table's gradient by its largest, global norm by itself.

    Raises:
      KeyError: none was recorded.
    """
    (model, params), want, given = golden.imported(case), golden.expected(case), inputs(case, "padR_")
    labels, there = np.maximum(want["labels"], 0), want["labels"] >= 0

    def mean(values):
        source = Source(given.tokens, given.positions)
        nats = model.apply({"params": values}, given.decoder_tokens, labels, source=source, method="token_losses")
        return (nats * there).sum() / there.sum()

    loss, gradients = jax.device_get(jax.jit(jax.value_and_grad(mean))(params))
    table, theirs = np.array(gradients["embedding"]["token"]), want["grad_embed"]
    if isinstance(model.spec.embedding.positions, spec.SinusoidalPositions):
        # There the row of the padding's token is looked up without a gradient, and the bias of the logits is no
        # parameter.
        pad = golden.config(case)["pad_token_id"]
        table[pad] = theirs[pad]
        gradients["head"] = {}
    gradients["embedding"] = {"token": table}
    norm = np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(gradients)))
    scale = float(np.abs(theirs).max())
    return {
        "loss": error(loss, want["loss"]),
        "grad_embed": error(table / scale, theirs / scale),
        "grad_global_norm": error(norm / want["grad_global_norm"], 1.0),
    }


def recorded_tokens(case: str) -> np.ndarray:
    """Their greedy continuations [2 B, NEW]: of the batch without padding, then of the padded one."""
    return np.concatenate([golden.expected(case)[f"{batch}gen_tokens"] for batch in ("", "padR_")])


@functools.cache
def steps(case: str) -> np.ndarray:
    """Logits [2 B, NEW, V] of full passes over the recorded continuations."""
    (model, params), found = golden.imported(case), []
    for batch in ("", "padR_"):
        tokens = golden.expected(case)[f"{batch}gen_tokens"]
        before = np.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=model.spec.decoder_start)
        found.append(program(model)(params, inputs(case, batch, before)).logits[:, : tokens.shape[1]])
    return np.concatenate(found)


def tokens_without_cache(case: str) -> np.ndarray:
    """Ours, by the argmax of full passes over the recorded continuations."""
    return steps(case).argmax(axis=-1)
