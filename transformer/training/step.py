"""The training and evaluation steps: pure functions of state and batch."""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from transformer import axes as ax
from transformer import distributed, sharding
from transformer.nn import moe
from transformer.nn.context import Source
from transformer.nn.model import Transformer
from transformer.ops.experts import products
from transformer.settings import Balance, Settings, Train
from transformer.training import balance as balancing
from transformer.training import guard
from transformer.training.optimizer import learning_rate, make_optimizer
from transformer.training.state import TrainState

Batch = dict[str, Array]
UNBALANCED = Balance()


def loss_sums(
    model: Transformer, params: dict, batch: Batch, mtp_weight: float = 0.0, smoothing: float = 0.0, z: float = 0.0
) -> tuple[Float[Array, ""], dict]:
    """The summed loss, and the sums that averages are made of: target tokens, the UTF-8 bytes they stand for, `loads`.

    Sums, not means, so that microbatches, devices, packing and padding can't change the result. The loss is the
    model's nats, against smoothed targets if `smoothing` is positive and with a z-loss if `z` is (`nats` in the sums
    have neither).

    Where `mtp_weight` is positive, that times the mean over the depths of multi-token prediction of their nats is
    added. Those are divided by all target tokens, too, as DeepSeek-V3 does (arXiv:2412.19437, equations 24 and 25).
    """
    weights = batch["weights"]
    texts = batch["tokens"], batch["targets"], batch["positions"], batch["segment_ids"]
    how = dict(smoothing=smoothing, z=z, mtp_weight=mtp_weight, method="weighed_losses", mutable=[moe.COLLECTION])
    losses, collections = model.apply({"params": params}, weights, *texts, **conditions(batch), **how)
    sums = {
        "tokens": jnp.sum(weights),
        "bytes": jnp.sum(batch["target_bytes"].astype(jnp.float32)),
        "loads": balancing.loads(collections.get(moe.COLLECTION, {})),
        "nats": jnp.sum(losses.nats * weights),
    }
    if mtp_weight:
        sums["mtp_nats"] = sum(jnp.sum(x * seen * weights) for x, seen in zip(losses.further, losses.seen, strict=True))
        sums["mtp_tokens"] = sum(jnp.sum(seen * weights) for seen in losses.seen)
    return losses.total, sums


def conditions(batch: Batch) -> dict[str, Any]:
    """What else the model reads of a batch: the order of a prefix, the source of an encoder."""
    given = {"orders": batch["orders"]} if "orders" in batch else {}
    if "source_tokens" in batch:
        given["source"] = Source(batch["source_tokens"], batch["source_positions"], batch["source_segment_ids"])
    return given


def gradients(
    model: Transformer,
    params: dict,
    batch: Batch,
    accumulate: int,
    balance: Balance = UNBALANCED,
    mtp_weight: float = 0.0,
    smoothing: float = 0.0,
    z: float = 0.0,
    dtype: str = "float32",
) -> tuple[dict, dict]:
    """Gradient of the mean loss, and the sums of `loss_sums`, over `accumulate` microbatches in turn.

    The gradient is in float32, what it is a sum of, over microbatches, in `dtype`.
    The balance losses are means over all tokens that are no padding; their sum is among the sums as `penalty`.
    """
    targets, routed = jnp.maximum(jnp.sum(batch["weights"]), 1), jnp.maximum(jnp.sum(_real(batch)), 1)

    def objective(params, batch, shares):
        total, sums = loss_sums(model, params, batch, mtp_weight, smoothing, z)
        shares = balancing.shares(sums["loads"]) if shares is None else shares
        penalty = balancing.penalty(balance, sums["loads"], shares)
        return total + penalty * targets / routed, {**sums, "penalty": penalty}

    grad = jax.grad(objective, has_aux=True)
    if accumulate == 1:
        total, sums = grad(params, batch, None)
    else:
        # Row r of the batch goes to microbatch r mod A: every microbatch then spans all devices of the batch axes.
        micro = {
            name: sharding.constrain(
                jnp.swapaxes(x.reshape(-1, accumulate, x.shape[1]), 0, 1), (None, ax.BATCH, ax.LENGTH)
            )
            for name, x in batch.items()
        }
        shares = None
        if balance.auxiliary:
            # It weighs by the load of the whole step, which must be known before the first gradient.
            shares = balancing.shares(
                _add_up(lambda piece: loss_sums(model, params, piece, mtp_weight)[1]["loads"], micro)
            )

        def rounded(piece: Batch) -> tuple[dict, dict]:
            grads, sums = grad(params, piece, shares)
            return jax.tree.map(lambda g: g.astype(dtype), grads), sums

        total, sums = _add_up(rounded, micro)
    return jax.tree.map(lambda g: g.astype(jnp.float32) / targets, total), sums


def _real(batch: Batch) -> Bool[Array, "B T"]:
    """False in padding."""
    return (batch["positions"] >= 0) & (batch["segment_ids"] != 0)


def _add_up(function: Callable[[Batch], Any], micro: Batch) -> Any:
    """The sum of a function over microbatches, one at a time."""
    shapes = jax.eval_shape(function, {name: x[0] for name, x in micro.items()})
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(lambda total, piece: (jax.tree.map(jnp.add, total, function(piece)), None), zeros, micro)[0]


def means(sums: dict[str, Array]) -> dict[str, Array]:
    """Loss in nats a token, and bits a byte of text; and the loss of what multi-token prediction foretells."""
    values = {
        "loss": sums["nats"] / jnp.maximum(sums["tokens"], 1),
        "bits_per_byte": sums["nats"] / jnp.log(2.0) / jnp.maximum(sums["bytes"], 1),
    }
    if "mtp_nats" in sums:
        values["mtp_loss"] = sums["mtp_nats"] / jnp.maximum(sums["mtp_tokens"], 1)
    return values


def terms(train: Train) -> dict[str, Any]:
    """What `gradients` takes of the settings."""
    return {
        "mtp_weight": train.mtp_weight, "smoothing": train.label_smoothing, "z": train.z_loss,
        "dtype": train.accumulate_dtype,
    }  # fmt: skip


def averaged(state: TrainState, params: dict, decay: float) -> dict | None:
    """The running average with new parameters; of the first steps it leaves less, lest it remember the initial ones."""
    if state.average is None:
        return None
    decay = jnp.minimum(decay, (1.0 + state.step) / (10.0 + state.step))
    return jax.tree.map(lambda old, new: old + (1 - decay) * (new - old), state.average, params)


def make_train_step(model: Transformer, settings: Settings) -> Callable[[TrainState, Batch], tuple[TrainState, dict]]:
    """A pure (state, batch) -> (state, metrics); jit it with the state donated.

    Metrics are scalars, and under "experts" arrays by layer (`ops.balance.summary`) where the model has any.

    Raises:
      SettingsError: something is to be balanced that the model doesn't have.
    """
    balance = settings.balance
    balancing.check_balance(model.spec, balance)
    optimizer = make_optimizer(model, settings)
    schedule = learning_rate(settings.optimizer, settings.train.steps)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict]:
        train = settings.train
        grads, sums = gradients(model, state.params, batch, train.accumulate, balance, **terms(train))
        values, grad_norm = means(sums), optax.tree.norm(grads)
        counts, health = guard.judge(state.health, values["loss"], grad_norm, train.spike)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params, counts=counts)
        params = optax.apply_updates(state.params, updates)
        if balance.correction_rate:
            corrected = balancing.correct(params, sums["loads"], balance.correction_rate)
            params = guard.chosen(counts, corrected, params)
        metrics = {
            **values,
            "grad_norm": grad_norm,
            "learning_rate": schedule(state.step),
            "tokens": sums["tokens"],
            "skipped": health.skipped,
            "skipped_in_a_row": health.in_a_row,
        }
        if sums["loads"]:
            metrics["balance_loss"] = sums["penalty"] / jnp.maximum(jnp.sum(_real(batch)), 1)
            metrics["experts"] = balancing.metrics(sums["loads"])
        average = averaged(state, params, settings.optimizer.average_decay)
        average = guard.chosen(counts, average, state.average)
        return TrainState(state.step + 1, params, opt_state, health, average), metrics

    return train_step


def make_eval_step(model: Transformer, mtp_weight: float = 0.0) -> Callable[[dict, Batch], dict[str, Array]]:
    """A pure (params, batch) -> sums; add them over batches before taking `means`."""
    return lambda params, batch: loss_sums(model, params, batch, mtp_weight)[1]


def compile_train_step(model: Transformer, settings: Settings):
    """`make_train_step` under jit with the state donated; call it inside `jax.set_mesh(mesh)`."""
    return jax.jit(make_train_step(model, settings), donate_argnums=0, compiler_options=products.compiler_options())


def compile_together(train_step, state: TrainState, batch: Batch) -> None:
    """Compiles the step in every process, and waits for the last.

    Who waits in a step for one that still compiles loses patience: Gloo's, on CPUs, is 30 s.

    Raises:
      DistributedError: a process has traced another program; its devices and the others' would wait for each other.
    """
    lowered = train_step.lower(state, batch)
    program = hashlib.sha256(lowered.as_text().encode()).digest()
    distributed.check_same(program, "the training step's program (code, jax or libraries)")
    lowered.compile()
    distributed.meet("the training step is compiled")
