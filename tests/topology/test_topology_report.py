"""The command, the report in full, and the document that is read again."""

from __future__ import annotations

import json
from io import StringIO
from itertools import combinations
from pathlib import Path

import pytest

from tokenring.cli.main import main
from tokenring.errors import TopologyError
from tokenring.topology.model.facts import Device, Facts, Link
from tokenring.topology.model.graph import merge
from tokenring.topology.model.schema import from_json, is_document, to_json
from tokenring.topology.model.tree import pcie_links
from tokenring.topology.model.verdict import classify
from tokenring.topology.probing.probe import NoAnswer, probe
from tokenring.topology.probing.sysfs import read_sysfs
from tokenring.topology.ranks import Topology
from tokenring.topology.report.text import report
from tokenring.topology.sources import read

DATA = Path(__file__).resolve().parents[1] / "data" / "topology"
FILES = sorted(path.name for path in DATA.iterdir())


def run(*argv: str) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    code = main(["topology", *argv], out, err, StringIO())
    return code, out.getvalue(), err.getvalue()


PAIRS = """\
4 × NVIDIA, islands: groups with links of their own, joined by something slower

class     islands, confidence high
because   2 × full-mesh of 2; joined by SYS

links, GB/s one way
      GPU0      GPU1      GPU2      GPU3
GPU0  ·         nvlink×4  sys       sys
GPU1  nvlink×4  ·         sys       sys
GPU2  sys       sys       ·         nvlink×4
GPU3  sys       sys       nvlink×4  ·

islands
  full-mesh: GPU0, GPU1
  full-mesh: GPU2, GPU3

place  CPUs
GPU0   0-3
GPU1   0-3
GPU2   0-3
GPU3   0-3

unknown
  bandwidth of nvlink links: name the model with one more source, as nvidia-smi -q

favours   direct schedules inside an island, a ring between islands, in few and large messages
"""


def test_report_in_full() -> None:
    assert run("--from", str(DATA / "nvidia-pairs-spaces.txt")) == (0, PAIRS, "")


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (
            "npu-910b.txt",
            "8 × Ascend 910B, full mesh: every pair has links of its own (28 GB/s one way); "
            "a ring uses 1 of the 7 links of each",
        ),
        (
            "nccl-switch.xml",
            "4 × NVIDIA sm90, switch: every pair can use all links of a device, but a device has them once: "
            "450 GB/s one way",
        ),
        ("nvidia-single.txt", "1 × NVIDIA, one accelerator, nothing to link"),
        ("npu-refused.txt", "no accelerators found"),
    ],
)
def test_verdict_in_one_sentence(file: str, says: str) -> None:
    assert run("--from", str(DATA / file))[1].splitlines()[0] == says


@pytest.mark.parametrize("file", FILES)
def test_document_is_read_again(file: str) -> None:
    text = to_json([read((DATA / file).read_text(encoding="utf-8"), file)])
    again = from_json(text)
    assert to_json(again) == text
    graph = merge(again)
    assert json.loads(text)["verdict"]["class"] == classify(graph).name
    assert report(graph, classify(graph)).endswith("\n")


def test_saved_file_is_a_source(tmp_path: Path) -> None:
    saved = tmp_path / "topology.json"
    file = str(DATA / "nvidia-pairs-spaces.txt")
    assert run("--from", file, "--save", str(saved)) == (0, "", "")
    assert run("--from", str(saved))[1] == PAIRS
    assert run("--from", str(saved), "--json")[1] == saved.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["nvidia-mesh.txt"], ["bandwidth of nvlink links: name the model with one more source, as nvidia-smi -q"]),
        (["npu-a3.txt"], ["bandwidth of sio links: measure it with ascend-dmi or tokenring topology --measure"]),
        (["rccl-two-rings.xml"], ["bandwidth of xgmi links: measure it with tokenring topology --measure"]),
        (["metax-pairs.txt"], ["bandwidth of mxlink links: measure it with tokenring topology --measure"]),
        (["rccl-pcie.xml"], ["bandwidth through PCIe: measure it with tokenring topology --measure"]),
        (["p2p-numa.txt"], []),  # it was measured
        (["nccl-switch.xml"], []),
        (["hccl-2.0-one-server.json"], ["what links them: npu-smi info -t topo or tokenring topology --measure tells"]),
    ],
)
def test_how_to_know_what_is_unknown(files: list[str], says: list[str]) -> None:
    """What is asked for can be had on such a machine, and is not what was read."""
    graph = merge([read((DATA / name).read_text(encoding="utf-8"), name) for name in files])
    lines = [line.strip() for line in report(graph, classify(graph)).splitlines()]
    assert [line for line in lines if ("measure" in line and ": " in line) or "one more source" in line] == says


def test_a_switch_is_as_wide_as_its_links_that_are_up() -> None:
    """Not as what the model has: the sentence and the matrix say one thing."""
    gpus = [Device(f"GPU{i}", "accelerator", i, model="NVIDIA H100") for i in range(3)]
    graph = merge(
        [Facts("links", tuple(gpus), tuple(Link(a.id, b.id, "nvlink", 16) for a, b in combinations(gpus, 2)))]
    )
    text = report(graph, classify(graph))
    assert "a device has them once: 400 GB/s one way\n" in text
    assert "nvlink×16 400" in text


def test_switches_that_are_linked_are_one() -> None:
    """Two boards of two switches: across them it is a switch too, for the matrix and for ranks as for the verdict."""
    text = (DATA / "hwloc-two-switch-boards.xml").read_text(encoding="utf-8")
    graph = merge([read(text)])
    assert classify(graph).name == "switch"
    first = next(line for line in report(graph, classify(graph)).splitlines() if line.startswith("GPU0  "))
    assert first.count("nvlink→switch 50") == 3
    assert set(Topology.of(graph).bandwidth_gbs.values()) == {50.0}


def test_widths_that_are_written_alike() -> None:
    assert ": 276 GB/s one way\n" in run("--from", str(DATA / "nvbandwidth-switch.txt"))[1]


def test_same_tool_twice_is_two_hosts() -> None:
    files = [str(DATA / name) for name in ("nvidia-mesh.txt", "nvidia-switch.txt")]
    code, out, _ = run("--from", *files, "--json")
    verdict = json.loads(out)["verdict"]
    assert (code, verdict["class"]) == (0, "multi-node")
    assert [inside["class"] for inside in verdict["inside"].values()] == ["full-mesh", "switch"]


def edited(**changes: object) -> str:
    document = json.loads(to_json([read((DATA / "nvidia-ansi.txt").read_text())]))
    return json.dumps(document | changes)


def linked(**changes: object) -> str:
    """A document of one link."""
    link = {"a": "x", "b": "y", "kind": "nvlink", "count": 1} | changes
    devices = [{"id": name, "kind": "accelerator"} for name in "xy"]
    return edited(facts=[{"coverage": "links", "devices": devices, "links": [link]}])


def test_documents_that_are_read() -> None:
    assert merge(from_json(linked(label="\U0001f600"))).edges[0].count == 1
    assert is_document(json.dumps(json.loads(edited()), sort_keys=True))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (edited(version=2), "tokenring-topology version '2': this tokenring reads version 1"),
        (edited(format="x"), "not a tokenring-topology document"),
        (edited(facts=3), "facts is 3, expected list"),
        (edited(facts=[{}]), r"facts\[0\] lacks a part of a Facts"),
        (edited(facts=[{"coverage": "all"}]), r"facts\[0\].coverage is 'all', expected one of 'links'"),
        (edited(facts=[{"coverage": "pcie", "more": 1}]), r"facts\[0\] has 'more', which means nothing to us"),
        (
            edited(facts=[{"coverage": "pcie", "links": [{"a": "x", "b": "y", "kind": "sys"}]}]),
            r"facts\[0\] names 'x', which is not one of its devices",
        ),
        (linked(kind="warp"), r"facts\[0\] has a link of kind 'warp', which we do not know"),
        (linked(b="x"), r"facts\[0\] has a link from 'x' to itself"),
        (linked(count=0), r"facts\[0\] has 0 of links or GB/s: what is unknown is left out"),
        (linked(bandwidth_gbs=-5), r"facts\[0\] has -5 of links or GB/s: what is unknown is left out"),
        (linked(label="\ud800"), r"broken JSON: '.ud800' is half a character"),
        ("[" * 100_000, "nested too deep"),
        ('{"format": NaN}', "NaN is no JSON"),
        ('{"a":\n 1,}', "2:4: broken JSON|2:3: broken JSON"),
    ],
)
def test_documents_that_are_refused(text: str, says: str) -> None:
    with pytest.raises(TopologyError, match=says):
        from_json(text)


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.xml"
    broken.write_text("<system>\n<cpu>")
    absent = "tokenring: cannot read 'no-such-file': No such file or directory\n"
    assert run("--from", "no-such-file") == (2, "", absent)
    assert run("--from", str(broken)) == (
        2,
        "",
        f"tokenring: {broken}:2:6: NCCL topology XML: broken XML: no element found\n",
    )


class TestProbe:
    def test_absent_tools_are_no_facts(self) -> None:
        def absent(command: tuple[str, ...]) -> str:
            raise FileNotFoundError

        assert [facts.origin.format for facts in probe(absent) if facts.origin] == ["sysfs"]

    def test_a_tool_that_fails_is_a_note(self) -> None:
        def fails(command: tuple[str, ...]) -> str:
            raise NoAnswer("no answer in 10 s")

        notes = [str(note) for facts in probe(fails) for note in facts.notes]
        assert notes[0] == "nvidia-smi topo -m: no answer in 10 s"

    def test_what_a_tool_says_is_read(self) -> None:
        def says(command: tuple[str, ...]) -> str:
            if command[0] != "nvidia-smi":
                raise FileNotFoundError
            return (DATA / "nvidia-mesh.txt").read_text()

        assert len(merge(probe(says)).accelerators) == 4

    def test_this_machine_has_an_answer(self) -> None:
        code, out, err = run()
        assert (code, err) == (0, "")
        assert "class" in out


def pci(root: Path, path: str, numa: int, vendor: str, pci_class: str) -> None:
    real = root / "devices" / path
    real.mkdir(parents=True)
    for name, text in (("numa_node", str(numa)), ("vendor", vendor), ("class", pci_class), ("local_cpulist", "0-3")):
        (real / name).write_text(text + "\n")
    (root / "bus/pci/devices" / real.name).symlink_to(real)


def test_sysfs(tmp_path: Path) -> None:
    """Two below one switch, one below another root port, one at another node."""
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    gpu = ("0x10de", "0x030200")
    switch = "pci0000:00/0000:00:01.0/0000:01:00.0"
    pci(tmp_path, f"{switch}/0000:02:00.0/0000:03:00.0", 0, *gpu)
    pci(tmp_path, f"{switch}/0000:02:01.0/0000:04:00.0", 0, *gpu)
    pci(tmp_path, "pci0000:00/0000:00:02.0/0000:05:00.0", 0, *gpu)
    pci(tmp_path, "pci0000:80/0000:80:01.0/0000:81:00.0", 1, *gpu)
    facts = read_sysfs(tmp_path)
    graph = merge([facts])
    kinds = {(link.a[5:7], link.b[5:7]): link.kind for link in facts.links}
    assert kinds == {
        ("03", "04"): "pix",
        ("03", "05"): "phb",
        ("04", "05"): "phb",
        ("03", "81"): "sys",
        ("04", "81"): "sys",
        ("05", "81"): "sys",
    }
    assert (classify(graph).name, classify(graph).confidence) == ("pcie-numa", "low")


def test_sysfs_with_virtual_functions(tmp_path: Path) -> None:
    """SR-IOV makes hundreds of one NIC: they are no NICs of their own, and no way between GPUs is lost over them."""
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    pci(tmp_path, "pci0000:00/0000:01:00.0", 0, "0x15b3", "0x020000")
    pci(tmp_path, "pci0000:00/0000:01:00.1", 0, "0x15b3", "0x020000")
    (tmp_path / "devices/pci0000:00/0000:01:00.1/physfn").symlink_to("../0000:01:00.0")
    assert [device.id for device in read_sysfs(tmp_path).devices if device.kind == "nic"] == ["0000:01:00.0"]


def test_accelerators_go_before_nics() -> None:
    nics = [Device(f"nic{i}", "nic", parent="bridge") for i in range(600)]
    gpus = [Device(f"gpu{i}", "accelerator", parent="bridge") for i in range(2)]
    links = pcie_links([Device("bridge", "host-bridge"), *nics, *gpus], host_bridges=True)
    assert ("gpu0", "gpu1") in {(link.a, link.b) for link in links}
