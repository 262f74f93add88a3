"""Faults that tests plant."""

import jax
import numpy as np


def with_bit_flipped(x: jax.Array, device: int) -> jax.Array:
    """`x` with the lowest bit of the last byte changed in one device's buffer."""
    parts = []
    for shard in x.addressable_shards:
        content = np.array(shard.data)
        if shard.device.id == device:
            content = np.frombuffer(content.tobytes()[:-1] + bytes([content.tobytes()[-1] ^ 1]), content.dtype)
            content = content.reshape(shard.data.shape)
        parts.append(jax.device_put(content, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)
