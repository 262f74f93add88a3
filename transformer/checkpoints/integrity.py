"""Whether what is read from a checkpoint is what was saved, and why it could not be saved.

A seal is saved with the arrays: a checksum of each, taken where it lay, and digests of the texts. It is compared with
what was restored, so that it also vouches for all that lies between the devices and the disk. Orbax verifies its own
tables only: a bit that flips in the file of an array comes back as another number.
"""

import errno
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from transformer.ops.checksum import checksums

_checksums = jax.jit(checksums)
FULL = {errno.ENOSPC: "no space left on device", errno.EDQUOT: "disk quota exceeded", errno.EFBIG: "file too large"}


class DamagedError(ValueError):
    """A checkpoint can't be read or isn't what was saved."""


def seal(state: Any, texts: Mapping[str, Any]) -> dict[str, Any]:
    """What identifies the arrays of `state`, wherever their parts lie, and the `texts` (plain JSON)."""
    return {"arrays": sums(state), "texts": {name: _digest(text) for name, text in texts.items()}}


def sums(tree: Any) -> dict[str, str]:
    """dtype and checksum of every leaf; waits for the devices."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    sums = jax.device_get(_checksums(tree)).tolist()
    return {name: f"{x.dtype}:{value:08x}" for name, (_, x), value in zip(names, leaves, sums, strict=True)}


def _digest(text: Any) -> str:
    return hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()


@contextmanager
def _damage(what: Path) -> Iterator[None]:
    """Whatever a reader makes of damaged bytes, it is damage."""
    try:
        yield
    except DamagedError:
        raise
    except Exception as error:
        raise DamagedError(f"{what.name}: {type(error).__name__}: {str(error).strip()[:300]}") from error


def read_texts(folder: Path, names: Sequence[str]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The seal of a checkpoint, and its texts of these names. None for the seal of one that was saved without.

    Raises:
      DamagedError: unreadable, or not what was saved.
    """

    def text(name: str) -> Any:
        with _damage(folder / name):
            return json.loads((folder / name / "metadata").read_text())

    seal = text("checksums") if (folder / "checksums").is_dir() else None
    texts = {name: text(name) for name in names}
    for name, found in texts.items():
        with _damage(folder / "checksums"):
            if seal is not None and seal["texts"][name] != _digest(found):
                raise DamagedError(f"{name}: differs from what was saved")
    return seal, texts


def read_arrays(folder: Path, like: Any, partial: bool = False) -> Any:
    """The arrays of a checkpoint, of the shapes, dtypes and shardings of `like`; only those in `like` if `partial`.

    No process waits for another in here, so that one that finds damage can say so.

    Raises:
      DamagedError: unreadable.
    """
    with _damage(folder / "state"):
        args = ocp.args.PyTreeRestore(
            item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like), partial_restore=partial
        )
        hook = sys.excepthook
        sys.excepthook = functools.partial(_but_late_readers, hook)  # stays, where this fails
        found = ocp.PyTreeCheckpointHandler().restore(epath.Path(folder / "state"), args=args)
        sys.excepthook = hook
        return found


def _but_late_readers(hook: Callable, kind: type, value: BaseException, trace: Any) -> None:
    """When one read fails, TensorStore's others find the event loop gone, and each would print a traceback of it."""
    if not (kind is RuntimeError and str(value) == "Event loop is closed"):
        hook(kind, value, trace)


def verify(found: Mapping[str, str], seal: Mapping[str, Any]) -> None:
    """Raises `DamagedError` unless arrays with the sums `found` are what was sealed."""
    with _damage(Path("checksums")):
        for name, value in found.items():
            saved = seal["arrays"][name]
            # A dtype other than the saved one was asked for: the numbers were rounded on the way.
            if value != saved and value.partition(":")[0] == saved.partition(":")[0]:
                raise DamagedError(f"{name}: differs from what was saved")


def no_room(error: BaseException | None) -> str | None:
    """Why there was no room to write, if that is what an error (or what caused it) says."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return FULL[error.errno]
        for words in FULL.values():
            if words in str(error).lower():
                return words
        error = error.__cause__ or error.__context__
    return None


__all__ = ["DamagedError", "no_room", "read_arrays", "read_texts", "seal", "sums", "verify"]
