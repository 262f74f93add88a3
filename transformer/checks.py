"""What is wrong with a setting, said in one way: the field, its value, the remedy."""

from typing import Any


class SettingsError(ValueError):
    """A setting can't be used; the message names the field, its value and the remedy."""


def check(condition: bool, name: str, value: Any, remedy: str) -> None:
    """Raises `SettingsError` naming the field, the value and the remedy unless `condition` holds."""
    if not condition:
        raise SettingsError(f"{name}={value!r}: {remedy}")
