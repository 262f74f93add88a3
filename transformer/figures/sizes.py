"""Numbers as people read them."""


def binary(count: float) -> str:
    """Bytes with a binary prefix: 4 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
