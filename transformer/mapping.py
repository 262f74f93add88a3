"""Frozen dataclasses from nested plain data: JSON, or what `ConfigDict.to_dict` gives. Unknown keys are refused."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from transformer.settings import SettingsError, check


def from_mapping[T](cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Builds the frozen dataclass `cls` from nested plain data; `path` prefixes names in messages.

    Raises:
      SettingsError: an unknown key, a missing field, or a value of the wrong type.
    """
    if not isinstance(values, Mapping):
        raise SettingsError(f"{path.rstrip('.') or cls.__name__}={values!r}: expected a group of fields")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"did you mean {path}{close[0]}?" if close else f"known: {', '.join(fields)}"
            raise SettingsError(f"{path}{key}={values[key]!r}: unknown field; {hint}")
    missing = [
        f"{path}{name}"
        for name, f in fields.items()
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise SettingsError(f"{', '.join(missing)}: required and not given; add it to the config")
    return cls(**{key: _coerce(hints[key], value, path + key) for key, value in values.items()})


def _coerce(hint: Any, value: Any, name: str) -> Any:
    """`value` as the annotated type `hint`, exactly: an int may stand for a float, a list for a tuple."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else from_mapping(hint, value, name + ".")
    if origin is Literal:
        check(value in args and type(value) in {type(a) for a in args}, name, value, f"use one of {list(args)}")
        return value
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(args, value, name)
    if origin is tuple:
        check(isinstance(value, list | tuple), name, value, f"expected a list; {_list_of(args[0], value)}")
        return tuple(_coerce(args[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        check(isinstance(value, Mapping), name, value, "expected a group of fields")
        return {key: _coerce(args[1], item, f"{name}.{key}") for key, item in value.items()}
    if hint is float and (type(value) is int or value == "inf"):
        return float(value)
    check(type(value) is hint, name, value, f"expected {hint.__name__}, got {type(value).__name__}")
    return value


def _list_of(item: Any, value: Any) -> str:
    """How to write one where `value` stands."""
    if dataclasses.is_dataclass(item):
        return f"write ({{'{dataclasses.fields(item)[0].name}': …}},) for one group of fields, its texts in quotes"
    return f'write ("{value}",) for one item'


def _coerce_union(args: tuple[Any, ...], value: Any, name: str) -> Any:
    if value is None and type(None) in args:
        return None
    errors = []
    for option in args:
        if option is not type(None):
            try:
                return _coerce(option, value, name)
            except SettingsError as error:
                errors.append(str(error))
    raise SettingsError("; or ".join(errors))
