"""Many processes, one run: how they find each other, agree, and leave together.

A run of several hosts is the same program once a host. `join` reads who is there from flags, from the environment or
from the launcher, and hands it to `jax.distributed`; everything below it sees one mesh of all devices.
"""

import itertools
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

log = logging.getLogger("transformer")

# Where (the address of process 0, the number of processes, this process's number) may be said. The first two sources
# say all of it. Launchers that start the processes say the rest by means of their own, which `jax.distributed` knows.
FLAGS = ("--coordinator", "--num-processes", "--process-id")
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
LAUNCHERS = {"Slurm": ("SLURM_NTASKS", "SLURM_PROCID"), "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")}
GOOGLE = "0x1ae0"  # PCI vendor of TPUs

START_SECONDS = 300
HEARTBEAT_SECONDS = 60
MEET_SECONDS = 3600  # a large model compiles for long
LOST, ABSENT, HUNG = 1, 2, 3  # exit codes
# How errors of the runtime begin that a lost process may cause; others are of this process alone, as is a full memory.
LOSSES = ("UNKNOWN:", "INTERNAL:", "UNAVAILABLE:", "DEADLINE_EXCEEDED:", "ABORTED:", "CANCELLED:",
          "FAILED_PRECONDITION:")  # fmt: skip
_alone = False  # `join` found nobody
_meetings = itertools.count()  # the same in all processes


class DistributedError(ValueError):
    """The processes of a run can't find each other, or disagree; the message says what to change."""


@dataclass(frozen=True)
class Cluster:
    """Who takes part: the address "host:port" of process 0 (None: the launcher knows), how many, and who this is."""

    coordinator: str | None
    num_processes: int
    process_id: int
    launcher: str | None = None


def read_cluster(
    coordinator: str | None, num_processes: int | None, process_id: int | None, environ: Mapping[str, str]
) -> Cluster | None:
    """What flags (None: not given), variables and launchers say of the processes; None for one process alone.

    Raises:
      DistributedError: what they say is contradictory, incomplete or no number.
    """
    if num_processes == 1 and coordinator is None and not process_id:
        return None  # asked for, whatever the launcher says
    said: tuple[dict[str, str], ...] = ({}, {}, {})
    for place, flag, value in zip(said, FLAGS, (coordinator, num_processes, process_id), strict=True):
        place |= {} if value is None else {flag: str(value)}
    for place, variable in zip(said, VARIABLES, strict=True):
        place |= {variable: environ[variable]} if variable in environ else {}
    launcher = None
    for name, variables in LAUNCHERS.items():
        count, rank = (environ.get(variable) for variable in variables)
        if count and rank and count != "1":  # a batch script is not yet one of its tasks; one task is no cluster
            launcher = name
            said[1][variables[0]], said[2][variables[1]] = count, rank
    given = [name for place in said for name in place]
    if not given:
        return None
    where, count, number = (_agreed(place) for place in said)
    missing = [flag for flag, value in zip(FLAGS, (where or launcher, count, number), strict=True) if value is None]
    if missing:
        raise DistributedError(
            f"{' and '.join(missing)}: missing, though {', '.join(given)} is given; give all three "
            f"({', '.join(FLAGS)}, or {', '.join(VARIABLES)}), or none for one process"
        )
    count, number = _number(said[1], count, least=1), _number(said[2], number, least=0)
    if number >= count:
        raise DistributedError(f"{_words(said[2])}: must be below {_words(said[1])}; processes count from 0")
    if where is not None and not (where.rpartition(":")[0] and where.rpartition(":")[2].isdecimal()):
        raise DistributedError(f"{_words(said[0])}: expected HOST:PORT of process 0, such as 10.0.0.2:8476")
    return Cluster(where, count, number, launcher) if count > 1 else None


def _agreed(place: dict[str, str]) -> str | None:
    if len(set(place.values())) > 1:
        raise DistributedError(f"{' but '.join(f'{k}={v}' for k, v in place.items())}: they contradict; leave one out")
    return next(iter(place.values()), None)


def _words(place: dict[str, str]) -> str:
    name, value = next(iter(place.items()))
    return f"{name}={value}"


def _number(place: dict[str, str], text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise DistributedError(f"{_words(place)}: expected a whole number, at least {least}")
    return int(text)


def join(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    start_seconds: int = START_SECONDS,
    heartbeat_seconds: int = HEARTBEAT_SECONDS,
) -> None:
    """Meets the other processes of the run; nothing for one alone. Call before anything asks for devices.

    On a TPU pod slice nothing needs to be said: `jax.distributed` asks the TPU's metadata.

    Args:
      start_seconds: how long to wait for all to come; then this process ends with a message and exit code 2.
      heartbeat_seconds: a process that wasn't heard of for so long is dead, and the others end.

    Raises:
      DistributedError: contradictory or missing values, or the others can't be met.
    """
    cluster = read_cluster(coordinator, num_processes, process_id, os.environ)
    if cluster is None and not _on_tpu():
        return
    # JAX aborts the process when its own time is up.
    options = dict(initialization_timeout=2 * start_seconds + 60, heartbeat_timeout_seconds=heartbeat_seconds)
    who, where = "this host", ""
    if cluster is not None:
        who = f"process {cluster.process_id} of {cluster.num_processes}"
        where = f" at {cluster.coordinator}" if cluster.coordinator else ""
        options |= dict(num_processes=cluster.num_processes, process_id=cluster.process_id)
        options |= dict(coordinator_address=cluster.coordinator)
        if cluster.launcher is None:
            options["cluster_detection_method"] = "deactivate"  # all is said

    def told(why: str) -> str:
        return (
            f"{who} can't meet the others{where}: {why}. Start all processes within {start_seconds} s of each other, "
            "with the same coordinator (an address of process 0 with a free port) and number of processes"
        )

    late = threading.Timer(start_seconds, _end, (told("not all have come"),))
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(**options)
    except (ValueError, RuntimeError) as error:
        global _alone
        _alone = True  # JAX counts as initialized from the first try
        if cluster is None and "should be defined" in str(error):
            return  # a TPU host that belongs to no slice
        raise DistributedError(told(first_line(error))) from None
    finally:
        late.cancel()


def _end(why: str) -> None:
    print(f"error: {why}", file=sys.stderr, flush=True)
    os._exit(ABSENT)


def _on_tpu() -> bool:
    """Whether JAX will use TPUs that are attached to this host."""
    platforms = os.environ.get("JAX_PLATFORMS", "tpu")
    if "tpu" not in platforms.split(","):
        return False
    return any(file.read_text().strip() == GOOGLE for file in Path("/sys/bus/pci/devices").glob("*/vendor"))


def joined() -> bool:
    """Whether this process is one of several, or could have been."""
    return jax.distributed.is_initialized() and not _alone


def label() -> str:
    """ " (process 1 of 4)" where there are several, else nothing."""
    return f" (process {jax.process_index()} of {jax.process_count()})" if joined() else ""


def first_line(error: BaseException) -> str:
    """What an error says, short."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def explain_loss(error: BaseException) -> str | None:
    """What an error most likely means where there are several processes; None if it isn't of what joins them.

    The runtime tells of a lost connection as one of several kinds of error, and Orbax as one that is caused by it.
    """
    while not str(error).startswith(LOSSES):
        error = error.__cause__ or error.__context__
        if error is None:
            return None
    return (
        f"the run can't go on, most likely since another process is gone: {first_line(error)}. Start all processes "
        "again: the same command resumes from the newest checkpoint"
    )


def from_first(value: int) -> int:
    """`value` (of 32 bits) as process 0 has it."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def _gather(values: np.ndarray) -> np.ndarray:
    """[P, …]: `values` of every process."""
    if jax.process_count() == 1:
        return values[None]
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(values)).reshape(-1, *values.shape)


@contextmanager
def together(what: str) -> Iterator[None]:
    """All processes get past the block or none: what is raised in one is told by all.

    Raises:
      DistributedError: another process failed.
    """
    try:
        yield
    except Exception:
        _gather(np.ones((), np.int32))
        raise
    failed = np.flatnonzero(_gather(np.zeros((), np.int32)))
    if failed.size:
        raise DistributedError(f"process {failed[0]} failed while {what}; what it printed says why")


def meet(where: str) -> None:
    """Waits until all processes have come here; no device takes part, and none's patience ends.

    Raises:
      JaxRuntimeError: another process is gone.
    """
    if jax.process_count() > 1:
        barrier(f"{where} {next(_meetings)}", timeout_ms=1000 * MEET_SECONDS)


def barrier(key: str, timeout_ms: int) -> None:
    """Waits until a thread of every process is here; no device takes part, so that any thread may.

    Raises:
      JaxRuntimeError: another process is gone or doesn't come.
    """
    from orbax.checkpoint import multihost

    multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def check_same(digest: bytes, what: str) -> None:
    """Raises `DistributedError` unless all processes bring the same digest of `what`."""
    found = _gather(np.frombuffer(digest, np.uint8).astype(np.int32))
    other = np.flatnonzero((found != found[0]).any(axis=1))
    if other.size:
        raise DistributedError(f"{what}: process {other[0]} has another than process 0; start all with the same")


def leave(code: int) -> int:
    """Ends this process's part; gives `code` back where it may simply return.

    A process that failed doesn't wait for the others, who wait for it: it is gone at once, and they notice.
    """
    if not jax.distributed.is_initialized() or (_alone and code == 0):
        return code
    if code == 0:
        try:
            jax.distributed.shutdown()
        except RuntimeError as error:
            print(f"error{label()}: the others left too early: {first_line(error)}", file=sys.stderr)
            code = LOST
        else:
            return code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


__all__ = [
    "HUNG", "LOST", "Cluster", "DistributedError", "barrier", "check_same", "explain_loss", "first_line",
    "from_first", "join", "joined", "label", "leave", "meet", "read_cluster", "together",
]  # fmt: skip
