"""Eight host devices stand in for a mesh, and the workers of one run share compiled programs."""

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

import jax
import pytest

jax.config.update("jax_compilation_cache_dir", os.environ["TRANSFORMER_TEST_CACHE"])
# A limit makes JAX lock the directory: without one a worker may read a program that another is still writing.
jax.config.update("jax_compilation_cache_max_size", 8 * 2**30)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _mappings() -> int:
    """Memory mappings of this process; 0 where the system doesn't tell."""
    try:
        with open("/proc/self/maps") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


@pytest.fixture(autouse=True)
def _room_for_programs():
    """Drops compiled programs before they use up the mappings that a process may have, at which XLA crashes."""
    yield
    if _mappings() > 20_000:
        jax.clear_caches()
        gc.collect()
