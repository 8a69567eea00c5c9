"""NVML through a small fake of its bindings, and devices that sources name by index, by bus id, or by both."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenring.topology.model.facts import Device, Facts, Link, SourceOrigin
from tokenring.topology.model.graph import merge
from tokenring.topology.model.verdict import classify
from tokenring.topology.probing import nvml, probe
from tokenring.topology.probing.nvml import read_nvml
from tokenring.topology.sources import read

DATA = Path(__file__).resolve().parents[1] / "data" / "topology"
HIDDEN = "FFFFFFFF:FF:FF.0"
GPU, CPU, SWITCH, UNKNOWN = 0, 1, 2, 255


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class FakeNvml:
    """GPUs by bus id; `links` are (remote bus id, kind of the remote) for each GPU's NVLinks that are up."""

    NVML_NVLINK_MAX_LINKS = 18

    def __init__(self, links: dict[str, list[tuple[str, int]]], levels: int = 50, as_bytes: bool = False) -> None:
        self.bus_ids = list(links)
        self.links = links
        self.levels = levels
        self.as_bytes = as_bytes
        self.shut = False

    def _text(self, text: str) -> str | bytes:
        return text.encode() if self.as_bytes else text

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None:
        self.shut = True

    def nvmlDeviceGetCount(self) -> int:
        return len(self.bus_ids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self.bus_ids[index]

    def nvmlDeviceGetPciInfo(self, handle: str) -> Any:
        return SimpleNamespace(busId=self._text(f"0000{handle.upper()}"))

    def nvmlDeviceGetName(self, handle: str) -> str | bytes:
        return self._text("NVIDIA H100 80GB HBM3")

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> tuple[int, int]:
        return (9, 0)

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        if not self.links[handle]:
            raise NVMLError_NotSupported("Not Supported")
        return int(link < len(self.links[handle]))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: str, link: int) -> int:
        return self.links[handle][link][1]

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: str, link: int) -> Any:
        return SimpleNamespace(busId=self._text(self.links[handle][link][0]))

    def nvmlDeviceGetTopologyCommonAncestor(self, a: str, b: str) -> int:
        return self.levels


BUS = ["0000:18:00.0", "0000:2a:00.0", "0000:3a:00.0", "0000:5d:00.0"]


def facts_of(fake: Any) -> Facts:
    facts = read_nvml(fake)
    assert facts is not None
    return facts


def verdict_of(fake: Any) -> str:
    return classify(merge([facts_of(fake)])).name


def mesh(count: int) -> dict[str, list[tuple[str, int]]]:
    return {bus: [(other, GPU) for other in BUS if other != bus for _ in range(count)] for bus in BUS}


@pytest.mark.parametrize("as_bytes", [False, True])
def test_devices_have_index_and_bus_id(as_bytes: bool) -> None:
    fake = FakeNvml(mesh(6), as_bytes=as_bytes)
    facts = facts_of(fake)
    first = facts.accelerators[0]
    assert (first.id, first.index, first.bus_id) == ("GPU0", 0, "0000:18:00.0")
    assert (first.model, first.arch, first.ports) == ("NVIDIA H100 80GB HBM3", "sm90", 18)
    assert fake.shut


def test_mesh() -> None:
    facts = facts_of(FakeNvml(mesh(6)))
    nvlinks = [link for link in facts.links if link.kind == "nvlink"]
    assert {link.count for link in nvlinks} == {6}
    assert len(nvlinks) == 6
    assert classify(merge([facts])).name == "full-mesh"


@pytest.mark.parametrize(
    ("remote", "kind"), [(HIDDEN, UNKNOWN), (HIDDEN, SWITCH), ("0000:07:00.0", SWITCH)], ids=["ff", "ff-switch", "seen"]
)
def test_switch(remote: str, kind: int) -> None:
    assert verdict_of(FakeNvml({bus: [(remote, kind)] * 18 for bus in BUS})) == "switch"


def test_no_nvlink() -> None:
    assert verdict_of(FakeNvml({bus: [] for bus in BUS}, levels=40)) == "pcie-host"
    assert verdict_of(FakeNvml({bus: [] for bus in BUS}, levels=10)) == "pcie-bridge"


def test_links_to_cpus_are_no_links_between_gpus() -> None:
    assert verdict_of(FakeNvml({bus: [("0004:00:00.0", CPU)] * 6 for bus in BUS})) == "pcie-numa"


def test_links_to_nobody_knows_where() -> None:
    facts = facts_of(FakeNvml({bus: [("0009:00:00.0", UNKNOWN)] * 6 for bus in BUS}))
    verdict = classify(merge([facts]))
    assert verdict.name == "unknown"
    assert verdict.evidence[0] == "devices have up to 6 links up, and where they lead is not said"


def test_old_bindings_lack_functions() -> None:
    class Old(FakeNvml):
        def __getattribute__(self, name: str) -> Any:
            if name in ("nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetTopologyCommonAncestor"):
                raise AttributeError(name)
            return super().__getattribute__(name)

    facts = facts_of(Old(mesh(6)))
    assert classify(merge([facts])).name == "full-mesh"
    assert not facts.notes


def test_every_call_that_fails_is_a_note() -> None:
    for name in [name for name in dir(FakeNvml) if name.startswith("nvml") and name != "nvmlInit"]:
        fake = FakeNvml(mesh(6))

        def fails(*arguments: object) -> None:
            raise NVMLError("GPU is lost")

        setattr(fake, name, fails)
        assert name == "nvmlShutdown" or f"NVML: {name}: GPU is lost" in [str(n) for n in facts_of(fake).notes]


def test_no_driver_is_a_note() -> None:
    class Broken:
        def nvmlInit(self) -> None:
            raise NVMLError("Driver Not Loaded")

    facts = facts_of(Broken())
    assert not facts.devices
    assert [str(note) for note in facts.notes] == ["NVML: Driver Not Loaded"]


def test_bindings_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "MODULE", "no_such_module_here")
    assert read_nvml() is None


def test_bindings_that_break_on_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_bindings.py").write_text("raise OSError('no libnvidia-ml.so')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(nvml, "MODULE", "broken_bindings")
    facts = read_nvml()
    assert facts is not None
    assert str(facts.notes[0]) == "broken_bindings cannot be imported: no libnvidia-ml.so"


def tree(bus_ids: list[str]) -> Facts:
    """As the kernel shows it: bus ids and no indices."""
    devices = [
        Device(bus, "accelerator", bus_id=bus, vendor="nvidia", numa_node=i // 2) for i, bus in enumerate(bus_ids)
    ]
    nic = Device("0000:1b:00.0", "nic", bus_id="0000:1b:00.0", name="mlx5_0")
    return Facts("pcie", (*devices, nic), (Link(bus_ids[0], nic.id, "pix"),), origin=SourceOrigin("sysfs"))


def matrix(n: int) -> Facts:
    header = "\t" + "\t".join(f"GPU{i}" for i in range(n)) + "\tCPU Affinity\n"
    rows = ["\t".join([f"GPU{i}", *("X" if i == j else "NV18" for j in range(n)), f"{i}-{i}"]) for i in range(n)]
    return read(header + "\n".join(rows))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_index_and_bus_id_join_what_knows_one_of_them(order: tuple[int, ...]) -> None:
    listed = read((DATA / "nvidia-query.csv").read_text())
    sources = [matrix(2), tree(["0000:18:00.0", "0000:2a:00.0"]), listed]
    graph = merge([sources[i] for i in order])
    assert [(each.index, each.bus_id, each.numa_node, each.cpu_affinity) for each in graph.accelerators] == [
        (0, "0000:18:00.0", 0, "0-0"),
        (1, "0000:2a:00.0", 0, "1-1"),
    ]
    assert {edge.kind for edge in graph.edges} == {"nvlink", "pix"}
    assert classify(graph).name == "full-mesh"


def test_tools_of_two_vendors_count_devices_of_their_own() -> None:
    graph = merge([matrix(2), read((DATA / "rocm-mesh.txt").read_text())])
    assert [(each.vendor, each.index) for each in graph.accelerators] == [
        ("nvidia", 0),
        ("nvidia", 1),
        *(("amd", index) for index in range(4)),
    ]


def test_probe_asks_nvml_before_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(command: tuple[str, ...]) -> str:
        asked.append(command[0])
        raise FileNotFoundError

    monkeypatch.setattr(probe, "read_sysfs", lambda: tree(BUS))
    found = probe.probe(run, nvml=lambda: facts_of(FakeNvml(mesh(6))))
    assert [facts.origin.format for facts in found if facts.origin] == ["NVML", "sysfs"]
    assert "nvidia-smi" not in asked
    assert "npu-smi" in asked
    graph = merge(found)
    assert (len(graph.accelerators), classify(graph).name) == (4, "full-mesh")


def test_probe_asks_nvidia_smi_where_nvml_has_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: tuple[str, ...]) -> str:
        if command[0] != "nvidia-smi":
            raise FileNotFoundError
        if "nvlink" in command:
            return "".join(f"GPU {i}: NVIDIA H100 (UUID: GPU-0)\n" for i in range(2))
        listed = (DATA / "nvidia-query.csv").read_text()
        return listed if "--format=csv" in command else "\tGPU0\tGPU1\nGPU0\tX\tNV18\nGPU1\tNV18\tX\n"

    monkeypatch.setattr(probe, "read_sysfs", lambda: tree(["0000:18:00.0", "0000:2a:00.0"]))
    graph = merge(probe.probe(run, nvml=lambda: None))
    assert len(graph.accelerators) == 2
    assert classify(graph).name == "full-mesh"
