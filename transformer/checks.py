"""What all settings share: how it is said what is wrong with one, and kinds of numbers and memory."""

from typing import Any, Literal

DType = Literal["float32", "bfloat16"]
# What JAX calls memory of the host that devices can read and write.
HOST_MEMORY = "pinned_host"


class SettingsError(ValueError):
    """A setting can't be used; the message names the field, its value and the remedy."""


def check(condition: bool, name: str, value: Any, remedy: str) -> None:
    """Raises `SettingsError` naming the field, the value and the remedy unless `condition` holds."""
    if not condition:
        raise SettingsError(f"{name}={value!r}: {remedy}")
