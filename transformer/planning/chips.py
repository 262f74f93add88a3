"""What a TPU chip offers, as published, and what its compiler makes of it.

Sources, by column of `CHIPS`:

- peaks, memory, its bandwidth, links and networks: the chips' pages in Google Cloud's documentation
  (https://docs.cloud.google.com/tpu/docs/v4, …/v5e, …/v5p-training, …/v6e, …/tpu7x), read in November 2026. A link's
  rate is the published bidirectional bandwidth of a chip over its ports, halved. Of v4: Jouppi et al. 2023
  (arXiv:2304.01433, table 4), six links of 50 GB/s; of v4's data centre network no figure is published. v5p's int8
  peak is the one in JAX's own table (jax/_src/tpu_info.py), since the page has none; v5e's network is 6.4 Tbit/s for
  the 256 chips of a pod.
- `offered`: what libtpu 0.0.50 says is available when a program needs more ("exceeds available HBM (15.75G)").
- `accelerator` and `counted`: the types of the same pages (v5p-128 has 128 TensorCores, v6e-32 has 32 chips). TPU7x is
  asked for by its topology; tpu7x-128 is what XPK calls 64 of its chips.
- `host_link`: "How to Scale Your Model" (https://jax-ml.github.io/scaling-book/tpus), for each chip; of TPU7x none.
- `clock`: of v4 from the same paper; v5e's and v5p's are those at which the FLOPs of the matrix units' cycles in
  compiled programs make the published peak. Of the others none is known.

A `Chip` counts what one chip has, but for `offered`; its `device_…` are of one of its devices: TPU7x has two.
"""

from dataclasses import dataclass

from transformer.settings import SettingsError

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One generation of TPU chips.

    Attributes:
      name: as topologies are named: "v5p" in "v5p:4x4x4".
      kind: `jax.Device.device_kind` of its devices.
      flops: peak of bfloat16 products, FLOP/s.
      int8: peak of int8 products, or None where none is published.
      capacity: published bytes of HBM.
      offered: bytes that the compiler has of them for a program, on one device.
      bandwidth: of HBM, bytes/s.
      dims: dimensions of the torus of a slice: each has a link in both of its directions.
      link: bytes/s that one link carries in one direction.
      network: bytes/s a chip has to the data centre's network, or None.
      host: chips of a host.
      host_link: bytes/s between a chip and its host's memory in one direction (PCIe), or None.
      row: size of a dimension at which its links go around.
      devices: JAX's devices of a chip.
      accelerator: what Cloud's accelerator types begin with: "v5litepod" in "v5litepod-16".
      counted: how many of what their number counts a chip has: 2 where they are TensorCores, 1 where they are chips.
      clock: Hz that turn `estimated_cycles` of compiled programs into seconds, or None.
    """

    name: str
    kind: str
    flops: float
    int8: float | None
    capacity: float
    offered: float
    bandwidth: float
    dims: int
    link: float
    network: float | None
    host: int
    host_link: float | None
    row: int
    devices: int
    accelerator: str
    counted: int
    clock: float | None

    @property
    def device_flops(self) -> float:
        """Peak of a device, FLOP/s."""
        return self.flops / self.devices

    @property
    def device_bandwidth(self) -> float:
        """HBM bandwidth of a device, bytes/s."""
        return self.bandwidth / self.devices

    @property
    def device_network(self) -> float | None:
        """Data centre network of a device, bytes/s."""
        return None if self.network is None else self.network / self.devices

    @property
    def device_host_link(self) -> float | None:
        """To the host's memory of a device, bytes/s in one direction."""
        return None if self.host_link is None else self.host_link / self.devices


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4", kind="TPU v4", flops=275e12, int8=275e12, capacity=32 * GIB, offered=31.75 * GIB,
            bandwidth=1228e9, dims=3, link=50e9, network=None, host=4, row=4, devices=1, clock=1.05e9,
            host_link=16e9, accelerator="v4", counted=2,
        ),
        Chip(
            name="v5e", kind="TPU v5 lite", flops=197e12, int8=393e12, capacity=16 * GIB, offered=15.75 * GIB,
            bandwidth=819e9, dims=2, link=50e9, network=6.4e12 / 8 / 256, host=8, row=16, devices=1, clock=1.5e9,
            host_link=16e9, accelerator="v5litepod", counted=1,
        ),
        Chip(
            name="v5p", kind="TPU v5", flops=459e12, int8=918e12, capacity=95 * GIB, offered=95.74 * GIB,
            bandwidth=2765e9, dims=3, link=100e9, network=50e9 / 8, host=4, row=4, devices=1, clock=1.75e9,
            host_link=16e9, accelerator="v5p", counted=2,
        ),
        Chip(
            name="v6e", kind="TPU v6 lite", flops=918e12, int8=1836e12, capacity=32 * GIB, offered=31.25 * GIB,
            bandwidth=1638e9, dims=2, link=100e9, network=100e9 / 8, host=8, row=16, devices=1, clock=None,
            host_link=32e9, accelerator="v6e", counted=1,
        ),
        Chip(
            name="tpu7x", kind="TPU7x", flops=2307e12, int8=None, capacity=192 * GIB, offered=94.75 * GIB,
            bandwidth=7380e9, dims=3, link=100e9, network=100e9 / 8, host=4, row=4, devices=2, clock=None,
            host_link=None, accelerator="tpu7x", counted=2,
        ),
    )
}  # fmt: skip


def of_kind(kind: str) -> Chip:
    """The chip of a `jax.Device.device_kind`.

    Raises:
      SettingsError: no known chip has devices of this kind.
    """
    for chip in CHIPS.values():
        if chip.kind == kind:
            return chip
    raise SettingsError(f"device kind {kind!r}: unknown; use one of {', '.join(c.kind for c in CHIPS.values())}")


def of_topology(name: str) -> tuple[Chip, tuple[int, ...]]:
    """The chip and the sizes of the dimensions of a slice that is named as "v5p:4x4x4" or "v5e:16x16".

    Raises:
      SettingsError: no such chip, or not the sizes of its torus.
    """
    prefix, _, shape = name.partition(":")
    kind, dash, _ = name.partition("-")
    if dash and kind in CHIPS:
        raise SettingsError(f"topology={name!r}: name a slice by the shape of its torus, such as {_example(kind)}")
    if prefix not in CHIPS:
        raise SettingsError(
            f"topology={name!r}: unknown chip; use one of {', '.join(CHIPS)}, such as {_example('v5p')}"
        )
    chip, words = CHIPS[prefix], shape.split("x")
    if len(words) != chip.dims or not all(word.isdigit() and int(word) for word in words):
        raise SettingsError(
            f"topology={name!r}: {prefix} has {chip.dims} dimensions; name their sizes, such as {_example(prefix)}"
        )
    return chip, tuple(int(word) for word in words)


def _example(name: str) -> str:
    return f"{name}:{'x'.join(['4'] * CHIPS[name].dims)}"
