"""From the rows that a process reads to arrays of the whole mesh."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer import sharding
from transformer.training.step import Batch


class Feed:
    """Which rows of a batch [B, T] this process's devices hold, and how those become global arrays.

    The mesh decides: where it splits batches over less than all processes, some hold the same rows.
    """

    def __init__(self, mesh: Mesh, batch_size: int, rules: str = "default"):
        self._place, self._batch_size = sharding.batch_sharding(mesh, rules), batch_size
        of_rows = NamedSharding(mesh, PartitionSpec(*self._place.spec[:1]))
        held = of_rows.addressable_devices_indices_map((batch_size,)).values()
        self.rows = np.unique(np.concatenate([np.arange(batch_size)[index] for index in held]))

    def put(self, batch: dict[str, np.ndarray]) -> Batch:
        """The global arrays [B, …] of which `batch` has the rows `self.rows`."""
        return {name: self._put(x) for name, x in batch.items()}

    def _put(self, x: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            wanted = range(self._batch_size)[index[0]]
            first = int(np.searchsorted(self.rows, wanted.start))
            return x[first : first + len(wanted), *index[1:]]

        return jax.make_array_from_callback((self._batch_size, *x.shape[1:]), self._place, part)
