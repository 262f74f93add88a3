"""AdamW with warm-up and a schedule, and which parameters it decays."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from transformer import axes as ax
from transformer.nn import initial
from transformer.nn.model import Transformer
from transformer.settings import HOST_MEMORY, Optimizer, Settings

# A parameter is decayed where it maps features to features. Biases, norms, sinks and tables looked up by position
# have nothing for decay to regularise, and are told by their logical names.
FEATURES = frozenset({
    ax.EMBED, ax.EMBED_OUT, ax.EXPERT_EMBED, ax.MLP, ax.HEADS, ax.KV_HEADS, ax.VOCAB, ax.ROUTES, ax.LATENT,
    ax.LATENT_OUT, ax.CLASSES,
})  # fmt: skip


def decays(names: tuple[str, ...]) -> bool:
    """True for a parameter whose logical axes say that weight decay applies to it."""
    return ax.POSITION not in names and len(FEATURES.intersection(names)) >= 2


def decay_mask(model: Transformer) -> dict:
    """One boolean a parameter, from its logical axis names."""
    return jax.tree.map(lambda box: decays(box.names), initial.abstract_params(model), is_leaf=initial.is_named)


def learning_rate(settings: Optimizer, steps: int) -> optax.Schedule:
    """Linear warm-up to `peak_lr`, then the schedule: learning rate of step 0, 1, … `steps`.

    "cosine" and "linear" end at `end_lr_fraction` of the peak at the last step. "inverse_sqrt" is
    peak · min(step / warmup, sqrt(warmup / step)) (Vaswani et al. 2017, section 5.3, up to a constant).
    """
    peak, warmup = settings.peak_lr, settings.warmup_steps
    end, left = peak * settings.end_lr_fraction, max(steps - warmup, 1)
    after = {
        "cosine": optax.cosine_decay_schedule(peak, left, settings.end_lr_fraction),
        "linear": optax.linear_schedule(peak, end, left),
        "inverse_sqrt": lambda step: peak * jnp.sqrt(warmup / jnp.maximum(step + warmup, 1)),
        "constant": optax.constant_schedule(peak),
    }[settings.schedule]
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup]) if warmup else after


def make_optimizer(model: Transformer, settings: Settings) -> optax.GradientTransformation:
    """Clip by global norm, AdamW, decay by mask (Loshchilov & Hutter 2019).

    It computes in float32 on the device, whatever the moments are kept in and wherever they rest.
    """
    o = settings.optimizer
    adamw = optax.chain(
        optax.clip_by_global_norm(o.clip_norm) if math.isfinite(o.clip_norm) else optax.identity(),
        optax.adamw(
            learning_rate(o, settings.train.steps),
            b1=o.b1,
            b2=o.b2,
            eps=o.eps,
            weight_decay=o.weight_decay,
            mask=decay_mask(model),
        ),
    )
    return _kept(adamw, o) if (o.moments_dtype, o.moments_memory) != ("float32", "device") else adamw


def _kept(inner: optax.GradientTransformation, o: Optimizer) -> optax.GradientTransformation:
    """`inner`, whose moments are of another dtype, or in another memory, between its steps."""

    def on_moments(function: Callable[[jax.Array], jax.Array], state: optax.OptState) -> optax.OptState:
        return jax.tree.map(lambda x: function(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)

    def put_down(x: jax.Array) -> jax.Array:
        x = x.astype(o.moments_dtype)
        return jax.device_put(x, jax.memory.Space.Host) if o.moments_memory == HOST_MEMORY else x

    def take_up(x: jax.Array) -> jax.Array:
        if o.moments_memory == HOST_MEMORY:
            x = jax.device_put(x, jax.memory.Space.Device)
        return x.astype(jnp.float32)

    def init(params: dict) -> optax.OptState:
        return on_moments(put_down, inner.init(params))

    def update(grads: dict, state: optax.OptState, params: dict) -> tuple[dict, optax.OptState]:
        updates, state = inner.update(grads, on_moments(take_up, state), params)
        return updates, on_moments(put_down, state)

    return optax.GradientTransformation(init, update)
