"""The families: each module here turns published dimensions into a spec. The files are the registry.

A family module has `Dims`, a frozen dataclass of the numbers that its published configs state, and
`spec(dims) -> Model`. A module whose name starts with an underscore is no family.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from transformer.settings import SettingsError, from_mapping
from transformer.spec import Model


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
    values = dict(model)
    if "family" not in values:
        raise SettingsError(f"model.family: required; use one of {', '.join(names())}")
    family = get(values.pop("family"))
    return family.spec(from_mapping(family.Dims, values, "model."))
