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


def loss_sums(model: Transformer, params: dict, batch: Batch) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Summed nats, and the sums that turn them into averages: target tokens, and the UTF-8 bytes they stand for.

    Sums, not means, so that microbatches, devices, packing and padding can't change the result.
    """
    nats = model.apply(
        {"params": params},
        batch["tokens"],
        batch["targets"],
        batch["positions"],
        batch["segment_ids"],
        method="token_losses",
    )
    total = jnp.sum(nats * batch["weights"])
    return total, {
        "nats": total,
        "tokens": jnp.sum(batch["weights"]),
        "bytes": jnp.sum(batch["target_bytes"].astype(jnp.float32)),
    }


def gradients(model: Transformer, params: dict, batch: Batch, accumulate: int) -> tuple[dict, dict]:
    """Gradient of the mean loss, and the sums of `loss_sums`, over `accumulate` microbatches in turn."""
    grad = jax.grad(lambda p, b: loss_sums(model, p, b), has_aux=True)
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
    """Loss in nats a token, and bits a byte of text."""
    return {
        "loss": sums["nats"] / jnp.maximum(sums["tokens"], 1),
        "bits_per_byte": sums["nats"] / jnp.log(2.0) / jnp.maximum(sums["bytes"], 1),
    }


def make_train_step(model: Transformer, settings: Settings) -> Callable[[TrainState, Batch], tuple[TrainState, dict]]:
    """A pure (state, batch) -> (state, metrics); jit it with the state donated."""
    optimizer = make_optimizer(model, settings)
    schedule = learning_rate(settings.optimizer, settings.train.steps)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict]:
        grads, sums = gradients(model, state.params, batch, settings.train.accumulate)
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


def make_eval_step(model: Transformer) -> Callable[[dict, Batch], dict[str, Array]]:
    """A pure (params, batch) -> sums; add them over batches before taking `means`."""
    return lambda params, batch: loss_sums(model, params, batch)[1]


def compile_train_step(model: Transformer, settings: Settings):
    """`make_train_step` under jit with the state donated; call it inside `jax.set_mesh(mesh)`."""
    return jax.jit(make_train_step(model, settings), donate_argnums=0)
