"""Who takes part in a run: what flags, variables and launchers say, and how they are refused where they disagree."""

import jax
import numpy as np
import pytest

from transformer import distributed
from transformer.distributed import Cluster, DistributedError, read_cluster

ADDRESS = "10.0.0.2:8476"
OWN = {"JAX_COORDINATOR_ADDRESS": ADDRESS, "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
SLURM = {"SLURM_NTASKS": "8", "SLURM_PROCID": "5"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}


@pytest.mark.parametrize(
    ("flags", "environ", "want"),
    [
        ((None, None, None), {}, None),
        ((None, None, None), {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ((None, None, None), {"SLURM_NTASKS": "8"}, None),  # allocated, but not started by srun
        ((None, 1, None), SLURM, None),
        ((ADDRESS, 1, 0), {}, None),
        ((ADDRESS, 2, 1), {}, Cluster(ADDRESS, 2, 1)),
        ((None, None, None), OWN, Cluster(ADDRESS, 4, 3)),
        ((ADDRESS, None, None), OWN, Cluster(ADDRESS, 4, 3)),
        ((None, None, 3), OWN, Cluster(ADDRESS, 4, 3)),
        ((None, None, None), SLURM, Cluster(None, 8, 5, "Slurm")),
        ((ADDRESS, 8, None), SLURM, Cluster(ADDRESS, 8, 5, "Slurm")),
        ((ADDRESS, None, None), OPEN_MPI, Cluster(ADDRESS, 2, 0, "Open MPI")),
    ],
)
def test_flags_variables_and_launchers_say_who_takes_part(flags, environ, want):
    assert read_cluster(*flags, environ) == want


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        ((ADDRESS, None, None), {}, ["--num-processes and --process-id: missing", "or none for one process"]),
        ((None, 2, 0), {}, ["--coordinator: missing", "--num-processes, --process-id is given"]),
        ((None, None, None), {"JAX_PROCESS_ID": "0"}, ["--coordinator and --num-processes", "JAX_PROCESS_ID"]),
        ((ADDRESS, 2, 2), {}, ["--process-id=2", "--num-processes=2", "from 0"]),
        ((ADDRESS, 2, -1), {}, ["--process-id=-1", "at least 0"]),
        ((ADDRESS, 0, 0), {}, ["--num-processes=0", "at least 1"]),
        ((ADDRESS, 2, None), {"JAX_PROCESS_ID": "one"}, ["JAX_PROCESS_ID=one", "whole number"]),
        (("10.0.0.2", 2, 0), {}, ["--coordinator=10.0.0.2", "HOST:PORT"]),
        ((":1234", 2, 0), {}, ["--coordinator=:1234", "HOST:PORT"]),
        ((None, 4, None), SLURM, ["--num-processes=4", "SLURM_NTASKS=8", "contradict"]),
        ((None, None, 1), OWN, ["--process-id=1", "JAX_PROCESS_ID=3", "contradict"]),
        ((None, None, None), {**OWN, **SLURM}, ["JAX_NUM_PROCESSES=4", "SLURM_NTASKS=8", "contradict"]),
        ((None, None, None), {**OPEN_MPI, **SLURM}, ["SLURM_NTASKS=8", "OMPI_COMM_WORLD_SIZE=2", "contradict"]),
    ],
)
def test_contradictions_and_gaps_are_named(flags, environ, words):
    with pytest.raises(DistributedError) as caught:
        read_cluster(*flags, environ)
    assert all(word in str(caught.value) for word in words), caught.value


def test_all_get_past_a_block_or_none(monkeypatch):
    """Two processes, of which the other one's side is played."""
    told = []

    def gather(values):
        told.append(int(values))
        return np.stack([values, other])

    monkeypatch.setattr(distributed, "_gather", gather)
    other = np.zeros((), np.int32)
    with distributed.together("reading"):
        pass
    with pytest.raises(KeyError), distributed.together("reading"):
        raise KeyError("mine")
    other = np.ones((), np.int32)
    with pytest.raises(DistributedError, match="process 1 failed while reading"), distributed.together("reading"):
        pass
    assert told == [0, 1, 0]


def test_another_config_in_another_process_is_refused(monkeypatch):
    monkeypatch.setattr(
        distributed, "_gather", lambda values: np.stack([values, values + (np.arange(len(values)) == 1)])
    )
    with pytest.raises(DistributedError, match="the config: process 1 has another than process 0"):
        distributed.check_same(b"abc", "the config")
    monkeypatch.setattr(distributed, "_gather", lambda values: np.stack([values, values]))
    distributed.check_same(b"abc", "the config")


def test_only_errors_of_what_joins_processes_mean_that_one_is_gone():
    closed = "UNKNOWN: Gloo AllGather failed: Connection closed by peer"
    late = TimeoutError("a barrier")
    late.__cause__ = jax.errors.JaxRuntimeError(closed)  # as Orbax tells it
    for error in (jax.errors.JaxRuntimeError(closed + "\nmore"), ValueError(closed), late):
        assert f"another process is gone: {closed}. Start" in distributed.explain_loss(error)
    for error in (OSError("no such file"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")):
        assert distributed.explain_loss(error) is None
