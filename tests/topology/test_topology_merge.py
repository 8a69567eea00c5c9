"""Several sources as one graph: what each would have shown, and which of them are one machine."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest

from tokenring.cli.main import main
from tokenring.topology.model.facts import Device, Facts, Link, Measurement, SourceOrigin
from tokenring.topology.model.graph import Graph, merge
from tokenring.topology.model.schema import from_json, to_json
from tokenring.topology.model.tree import pcie_links
from tokenring.topology.model.verdict import Verdict, classify


def bus_id(number: int) -> str:
    return f"0000:{number + 1:02x}:00.0"


def tool(*numbers: int, links: bool = True, host: str | None = None) -> Facts:
    """What NVML says of these GPUs of a machine with a switch."""
    devices = tuple(Device(f"GPU{i}", "accelerator", i, bus_id(number)) for i, number in enumerate(numbers))
    found = [Link(a.id, b.id, "nvlink", 18) for i, a in enumerate(devices) for b in devices[i + 1 :]]
    return Facts("links", devices, tuple(found if links else ()), origin=SourceOrigin("NVML", host=host))


def tree(count: int, host: str | None = None) -> Facts:
    """The kernel's: each GPU below a host bridge of its own, of one NUMA node."""
    bridges = [Device(f"pci{i}", "host-bridge", parent="NUMA0") for i in range(count)]
    gpus = [Device(bus_id(i), "accelerator", bus_id=bus_id(i), parent=f"pci{i}") for i in range(count)]
    devices = (Device("NUMA0", "numa", numa_node=0), *bridges, *gpus)
    return Facts(
        "pcie", devices, tuple(pcie_links(devices, host_bridges=True)), origin=SourceOrigin("sysfs", host=host)
    )


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


@pytest.mark.timeout(20)
def test_many_measurements() -> None:
    names = [f"GPU{i}" for i in range(128)]
    links = [Link(a, b, "nvlink", 1) for i, a in enumerate(names) for b in names[i + 1 :]]
    measured = [Measurement(a, b, 20.0) for a in names for b in names if a != b]
    devices = tuple(Device(name, "accelerator", i) for i, name in enumerate(names))
    graph = merge([Facts("links", devices, tuple(links), tuple(measured))])
    assert {edge.source for edge in graph.edges} == {"measured"}


DATA = Path(__file__).resolve().parents[1] / "data" / "topology"
TOPO, LINKS = ((DATA / name).read_text() for name in ("nvidia-switch.txt", "nvlink-s-switch.txt"))


class TestMachines:
    """Files of one format are of several machines, files of several formats of one."""

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for host in ("a", "b"):
            Path(host).mkdir()
            Path(host, "topo.txt").write_text(TOPO)
            Path(host, "links.txt").write_text(LINKS)

    def of(self, *files: str) -> Graph:
        """The graph of what is saved from these files, which is read again as it was."""
        out = StringIO()
        assert main(["topology", "--json", "--from", *files], out, StringIO(), StringIO()) == 0
        facts = from_json(out.getvalue())
        assert to_json(facts) == out.getvalue()
        return merge(facts)

    @pytest.mark.parametrize(
        "files",
        [
            ("a/topo.txt", "a/links.txt", "b/topo.txt", "b/links.txt"),
            ("a/topo.txt", "b/topo.txt", "a/links.txt", "b/links.txt"),
        ],
    )
    def test_two_tools_on_two_machines(self, files: tuple[str, ...]) -> None:
        graph = self.of(*files)
        assert graph.hosts == ("a/topo.txt", "b/topo.txt")
        assert len(graph.accelerators) == 16
        notes = {str(note) for note in graph.notes}
        assert {f"{host}/links.txt: taken for the machine of {host}/topo.txt" for host in "ab"} <= notes

    def test_one_machine_is_not_named(self) -> None:
        assert self.of("a/topo.txt", "a/links.txt").hosts == ("",)

    def test_a_file_that_is_given_twice(self) -> None:
        assert self.of("a/topo.txt", "a/topo.txt").hosts == ("",)

    def test_saved_from_files_of_one_name(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for host in ("a", "b"):
            monkeypatch.chdir(tmp_path / host)
            argv = ["topology", "--from", "topo.txt", "--save", f"../{host}.json"]
            assert main(argv, StringIO(), StringIO(), StringIO()) == 0
        monkeypatch.chdir(tmp_path)
        assert self.of("a.json", "b.json").hosts == ("a.json", "b.json")

    def test_saved_from_probes(self) -> None:
        for host in ("a", "b"):
            Path(f"{host}.json").write_text(to_json([tool(0, 1), tree(2)]))
        graph = self.of("a.json", "b.json")
        assert graph.hosts == ("a.json", "b.json")
        assert len(graph.accelerators) == 4

    def test_hosts_that_are_named_stay(self) -> None:
        facts = [tool(0, 1, host="x"), tool(0, 1, host="y")]
        Path("job.json").write_text(to_json(facts))
        assert self.of("job.json", "a/links.txt").hosts[:2] == ("x", "y")
        assert merge(facts).hosts == ("x", "y")
