"""Mixtures of experts: who is picked, how even that is before and after training, and who is dropped."""

import dataclasses
import functools
from dataclasses import dataclass

import flax.linen as nn
import jax
import numpy as np

from transformer import api, config, families, settings, sharding, spec
from transformer.figures.data import captured, published
from transformer.nn import moe
from transformer.nn.model import Transformer
from transformer.ops import balance as ops
from transformer.ops import routing
from transformer.planning.accounting import parameters
from transformer.training import balance
from transformer.training.state import init_state
from transformer.training.step import compile_train_step

ROUTER_WIDTH = 64
REMEDIES = {
    "none": settings.Balance(),
    "auxiliary": settings.Balance(auxiliary=1e-2),
    "correction": settings.Balance(correction_rate=1e-2),
}


def mixture(reference: str | spec.Model) -> spec.MoE:
    """The mixture of experts of a published model's last layer.

    Raises:
      ValueError: it has none.
    """
    found = published.model(reference).layers[-1].ffn
    if not isinstance(found, spec.MoE):
        raise ValueError(f"reference={reference!r}: its layers have no experts; use mixtral:8x7b, for one")
    return found


def random_picks(moe_spec: spec.MoE, tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(index, weight) [T, k] of random tokens under a router at its initial weights, of the published size."""
    keys = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(keys[0], (1, tokens, ROUTER_WIDTH))
    router = moe.Router(moe_spec.router, moe_spec.num_experts, settings.Compute())
    logits, correction = router.apply(nn.meta.unbox(router.init(keys[1], x)), x)
    index, weight = routing.route(moe_spec.router, moe_spec.top_k, logits, correction)
    return np.asarray(index[0]), np.asarray(weight[0])


def counts(index: np.ndarray, num_experts: int) -> np.ndarray:
    """[E]: assignments of each expert."""
    return np.bincount(index.reshape(-1), minlength=num_experts)


@dataclass(frozen=True)
class Balancing:
    """Load of a small model's experts while it learns.

    Attributes:
      violation: [steps] largest load over the mean one, the worst of the layers.
      before, after: [L, E] each expert's share of the assignments of a batch that training never sees.
      loss: [steps] nats a token.
      picks: [tokens, k] picks of the last layer in that batch, after training.
    """

    violation: np.ndarray
    before: np.ndarray
    after: np.ndarray
    loss: np.ndarray
    picks: np.ndarray


def balanced_model() -> spec.Model:
    """A tiny mixture whose sigmoid router has a correction, so that every remedy can be tried on it."""
    router = spec.Router(
        score="sigmoid",
        normalize=True,
        scale=1.0,
        bias=False,
        correction=True,
        groups=1,
        top_groups=1,
        group_score="max",
    )
    tiny = families.build_spec(config.load_config("mixtral:tiny").model.to_dict())

    def swap(block: spec.Block) -> spec.Block:
        return dataclasses.replace(block, ffn=dataclasses.replace(block.ffn, router=router))

    return dataclasses.replace(tiny, decoder=tiny.decoder.map(swap))


@functools.cache
def train(remedy: str, steps: int = 80, seed: int = 0) -> Balancing:
    """Trains the small model on a chain of few frequent and many rare tokens, under one of `REMEDIES`.

    Raises:
      ValueError: an unknown remedy.
    """
    if remedy not in REMEDIES:
        raise ValueError(f"remedy={remedy!r}: use one of {', '.join(REMEDIES)}")
    model = api.build(balanced_model(), attention="reference", experts="dense")
    run = settings.Settings(
        seed=seed,
        balance=REMEDIES[remedy],
        optimizer=settings.Optimizer(peak_lr=1e-2, warmup_steps=0),
        train=settings.Train(steps=steps),
    )
    rng, mesh = np.random.default_rng(seed), sharding.make_mesh(settings.Mesh(), jax.devices()[:1])
    state = init_state(model, run, mesh)
    held_out, rows = _batch(rng), []
    before, _ = _routing(model, state.params, held_out)
    with jax.set_mesh(mesh):
        step = compile_train_step(model, run)
        for _ in range(steps):
            state, metrics = step(state, _batch(rng))
            worst = max(np.max(layer["violation"]) for layer in metrics["experts"].values())
            rows.append((worst, float(metrics["loss"])))
    after, picks = _routing(model, state.params, held_out)
    violation, loss = np.array(rows).T
    return Balancing(violation, before, after, loss, picks)


def _batch(rng: np.random.Generator, rows: int = 8, length: int = 32) -> dict[str, np.ndarray]:
    """Tokens of a Zipf law, each of which decides half of what follows it."""
    vocab = 128
    law = 1 / np.arange(1, vocab + 1)
    tokens = rng.choice(vocab, (rows, length + 1), p=law / law.sum())
    for t in range(1, length + 1):
        tokens[:, t] = np.where(rng.random(rows) < 0.5, (tokens[:, t - 1] * 7 + 3) % vocab, tokens[:, t])
    whole = np.ones((rows, length), np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), whole.shape)
    return {
        "tokens": tokens[:, :-1].astype(np.int32), "targets": tokens[:, 1:].astype(np.int32),
        "weights": whole.astype(np.float32), "positions": positions, "segment_ids": whole, "target_bytes": whole,
    }  # fmt: skip


def _routing(model: Transformer, params: dict, batch: dict) -> tuple[np.ndarray, np.ndarray]:
    """Shares [L, E] of the experts, and the picks [tokens, k] of the last layer."""
    _, seen = model.apply({"params": params}, batch["tokens"], mutable=[moe.COLLECTION, "intermediates"])
    (load,) = balance.loads(seen[moe.COLLECTION]).values()
    index = seen["intermediates"]["decoder"]["body"]["block_0"]["ffn"]["router_index"][-1]
    return np.asarray(ops.shares(load.picks)), np.asarray(index).reshape(-1, index.shape[-1])


def sizes(reference: str, experts: tuple[int, ...], top_k: int) -> dict[int, tuple[int, int]]:
    """(total, active) parameters of a published mixture, were it of so many experts, of which a token visits `top_k`.

    Raises:
      ValueError: the model has no experts, or `top_k` are more than there are.
    """
    model, found = published.model(reference), {}
    mixture(model)

    def of(block: spec.Block, count: int) -> spec.Block:
        if not isinstance(block.ffn, spec.MoE):
            return block
        return dataclasses.replace(block, ffn=dataclasses.replace(block.ffn, num_experts=count, top_k=top_k))

    for count in experts:
        if top_k > count:
            raise ValueError(f"top_k={top_k}: use at most the {count} experts that there are")
        decoder = model.decoder.map(lambda block, n=count: of(block, n))
        counted = parameters(dataclasses.replace(model, decoder=decoder))
        found[count] = (counted.total, counted.active)
    return found


def picks(model: Transformer, params: dict, token_ids: list[int]) -> dict[int, np.ndarray]:
    """Weights [T, E] of the experts that each token of a text is sent to, 0 for others; by layer, if it has experts.

    Raises:
      ValueError: no layer has.
    """
    stack = model.spec.trunk
    _, seen = captured.run(model, params, np.array(token_ids)[None])
    inner = captured.layers(stack, seen["decoder" if model.spec.decoder else "encoder"])
    found = {}
    for layer, (block, points) in enumerate(zip(stack.layers, inner, strict=True)):
        if isinstance(block.ffn, spec.MoE):
            index, weight = (points["ffn"][f"router_{name}"][0] for name in ("index", "weight"))
            found[layer] = np.zeros((len(token_ids), block.ffn.num_experts))
            np.put_along_axis(found[layer], index, weight, axis=-1)
    if not found:
        raise ValueError("model: none of its layers has experts; use a mixture, such as mixtral:tiny")
    return found


def dropped(index: np.ndarray, num_experts: int, factors: np.ndarray) -> np.ndarray:
    """Share of the assignments [T, k] that no slot is left for at each capacity factor, as `ops.experts` drops them."""
    load, share = counts(index, num_experts), index.size / num_experts
    room = np.minimum(np.ceil(np.asarray(factors) * share), len(index))
    return np.maximum(load - room[:, None], 0).sum(axis=1) / index.size
