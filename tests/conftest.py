"""Eight host devices stand in for a mesh, and compiled programs are shared by the workers of one run."""

import os
import tempfile

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update(
    "jax_compilation_cache_dir",
    os.environ.get("TRANSFORMER_TEST_CACHE", os.path.join(tempfile.gettempdir(), f"transformer-jax-{os.getuid()}")),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
