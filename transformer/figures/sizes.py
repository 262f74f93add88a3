"""Numbers as people read them."""


def binary(count: float) -> str:
    """Bytes with a binary prefix: 4 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def gib(count: float) -> str:
    """Bytes in GiB, to compare with others on one axis: 1,224 GiB."""
    count /= 2**30
    return f"{count:,.0f} GiB" if count >= 100 else f"{count:.3g} GiB"
