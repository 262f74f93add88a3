"""AdamW with warm-up and a schedule, and which parameters it decays."""

import jax
import jax.numpy as jnp
import optax

from transformer import axes as ax
from transformer.nn import initial
from transformer.nn.model import Transformer
from transformer.settings import Optimizer, Settings

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
    """Clip by global norm, AdamW with float32 moments, decay by mask (Loshchilov & Hutter 2019)."""
    o = settings.optimizer
    return optax.chain(
        optax.clip_by_global_norm(o.clip_norm) if jnp.isfinite(o.clip_norm) else optax.identity(),
        optax.adamw(
            learning_rate(o, settings.train.steps),
            b1=o.b1,
            b2=o.b2,
            eps=o.eps,
            weight_decay=o.weight_decay,
            mask=decay_mask(model),
        ),
    )
