"""The training and evaluation steps: pure functions of state and batch."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from transformer import axes as ax
from transformer import sharding
from transformer.nn.model import Transformer
from transformer.settings import Settings
from transformer.training.optimizer import learning_rate, make_optimizer
from transformer.training.state import TrainState

Batch = dict[str, Array]


def loss_sums(
    model: Transformer, params: dict, batch: Batch, mtp_weight: float = 0.0
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The summed loss, and the sums that turn it into averages: target tokens, and the UTF-8 bytes they stand for.

    Sums, not means, so that microbatches, devices, packing and padding can't change the result. The loss is the
    model's nats and, where `mtp_weight` is positive, that times the mean over the depths of multi-token prediction of
    theirs. Those are divided by all target tokens, too, as DeepSeek-V3 does (arXiv:2412.19437, equations 24 and 25).
    """
    texts = {"params": params}, batch["tokens"], batch["targets"], batch["positions"], batch["segment_ids"]
    sums = {"tokens": jnp.sum(batch["weights"]), "bytes": jnp.sum(batch["target_bytes"].astype(jnp.float32))}
    if not mtp_weight:
        total = jnp.sum(model.apply(*texts, method="token_losses") * batch["weights"])
        return total, {"nats": total, **sums}
    nats, further, seen = model.apply(*texts, method="further_losses")
    total, further = jnp.sum(nats * batch["weights"]), jnp.sum(further * seen * batch["weights"])
    sums |= {"nats": total, "mtp_nats": further, "mtp_tokens": jnp.sum(seen * batch["weights"])}
    return total + mtp_weight / seen.shape[0] * further, sums


def gradients(
    model: Transformer, params: dict, batch: Batch, accumulate: int, mtp_weight: float = 0.0
) -> tuple[dict, dict]:
    """Gradient of the mean loss, and the sums of `loss_sums`, over `accumulate` microbatches in turn."""
    grad = jax.grad(lambda p, b: loss_sums(model, p, b, mtp_weight), has_aux=True)
    if accumulate == 1:
        total, sums = grad(params, batch)
    else:
        # Row r of the batch goes to microbatch r mod A: every microbatch then spans all devices of the batch axes.
        micro = {
            name: sharding.constrain(
                jnp.swapaxes(x.reshape(-1, accumulate, x.shape[1]), 0, 1), (None, ax.BATCH, ax.LENGTH)
            )
            for name, x in batch.items()
        }

        def add(carry, piece):
            return jax.tree.map(jnp.add, carry, grad(params, piece)), None

        shapes = jax.eval_shape(grad, params, {name: x[0] for name, x in micro.items()})
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        (total, sums), _ = jax.lax.scan(add, zeros, micro)
    weight = jnp.maximum(sums["tokens"], 1)
    return jax.tree.map(lambda g: g / weight, total), sums


def means(sums: dict[str, Array]) -> dict[str, Array]:
    """Loss in nats a token, and bits a byte of text; and the loss of what multi-token prediction foretells."""
    values = {
        "loss": sums["nats"] / jnp.maximum(sums["tokens"], 1),
        "bits_per_byte": sums["nats"] / jnp.log(2.0) / jnp.maximum(sums["bytes"], 1),
    }
    if "mtp_nats" in sums:
        values["mtp_loss"] = sums["mtp_nats"] / jnp.maximum(sums["mtp_tokens"], 1)
    return values


def make_train_step(model: Transformer, settings: Settings) -> Callable[[TrainState, Batch], tuple[TrainState, dict]]:
    """A pure (state, batch) -> (state, metrics); jit it with the state donated."""
    optimizer = make_optimizer(model, settings)
    schedule = learning_rate(settings.optimizer, settings.train.steps)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict]:
        train = settings.train
        grads, sums = gradients(model, state.params, batch, train.accumulate, train.mtp_weight)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            **means(sums),
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": schedule(state.step),
            "tokens": sums["tokens"],
        }
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics

    return train_step


def make_eval_step(model: Transformer, mtp_weight: float = 0.0) -> Callable[[dict, Batch], dict[str, Array]]:
    """A pure (params, batch) -> sums; add them over batches before taking `means`."""
    return lambda params, batch: loss_sums(model, params, batch, mtp_weight)[1]


def compile_train_step(model: Transformer, settings: Settings):
    """`make_train_step` under jit with the state donated; call it inside `jax.set_mesh(mesh)`."""
    return jax.jit(make_train_step(model, settings), donate_argnums=0)
