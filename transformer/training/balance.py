"""Keeping experts evenly used: loss terms, and the correction that picks them.

A model hands out the `Load` of each of its layers in the collection `moe.COLLECTION`; here they are a flat dict by the
path of their layer, arrays of a stacked body with the repeats in front.
"""

import flax.traverse_util as trees
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer import spec
from transformer.ops import balance as ops
from transformer.ops.balance import Load
from transformer.settings import Balance, check

Loads = dict[str, Load]


def check_balance(model: spec.Model, settings: Balance) -> None:
    """Raises `SettingsError` if there is nothing in `model` that a setting could balance."""
    mixtures = [block.ffn for block in model.layers if isinstance(block.ffn, spec.MoE)]
    for name in ("auxiliary", "sequence", "z"):
        value = getattr(settings, name)
        check(not value or bool(mixtures), f"balance.{name}", value, "the model has no experts to balance; set it to 0")
    rate, has = settings.correction_rate, any(mixture.router.correction for mixture in mixtures)
    remedy = "no router of the model has a correction; set it to 0" + (", use balance.auxiliary" if mixtures else "")
    check(not rate or has, "balance.correction_rate", rate, remedy)


def loads(collection: dict) -> Loads:
    """The collection of a forward pass by layer, such as "decoder/body/block_0"."""
    return {"/".join(path[:-2]): load for path, load in trees.flatten_dict(collection).items()}


def shares(layers: Loads) -> dict[str, Float[Array, "*L E"]]:
    """Each expert's part of a layer's assignments."""
    return {name: ops.shares(load.picks) for name, load in layers.items()}


def penalty(settings: Balance, layers: Loads, shares: dict[str, Float[Array, "*L E"]]) -> Float[Array, ""]:
    """The balance losses summed over tokens and layers, each layer by itself."""
    total = jnp.zeros(())
    for name, load in layers.items():
        terms = (
            settings.auxiliary * ops.auxiliary(load, shares[name]) if settings.auxiliary else 0.0,
            settings.sequence * load.sequence if settings.sequence else 0.0,
            settings.z * load.z if settings.z else 0.0,
        )
        total = total + jnp.sum(sum(terms))
    return total


def correct(params: dict, layers: Loads, rate: float) -> dict:
    """The parameters with every router's correction moved against the load of the whole step."""
    flat = trees.flatten_dict(params, sep="/")
    for name, load in layers.items():
        key = f"{name}/ffn/router/correction"
        if key in flat:
            flat[key] = ops.corrected(flat[key], load.picks, rate)
    return trees.unflatten_dict(flat, sep="/")


def metrics(layers: Loads) -> dict[str, dict[str, jax.Array]]:
    """What to log of every layer."""
    return {name: ops.summary(load) for name, load in layers.items()}
