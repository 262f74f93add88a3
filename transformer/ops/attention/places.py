"""Where the arrays of a call lie on a mesh, for bodies that run on each device by themselves."""

import functools
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from transformer import axes as ax
from transformer.ops.attention.call import Call, Extra, Where
from transformer.sharding import partition_spec


class Places(NamedTuple):
    """How the mesh in force splits queries, keys and values, the fields of rows, and sums of each query [B, N, T]."""

    queries: PartitionSpec
    keys: PartitionSpec
    rows: PartitionSpec
    totals: PartitionSpec

    @staticmethod
    def of(call: Call, q: Array, k: Array, where: Where) -> "Places":
        """Raises `ShardingError` if the mesh can't split the batch, the heads or the lengths."""
        mesh = jax.sharding.get_abstract_mesh()
        place = functools.partial(partition_spec, mesh=mesh, rules=call.rules, what="attention")
        features = ax.BATCH, ax.LENGTH, ax.ACT_HEADS, None
        queries, keys = place(features, q.shape), place(features, k.shape)
        rows = place(features[:2], where.q_positions.shape)
        return Places(queries, keys, rows, PartitionSpec(queries[0], queries[2], queries[1]))

    def extra(self, extra: Extra) -> Extra:
        """Of the learned terms that there are."""
        heads = self.queries[2]
        sinks, bias = PartitionSpec(heads), PartitionSpec(None, heads)
        return Extra(None if extra.sinks is None else sinks, None if extra.bias is None else bias)

    def table_gradient(self, extra: Extra) -> PartitionSpec | None:
        """Of the gradient of the table of biases in each row of the batch [B, N, R]."""
        return None if extra.bias is None else PartitionSpec(*self.totals[:2])
