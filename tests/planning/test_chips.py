"""The table of chips, and what links make of it."""

import pytest

from transformer.kernels import blocks
from transformer.planning import chips, links, topology
from transformer.planning.report import Exchange
from transformer.settings import SettingsError

TABLE = chips.CHIPS.values()


@pytest.mark.parametrize("chip", TABLE, ids=list(chips.CHIPS))
def test_the_compiler_offers_a_device_no_more_than_it_has(chip):
    """v5p's documentation rounds its capacity down: the compiler has a little more."""
    assert 0.95 * chip.capacity <= chip.offered * chip.devices <= 1.01 * chip.capacity
    assert chip.int8 is None or chip.int8 >= chip.flops
    assert chip.device_flops * chip.devices == chip.flops


def test_kinds_are_those_of_the_kernels():
    """Both tables are of the same devices."""
    assert {chip.kind for chip in TABLE} == set(blocks.CHIPS)
    assert all(chips.of_kind(chip.kind) is chip for chip in TABLE)


def test_unknown_names_are_told():
    with pytest.raises(SettingsError, match=r"device kind 'TPU v99': unknown; use one of TPU v4"):
        chips.of_kind("TPU v99")
    with pytest.raises(SettingsError, match=r"topology='v9:2x2': unknown chip; use one of v4, v5e"):
        chips.of_topology("v9:2x2")
    for shape in ("4x4", "4x4x", "4x0x4", ""):
        with pytest.raises(SettingsError, match="v5p has 3 dimensions; name their sizes, such as v5p:4x4x4"):
            chips.of_topology(f"v5p:{shape}")


def took(name: str, mesh: dict[str, int], axes: tuple[str, ...], kind: str = "all-gather", sent: float = 1e9) -> float:
    exchange = Exchange(kind=kind, axes=axes, purpose="parameters", overlapped=False, times=1, operand=sent, sent=sent)
    return links.seconds(topology.parse(name), mesh, exchange)


def test_rings_of_all_dimensions_carry_both_ways():
    """1 GB over three rings of 100 GB/s each way; over one of them, and over lines that end."""
    whole = {"fsdp": 64}
    assert took("v5p:4x4x4", whole, ("fsdp",)) == pytest.approx(1e9 / 600e9)
    cut = {"data": 4, "fsdp": 16}
    assert took("v5p:4x4x4", cut, ("fsdp",)) == pytest.approx(1e9 / 400e9)
    assert took("v5p:4x4x4", cut, ("data",)) == pytest.approx(1e9 / 200e9)
    assert took("v5p:4x4x4", cut, ("data", "fsdp")) == pytest.approx(1e9 / 600e9)
    assert took("v5p:2x2x4", {"fsdp": 16}, ("fsdp",)) == pytest.approx(1e9 / 300e9)
    assert took("v5e:16x16", {"fsdp": 256}, ("fsdp",)) == pytest.approx(1e9 / 200e9)
    assert took("v5e:4x4", {"fsdp": 16}, ("fsdp",)) == pytest.approx(1e9 / 100e9)
    assert took("v5p:4x4x4", whole, ("tensor",)) == 0


def test_all_to_all_waits_for_the_bytes_that_go_past():
    """On a ring of 4, half of a device's bytes go a quarter of the way: 4/8 of them pass each link."""
    mesh = {"data": 16, "expert": 4}
    got = took("v5p:4x4x4", mesh, ("expert",), "all-to-all", 3e9)  # of an operand of 4e9
    assert got == pytest.approx(4e9 * 4 / 8 / 100e9)
    line = took("v5p:2x2x4", {"data": 4, "expert": 4}, ("expert",), "all-to-all", 3e9)
    assert line >= got


def test_slices_are_joined_by_a_slower_network():
    mesh = {"slice": 2, "fsdp": 64}
    assert took("2*v5p:4x4x4", mesh, ("slice",)) == pytest.approx(1e9 / (50e9 / 8))
    with pytest.raises(SettingsError, match="no bandwidth of v4's data centre network is published; use one slice"):
        took("2*v4:4x4x4", mesh, ("slice",))
