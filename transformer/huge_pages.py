"""Huge pages for what a training step on a CPU allocates.

XLA:CPU takes the memory of a step anew each time, and Linux clears it page by page as it is first touched. In pages of
4 KiB that is a tenth of the step (docs/performance.md). glibc asks for pages of 2 MiB if its environment says so before
the process starts (the GNU C Library manual, "Memory Allocation Tunables").
"""

import contextlib
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "GLIBC_TUNABLES"
TUNABLE = "glibc.malloc.hugetlb=1"
GLIBC = (2, 35)  # the first that has it

# Set in the second process: there is no third, even where something takes the other variable away.
BEGUN = "TRANSFORMER_BEGUN_AGAIN"
# Options of Python that take no further word; -c and -m are not among them.
FLAGS = re.compile("-[bBdEiIOPqsSuvx]+")

# Devices of TPUs and GPUs: steps that run there allocate little here.
ACCELERATORS = ("dev/accel*", "dev/vfio/[0-9]*", "dev/nvidia[0-9]*")


def advised(environ: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """The variable to start a training process with; nothing where huge pages can't be had, aren't needed or were set.

    Args:
      root: of the machine's file system.
    """
    library, version = platform.libc_ver()
    if library != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < GLIBC or VARIABLE in environ:
        return {}
    accelerated = any(next(root.glob(pattern), None) for pattern in ACCELERATORS)
    if accelerated and environ.get("JAX_PLATFORMS") != "cpu":
        return {}
    try:
        policy = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return {}
    # Of "always [madvise] never", the one in force. Where it is "always", nobody has to ask.
    return {VARIABLE: TUNABLE} if "[madvise]" in policy else {}


def begin_again() -> None:
    """Replaces the process by the same command under `advised`, before it has done anything else.

    Only the plain command `python SCRIPT …`: a notebook, a debugger or a pipe that the script is read from would be
    lost. Where it can't be done, the program goes on as it is.
    """
    before = len(sys.orig_argv) - len(sys.argv)
    plain = all(FLAGS.fullmatch(word) for word in sys.orig_argv[1:before]) and Path(sys.argv[0]).is_file()
    if not plain or sys.orig_argv[before:] != sys.argv or BEGUN in os.environ or not sys.executable:
        return
    if added := advised(os.environ):
        with contextlib.suppress(OSError):
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | added | {BEGUN: "1"})
