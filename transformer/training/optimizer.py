"""Optimisers, their schedules, and which parameters they treat how. All are made of optax's parts."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from transformer import axes as ax
from transformer.nn import initial
from transformer.nn.model import Transformer
from transformer.nn.parameter import Named
from transformer.settings import HOST_MEMORY, Optimizer, Settings, check
from transformer.training.guard import guarded

# A parameter is decayed where it maps features to features. Biases, norms, sinks and tables looked up by position
# have nothing for decay to regularise, and are told by their logical names.
FEATURES = frozenset({
    ax.EMBED, ax.EMBED_OUT, ax.EXPERT_EMBED, ax.MLP, ax.HEADS, ax.KV_HEADS, ax.VOCAB, ax.ROUTES, ax.LATENT,
    ax.LATENT_OUT, ax.CLASSES,
})  # fmt: skip
# Axes along which a parameter is many matrices.
STACKED = frozenset({ax.LAYERS, ax.EXPERTS})
# Root mean square of an update by which Muon's are as large as AdamW's (Liu et al. 2025, arXiv:2502.16982, eq. 4).
MUON_RMS = 0.2


def decays(names: tuple[str, ...]) -> bool:
    """True for a parameter whose logical axes say that weight decay applies to it."""
    return ax.POSITION not in names and len(FEATURES.intersection(names)) >= 2


def learning_rate(settings: Optimizer, steps: int) -> optax.Schedule:
    """Linear warm-up to `peak_lr`, then the schedule: learning rate of step 0, 1, … `steps`.

    "cosine", "linear" and "wsd" end at `end_lr_fraction` of the peak at the last step; "wsd" (warm-up, stable, decay;
    Hu et al. 2024, arXiv:2404.06395) is constant until the last `decay_fraction` of the steps, then linear.
    "inverse_sqrt" is peak · min(step / warmup, sqrt(warmup / step)) (Vaswani et al. 2017, section 5.3; its constant
    apart).
    """
    peak, warmup = settings.peak_lr, settings.warmup_steps
    end, left = peak * settings.end_lr_fraction, max(steps - warmup, 1)
    falling = min(max(round(settings.decay_fraction * steps), 1), left)
    after = {
        "cosine": optax.cosine_decay_schedule(peak, left, settings.end_lr_fraction),
        "linear": optax.linear_schedule(peak, end, left),
        "inverse_sqrt": lambda step: peak * jnp.sqrt(warmup / jnp.maximum(step + warmup, 1)),
        "constant": optax.constant_schedule(peak),
        "wsd": optax.linear_schedule(peak, end, falling, left - falling),
    }[settings.schedule]
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup]) if warmup else after


def make_optimizer(model: Transformer, settings: Settings) -> optax.GradientTransformationExtraArgs:
    """Clip by global norm; the rule of `optimizer.name`; weight decay; the learning rate.

    `update` takes `counts`, as of `guard.guarded`.

    - "adamw": Loshchilov & Hutter 2019.
    - "adafactor": of matrices it keeps sums of rows and columns, not each square (Shazeer & Stern 2018). Learning rates
      are relative to the root mean square of a parameter; decay is multiplied by them, as everywhere here.
    - "lion": the sign of a mix of momentum and gradient (Chen et al. 2023).
    - "muon": momentum of which all singular values are made one (Jordan 2024), for every matrix that maps features to
      features, that of each layer and expert by itself and heads side by side; AdamW for tables of the vocabulary,
      routers, norms and the rest. Updates are as large as AdamW's, so its learning rates and decays serve.

    It computes in float32 on the device, whatever the moments are kept in and wherever they rest.

    Raises:
      SettingsError: a group holds no parameter.
    """
    o, boxes = settings.optimizer, initial.abstract_params(model)
    parts = [optax.clip_by_global_norm(o.clip_norm) if math.isfinite(o.clip_norm) else optax.identity()]
    parts += [_rule(o, boxes), *_decays(o, boxes), *_factors(o, boxes)]
    optimizer = guarded(optax.chain(*parts, optax.scale_by_learning_rate(learning_rate(o, settings.train.steps))))
    return _kept(optimizer, o) if (o.moments_dtype, o.moments_memory) != ("float32", "device") else optimizer


def _rule(o: Optimizer, boxes: dict) -> optax.GradientTransformation:
    """From clipped gradients to updates of size one, or as large as a parameter, before decay and learning rate."""
    match o.name:
        case "adamw":
            return optax.scale_by_adam(o.b1, o.b2, o.eps)
        case "lion":
            return optax.scale_by_lion(o.b1, o.b2)
        case "adafactor":
            momentum = optax.ema(o.b1, debias=False) if o.b1 else optax.identity()
            scaled = optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms()
            return optax.chain(*scaled, momentum)
    labels = _each(lambda box: "muon" if matrix_axes(box) else "adam", boxes)
    # What is Adam's is left out of what Muon sees.
    sides = _each(lambda box: matrix_axes(box) or optax.MaskedNode(), boxes)
    sizes = _each(lambda box: MUON_RMS * math.sqrt(max(_sides(box))) if matrix_axes(box) else optax.MaskedNode(), boxes)
    resized = optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, sizes))
    orthogonal = optax.chain(scale_by_muon(beta=o.b1, weight_dimension_numbers=lambda _: sides), resized)
    return optax.partition({"muon": orthogonal, "adam": optax.scale_by_adam(o.b1, o.b2, o.eps)}, labels)


def _sides(box: Named) -> tuple[int, int]:
    """Inputs and outputs of a parameter's matrices."""
    return tuple(math.prod(box.value.shape[axis] for axis in axes) for axes in matrix_axes(box))


def matrix_axes(box: Named) -> MuonDimensionNumbers | None:
    """Which axes of a parameter are the inputs and which the outputs of its matrices; None if it is none to Muon."""
    count = len(box.names)
    inputs = tuple(count + axis for axis in box.summed)
    outputs = tuple(i for i in range(count) if i not in inputs and box.names[i] not in STACKED)
    fits = decays(box.names) and ax.VOCAB not in box.names and inputs and outputs
    return MuonDimensionNumbers(inputs, outputs) if fits else None


def _each(function: Callable[[Named], object], boxes: dict) -> dict:
    return jax.tree.map(function, boxes, is_leaf=initial.is_named)


def group_of(names: tuple[str, ...], o: Optimizer) -> int | None:
    """Which of `optimizer.groups` a parameter is of."""
    return next((i for i, group in enumerate(o.groups) if not {*group.axes}.isdisjoint(names)), None)


def weight_decays(model: Transformer, o: Optimizer) -> dict:
    """The decay of each parameter, 0 for those that have none.

    Raises:
      SettingsError: a group holds no parameter.
    """
    return _weight_decays(o, initial.abstract_params(model))


def _weight_decays(o: Optimizer, boxes: dict) -> dict:
    found = {group_of(box.names, o) for box in jax.tree.leaves(boxes, is_leaf=initial.is_named)}
    for i, group in enumerate(o.groups):
        remedy = "no parameter is of it: the model has no such axis, or groups before this one took all; leave it out"
        check(i in found, f"optimizer.groups[{i}].axes", group.axes, remedy)

    def of(box: Named) -> float:
        group = group_of(box.names, o)
        own = None if group is None else o.groups[group].weight_decay
        return (o.weight_decay if own is None else own) if decays(box.names) else 0.0

    return _each(of, boxes)


def _decays(o: Optimizer, boxes: dict) -> list[optax.GradientTransformation]:
    rates = _weight_decays(o, boxes)
    return [
        optax.add_decayed_weights(rate, jax.tree.map(lambda own, rate=rate: own == rate, rates))
        for rate in sorted({*jax.tree.leaves(rates)} - {0.0})
    ]


def _factors(o: Optimizer, boxes: dict) -> list[optax.GradientTransformation]:
    return [
        optax.masked(optax.scale(group.lr), _each(lambda box, i=i: group_of(box.names, o) == i, boxes))
        for i, group in enumerate(o.groups)
        if group.lr != 1
    ]


def _kept(inner: optax.GradientTransformationExtraArgs, o: Optimizer) -> optax.GradientTransformationExtraArgs:
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

    def update(grads: dict, state: optax.OptState, params: dict, **more: jax.Array) -> tuple[dict, optax.OptState]:
        updates, state = inner.update(grads, on_moments(take_up, state), params, **more)
        return updates, on_moments(put_down, state)

    return optax.GradientTransformationExtraArgs(init, update)
