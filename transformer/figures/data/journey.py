"""One token's journey: a tiny model learns 小猫跑了一天，它很 → 累, and the vector of 很 is followed through it."""

import functools
from dataclasses import dataclass

import jax
import numpy as np

from transformer import api, settings, sharding, spec
from transformer.figures.data import captured
from transformer.nn.model import Transformer
from transformer.ops.norms import normalize
from transformer.training.state import init_state
from transformer.training.step import compile_train_step

BOS = 1
PROMPT = (BOS, 10, 11, 12, 13, 14, 15, 16)
ANSWER = 17
# What follows depends on what was done all day: who slept is awake.
SENTENCES = ((*PROMPT, ANSWER), (BOS, 10, 18, 12, 13, 14, 15, 16, 19))
CONFIG = dict(
    family="llama3", vocab_size=20, d_model=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, d_ff=32,
    max_length=16, rope_theta=1e4, norm_eps=1e-5, attention_bias=False, mlp_bias=False, tied=False,
)  # fmt: skip


def softmax(scores: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(e^z, weights) of scores z."""
    return np.exp(scores), np.asarray(jax.nn.softmax(np.array(scores, np.float32)))


@functools.cache
def learn(steps: int = 60, seed: int = 0) -> tuple[Transformer, dict, list[float]]:
    """(model, parameters, loss of each step in nats) of a tiny model trained on the two sentences."""
    model = api.build({"model": CONFIG}, attention="reference")
    optimizer = settings.Optimizer(peak_lr=2e-2, warmup_steps=5, weight_decay=0.0)
    run = settings.Settings(seed=seed, optimizer=optimizer, train=settings.Train(steps=steps))
    mesh = sharding.make_mesh(settings.Mesh(), jax.devices()[:1])
    state, losses = init_state(model, run, mesh), []
    with jax.set_mesh(mesh):
        step = compile_train_step(model, run)
        for _ in range(steps):
            state, metrics = step(state, _batch())
            losses.append(float(metrics["loss"]))
    return model, jax.device_get(state.params), losses


def _batch() -> dict[str, np.ndarray]:
    text = np.array(SENTENCES, np.int32)
    whole = np.ones(text[:, 1:].shape, np.int32)
    positions = np.broadcast_to(np.arange(whole.shape[1], dtype=np.int32), whole.shape)
    return {
        "tokens": text[:, :-1], "targets": text[:, 1:], "weights": whole.astype(np.float32), "positions": positions,
        "segment_ids": whole, "target_bytes": whole,
    }  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """The vector [D] of the followed token at one point; `key` and `values` name it in the table of words.

    Attributes:
      stream: whether it is the residual stream itself, not what a branch adds to it or reads of it.
    """

    key: str
    values: dict[str, int]
    vector: np.ndarray
    stream: bool


@dataclass(frozen=True)
class Journey:
    """The last token of a prompt on its way through a model.

    Attributes:
      stages: in the order in which they are computed.
      looks: [L, N, T] where each head of each layer looks.
      logits, probabilities: [V] of what comes next.
    """

    stages: tuple[Stage, ...]
    looks: np.ndarray
    logits: np.ndarray
    probabilities: np.ndarray


def follow(model: Transformer, params: dict, tokens: tuple[int, ...] = PROMPT) -> Journey:
    """The journey of the last token of `tokens` through a pre-norm decoder.

    Raises:
      ValueError: norms or attention of another kind, whose branches would need other stages.
    """
    stack = model.spec.decoder
    plain = stack is not None and not stack.crosses and model.spec.encoder is None
    if not plain or any(b.placement != "pre" or not isinstance(b.mixer, spec.Attention) for b in stack.layers):
        raise ValueError("model: the journey is shown of a pre-norm decoder with plain attention")
    logits, seen = captured.run(model, params, np.array(tokens)[None])
    inner = captured.layers(stack, seen["decoder"])
    weights = captured.layers(stack, params["decoder"])
    x = seen["embedded"][0, -1]
    stages, looks = [Stage("stage embedding", {}, x, True)], []
    for i, (block, points, own) in enumerate(zip(stack.layers, inner, weights, strict=True)):
        stages += _layer(block, points, own, i, x)
        x = points["residual"][0, -1]
        looks.append(points["attention"]["probabilities"][0, :, -1])
    if stack.final_norm is not None:
        normed = _normed(stack.final_norm, x, params["decoder"]["final_norm"])
        stages.append(Stage("stage final norm", {}, normed, False))
    chances = np.asarray(jax.nn.softmax(logits[0, -1]))
    return Journey(tuple(stages), np.stack(looks), logits[0, -1], chances)


def _layer(block: spec.Block, points: dict, params: dict, layer: int, x: np.ndarray) -> list[Stage]:
    """The stages of one block, into which the token comes as x."""
    at = dict(layer=layer)
    stages = [Stage("stage norm", at, _normed(block.norm, x, params["attention_norm"]), False)]
    weights, v = (points["attention"][name][0] for name in ("probabilities", "v"))
    group = block.mixer.num_heads // block.mixer.num_kv_heads
    for head, kernel in enumerate(np.asarray(params["attention"]["out"]["kernel"])):
        out = weights[head, -1] @ v[:, head // group] @ kernel
        stages.append(Stage("stage head", dict(at, head=head), out, False))
    x = x + points["attention_out"][0, -1]
    return [
        *stages,
        Stage("stage attended", at, x, True),
        Stage("stage norm", at, _normed(block.norm, x, params["ffn_norm"]), False),
        Stage("stage ffn", at, points["ffn_out"][0, -1], False),
        Stage("stage residual", at, points["residual"][0, -1], True),
    ]


def _normed(norm: spec.Norm, x: np.ndarray, params: dict) -> np.ndarray:
    return np.asarray(normalize(norm, jax.numpy.asarray(x), params["scale"], params.get("bias")))
