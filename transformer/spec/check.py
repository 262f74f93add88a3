"""How a spec refuses what contradicts itself."""


class SpecError(ValueError):
    """A spec contradicts itself; the message names the field, its value and the remedy."""


def require(condition: bool, message: str) -> None:
    """Raises `SpecError` with the message unless the condition holds."""
    if not condition:
        raise SpecError(message)
