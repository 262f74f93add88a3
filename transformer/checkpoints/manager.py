"""Orbax's checkpoint manager, as runs of several processes need it."""

import sys
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from transformer import distributed


def _meet_unless_failed(*, key: str, timeout_ms: int) -> None:
    """Orbax's barrier, at which its threads meet those of other processes.

    Orbax wants to meet the others also when an error is on its way out of a save. But they wait elsewhere, for the end
    of that save, so that all would wait for as long as a save may take. Who has failed goes on to say so and leave.
    """
    if jax.process_count() > 1 and sys.exception() is None:
        distributed.barrier(key, timeout_ms)


class Manager(ocp.CheckpointManager):
    """Asynchronous saves of which `keep` are kept; who fails in one waits for nobody."""

    def __init__(self, folder: Path, keep: int):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(barrier_sync_fn=_meet_unless_failed),
        )
        super().__init__(folder, options=options)

    def reached_preemption(self, step: int) -> bool:
        """False: the training loop asks JAX, once a step. Orbax would ask again, and later, of steps long past,
        which makes the processes disagree on the step to stop at."""
        return False


__all__ = ["Manager"]
