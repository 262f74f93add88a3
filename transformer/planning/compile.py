"""Programs through the TPU's own compiler, for slices that aren't there; nothing runs.

The compiler is libtpu, which `jax[tpu]` and this package's extra `plan` bring. A CPU is enough.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from transformer.planning import matmuls
from transformer.planning.report import Buffer
from transformer.settings import SettingsError

# Libtpu looks for a chip and its network unless it is told that there is none; several processes may use it so.
_QUIET = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0",
}  # fmt: skip
# What a compiled program needs is more than a device offers; other words for the same.
_TOO_MUCH = ("CompileTimeHbmOom", "exceeds available HBM", "Ran out of memory in memory space hbm")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program, as its compiler describes it; bytes are those of one device.

    Attributes:
      arguments: of what goes in, and stays: state and batch, or parameters and cache.
      temporary: of all that it allocates besides.
      peak: of what it holds at once. `temporary` is more than what is held beside the arguments: a step for v5e whose
        arguments and temporary were 18.2 GiB, and whose peak was 14.8, was compiled for the 15.75 that there are.
      busiest: of the buffers that are alive at once, when there are most, as the compiler counts them.
      host: of the host's memory that it uses for a device.
      cpu: seconds of processor time.
      program: FLOPs of the traced program's matrix products, on all devices (`matmuls`); None where that isn't known.
    """

    text: str
    arguments: int
    temporary: int
    peak: int
    busiest: int
    host: int
    program: int | None
    seconds: float
    cpu: float
    max_rss: int


class OutOfMemory(RuntimeError):
    """A program needs more than a device has.

    Attributes:
      needed, offered: bytes, as far as the compiler tells.
      largest: the biggest buffers of its plan, as far as it wrote one.
    """

    def __init__(self, message: str, needed: int | None, offered: int | None, largest: tuple[Buffer, ...] = ()):
        super().__init__(message)
        self.needed, self.offered, self.largest = needed, offered, largest


def stay_off_tpus() -> None:
    """Keeps JAX to the CPU; call it before anything asks for devices.

    A host with TPUs need not be one to plan for them, and one that is must not lose them to a plan.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")


def find_libtpu() -> str:
    """Version of the libtpu that will compile.

    Raises:
      SettingsError: it isn't installed.
    """
    installed = importlib.util.find_spec("libtpu") is not None
    # Set by the user, or by libtpu itself where it is installed.
    path = os.environ.get("TPU_LIBRARY_PATH")
    if path is None and not installed:
        raise SettingsError(
            "libtpu: not installed; `pip install 'transformer[plan]'` brings the TPU compiler, no TPU needed, "
            "and --no-compile plans by analysis alone"
        )
    own = installed and (path is None or "site-packages/libtpu/" in path)
    return importlib.metadata.version("libtpu") if own else path


def compile_program(
    make: Callable[[], Any],
    args: tuple,
    mesh: Mesh,
    trips: int | None = None,
    options: Mapping[str, str] | None = None,
) -> Compiled:
    """Compiles for the devices of a mesh.

    Args:
      make: gives a jitted function; called inside `jax.set_mesh`, where nothing can be computed.
      args: abstract, placed on the mesh.
      trips: as of `matmuls.matmul_flops`.
      options: further ones of the compiler.

    Raises:
      OutOfMemory: it doesn't fit.
      jax.errors.JaxRuntimeError: whatever else the compiler refuses.
    """
    start, before = time.perf_counter(), time.process_time()
    with jax.set_mesh(mesh):
        traced = make().trace(*args)
        lowered = traced.lower()
        try:
            compiled = lowered.compile(dict(options) if options else None)
        except jax.errors.JaxRuntimeError as error:
            if not any(words in str(error) for words in _TOO_MUCH):
                raise
            raise OutOfMemory(_first_line(error), *_sizes(str(error)), _largest(lowered)) from None
    seconds, cpu, memory = time.perf_counter() - start, time.process_time() - before, compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(
        text=compiled.as_text(),
        arguments=memory.argument_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        peak=max(memory.peak_memory_in_bytes, held),
        busiest=memory.peak_memory_in_bytes,
        host=memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
        program=_program(traced, trips),
        seconds=seconds,
        cpu=cpu,
        max_rss=max_rss(),
    )


def _program(traced: Any, trips: int | None) -> int | None:
    try:
        return matmuls.count(traced.jaxpr, trips)
    except ValueError:  # branches that differ
        return None


def max_rss() -> int:
    """Bytes of memory that this process held at most."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _sizes(message: str) -> tuple[int | None, int | None]:
    """Bytes needed and offered, of "… (25.58G) exceeds available HBM (15.75G)" or "Used 112.4G of 95.7G hbm"."""
    found = re.search(r"\(([\d.]+[KMGT]?)\) exceeds available HBM \(([\d.]+[KMGT]?)\)", message) or re.search(
        r"Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) hbm", message
    )
    return (_bytes(found[1]), _bytes(found[2])) if found else (None, None)


def _bytes(text: str) -> int:
    scale = 1024 ** ("KMGT".find(text[-1]) + 1)
    return round(float(text.rstrip("KMGT")) * scale)


def _largest(lowered: Any, count: int = 10) -> tuple[Buffer, ...]:
    """The biggest buffers of a program that doesn't fit, from what its compiler writes while it fails once more."""
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            lowered.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        texts = [path.read_text() for path in Path(folder).glob("*memory-usage-report*")]
    found = [buffer for text in texts for buffer in read_usage(text)]
    return tuple(sorted(found, key=lambda buffer: -buffer.bytes)[:count])


def read_usage(text: str) -> list[Buffer]:
    """Buffers in HBM of a memory-usage report: "… ; 8.00GiB; 0; 7; 7×bf16[524288,8192]", named by their shapes."""
    near = text.split("Memory Space:")
    hbm = near[1] if len(near) > 1 else text
    rows = re.findall(r"%\);\s*([\d.]+)([KMGT]?)i?B;\s*\d+;\s*\d+;\s*(.+)", hbm)
    return [Buffer(name=name.strip(), bytes=_bytes(size + unit)) for size, unit, name in rows]
