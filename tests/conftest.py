"""Eight host devices stand in for a mesh, and tests of one worker share what they compile."""

import atexit
import os
import shutil
import tempfile

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tiny models spend their time in the compiler, half of it in LLVM's optimiser. What laws read off a compiled program
# (bytes, flops, collectives, loops) is XLA's, which optimises as ever. In the environment, for commands that tests run.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if "TRANSFORMER_TEST_CACHE" not in os.environ:
    # Made by the process that starts the workers, which inherit its name, and gone with it: a cache that outlives its
    # run may hold what a killed one half wrote.
    os.environ["TRANSFORMER_TEST_CACHE"] = tempfile.mkdtemp(prefix="transformer-jax-")
    atexit.register(shutil.rmtree, os.environ["TRANSFORMER_TEST_CACHE"], ignore_errors=True)

import gc
import itertools

import jax
import pytest

# For what is dropped below, and for functions that are jitted anew. A directory for each worker: in a shared one it
# may read what another is still writing, unless a limit makes JAX lock it, which then reads all of it at every write.
worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
jax.config.update("jax_compilation_cache_dir", os.path.join(os.environ["TRANSFORMER_TEST_CACHE"], worker))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# Tracing makes objects by the million that live on: to look through them as often as Python does by default takes a
# tenth of the time of tracing.
gc.set_threshold(50_000, 20, 50)


_tests = itertools.count()


def _mappings() -> int:
    """Memory mappings of this process; 0 where the system doesn't tell."""
    try:
        with open("/proc/self/maps") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Each worker begins with a run of neighbours: tests of one family share what a process has built and traced."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.fixture(autouse=True)
def _room_for_programs():
    """Drops compiled programs before they use up the mappings that a process may have, at which XLA crashes."""
    yield
    # A look takes 13 ms where there are many; a test makes hundreds at most, and there is room for 65,530.
    if next(_tests) % 16 == 0 and _mappings() > 30_000:
        jax.clear_caches()
        gc.collect()
