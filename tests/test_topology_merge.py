"""Several sources as one graph: what each would have shown, and which of them are one machine."""

from __future__ import annotations

from tokenring.topology.facts import Device, Facts, Link, Origin
from tokenring.topology.graph import merge
from tokenring.topology.tree import pcie_links
from tokenring.topology.verdict import Verdict, classify


def bus_id(number: int) -> str:
    return f"0000:{number + 1:02x}:00.0"


def tool(*numbers: int, links: bool = True, host: str | None = None) -> Facts:
    """What NVML says of these GPUs of a machine with a switch."""
    devices = tuple(Device(f"GPU{i}", "accelerator", i, bus_id(number)) for i, number in enumerate(numbers))
    found = [Link(a.id, b.id, "nvlink", 18) for i, a in enumerate(devices) for b in devices[i + 1 :]]
    return Facts("links", devices, tuple(found if links else ()), origin=Origin("NVML", host=host))


def tree(count: int, host: str | None = None) -> Facts:
    """The kernel's: each GPU below a host bridge of its own, of one NUMA node."""
    bridges = [Device(f"pci{i}", "host-bridge", parent="NUMA0") for i in range(count)]
    gpus = [Device(bus_id(i), "accelerator", bus_id=bus_id(i), parent=f"pci{i}") for i in range(count)]
    devices = (Device("NUMA0", "numa", numa_node=0), *bridges, *gpus)
    return Facts("pcie", devices, tuple(pcie_links(devices, host_bridges=True)), origin=Origin("sysfs", host=host))


def verdict_of(*facts: Facts) -> Verdict:
    return classify(merge(facts))


class TestWhatIsShown:
    """A source speaks of the accelerators that it names: a container's tools of those that it was given."""

    def test_a_tool_that_names_all(self) -> None:
        verdict = verdict_of(tool(0, 1, 2, 3), tree(4))
        assert (verdict.name, verdict.confidence) == ("switch", "high")

    def test_a_tool_that_names_one_of_four(self) -> None:
        verdict = verdict_of(tool(0), tree(4))
        assert (verdict.name, verdict.confidence) == ("pcie-host", "low")
        assert "the source shows PCIe only: faster links may exist" in verdict.evidence

    def test_a_tool_that_names_two_of_four(self) -> None:
        verdict = verdict_of(tool(0, 1), tree(4))
        assert verdict.confidence == "low"
        assert "2 of 4 accelerators are in the PCI tree only, and no tool names them" in verdict.evidence[-1]

    def test_a_tool_of_another_host(self) -> None:
        """What one host's tool would show says nothing of the other host, where it failed."""
        verdict = verdict_of(tool(0, 1, links=False, host="a"), tree(2, host="a"), tree(2, host="b"))
        inside = {host: (each.name, each.confidence) for host, each in verdict.inside}
        assert inside == {"a": ("pcie-host", "high"), "b": ("pcie-host", "low")}
