"""The families: each module here turns published dimensions into a spec. The files are the registry.

A family module has `Dims`, a frozen dataclass of the numbers that its published configs state, and
`spec(dims) -> Model`. One with Hugging Face checkpoints has `MODEL_TYPES`, `from_hf(config) -> Dims`,
`to_hf(dims) -> dict` and `table(model) -> Table` too. A module whose name starts with an underscore is no family.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from transformer.mapping import from_mapping
from transformer.settings import SettingsError, check
from transformer.spec import Model, Origin, SpecError

# Dimensions that are divided by, or counted, in every family that has them.
POSITIVE = ("vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ff", "max_length")


def names() -> tuple[str, ...]:
    """Every family, found by listing this package."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")))


def get(name: str) -> ModuleType:
    """The module of a family.

    Raises:
      SettingsError: no such family; the message lists those there are.
    """
    if name not in names():
        raise SettingsError(f"model.family={name!r}: unknown; use one of {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}")


def build_spec(model: Mapping[str, Any]) -> Model:
    """The spec of a config's `model` group: its `family` and that family's dimensions.

    Raises:
      SettingsError: an unknown family or field, a missing one, or one of the wrong type.
      SpecError: dimensions that contradict each other.
    """
    if not isinstance(model, Mapping):
        raise SettingsError(f"model={model!r}: expected a group of fields, the family's name among them")
    values = dict(model)
    if "family" not in values:
        raise SettingsError(f"model.family: required; use one of {', '.join(names())}")
    name = values.pop("family")
    dims = from_mapping(get(name).Dims, values, "model.")
    for field in POSITIVE:
        value = getattr(dims, field, 1)
        check(value is None or value >= 1, f"model.{field}", value, "use at least 1")
    try:
        return make(name, dims)
    except SpecError as error:
        raise SpecError(f"model (family {name}): {error}") from None


def make(name: str, dims: Any) -> Model:
    """The spec of a family's dimensions, which remembers both."""
    return dataclasses.replace(get(name).spec(dims), origin=Origin(family=name, dims=dims))


def of_model_type(model_type: str) -> str:
    """The family that reads Hugging Face configs of a `model_type`.

    Raises:
      SettingsError: no family does.
    """
    types = {kind: name for name in names() for kind in getattr(get(name), "MODEL_TYPES", ())}
    if model_type not in types:
        raise SettingsError(
            f"config.json: model_type={model_type!r} is not known; use one of {', '.join(sorted(types))}"
        )
    return types[model_type]
