"""What every config page shares: the settings of a run, with their defaults."""

import dataclasses

from ml_collections import ConfigDict

from transformer.settings import Settings


def run(family: str, sizes: dict[str, dict], size: str, **groups: dict) -> ConfigDict:
    """A whole run: the model of that size, and every setting, with `groups` laid over the defaults."""
    if size not in sizes:
        raise ValueError(f"size {size!r} of {family}: unknown; use one of {', '.join(sizes)}")
    config = ConfigDict({"model": {"family": family, **sizes[size]}, **dataclasses.asdict(Settings())})
    config.update(groups)
    return config
