"""Quirks of the tools of other vendors, of hwloc, lspci, nvidia-smi nvlink and NCCL's graphs."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import Facts
from tokenring.topology.model.graph import merge
from tokenring.topology.model.verdict import Verdict, classify
from tokenring.topology.sources import read

DATA = Path(__file__).resolve().parents[1] / "data" / "topology"


def text_of(name: str) -> str:
    return (DATA / name).read_text(encoding="utf-8")


def facts_of(name: str) -> Facts:
    return read(text_of(name), name)


def verdict_of(*texts: str) -> Verdict:
    return classify(merge([read(text) for text in texts]))


def notes_of(text: str) -> list[str]:
    return [str(note) for note in read(text).notes]


def numa_nodes(name: str) -> list[int | None]:
    return [device.numa_node for device in facts_of(name).accelerators]


class TestRocm:
    def test_numa_nodes_after_tabs_that_are_spelt_out(self) -> None:
        assert numa_nodes("rocm-quads.txt") == [0, 0, 0, 0, 1, 1, 1, 1]

    def test_two_hops_are_one_cpu(self) -> None:
        assert verdict_of(re.sub(r"\b3\b", "2", text_of("rocm-pcie-hops.txt"))).name == "pcie-host"

    def test_amd_smi_names_by_bus_id(self) -> None:
        first, second = facts_of("amd-smi-topology.txt").accelerators[:2]
        assert (first.id, first.index, first.bus_id) == ("GPU0", 0, "0000:05:00.0")
        assert (second.id, second.index, second.bus_id) == ("GPU1", 1, "0000:26:00.0")

    def test_rate_of_a_link(self) -> None:
        assert {device.gbs for device in facts_of("amd-smi-xgmi-ring.txt").accelerators} == {64.0}

    def test_topology_and_xgmi_are_one_machine(self) -> None:
        graph = merge([facts_of("amd-smi-topology.txt"), facts_of("amd-smi-xgmi-ring.txt")])
        assert len(graph.accelerators) == 4
        assert {edge.bandwidth_gbs for edge in graph.edges} == {128.0}  # two links of 64

    def test_markdown(self) -> None:
        rows = text_of("rocm-mesh.txt").split("Link Type", 1)[1].splitlines()[1:6]
        table = "\n".join("| " + " | ".join(row.split()) + " |" for row in rows)
        assert verdict_of(f"Link Type between two GPUs\n{table}").name == "full-mesh"

    def test_rows_alone(self) -> None:
        rows = text_of("rocm-quads.txt").split("Link Type", 1)[1].splitlines()[2:10]
        assert verdict_of("\n".join(rows)).name == "islands"
        assert notes_of("\n".join(rows)) == ["the header is missing: columns are taken in the order of the rows"]

    def test_a_row_that_lost_a_cell_is_not_used(self) -> None:
        text = text_of("rocm-mesh.txt").replace("GPU2   XGMI         ", "GPU2   ")
        assert verdict_of(text).name == "full-mesh"  # the other rows say it all
        assert any("the row of GPU2 does not fit the header: not used" in note for note in notes_of(text))

    def test_refusal_is_a_fact(self) -> None:
        text = "=== ROCm System Management Interface ===\nERROR: GPU[0]: Cannot read Link Type: Not supported\n"
        assert verdict_of(text).name == "unknown"
        assert notes_of(text) == ["line 2: ERROR: GPU[0]: Cannot read Link Type: Not supported"]

    def test_a_header_that_names_one_twice(self) -> None:
        with pytest.raises(TopologyError, match="3:1: rocm-smi --showtopo: the header names GPU0 twice"):
            read("Link Type between two GPUs\n\nGPU0 GPU0\n")


class TestMetaX:
    def test_affinities_are_the_other_way_round(self) -> None:
        assert [(d.numa_node, d.cpu_affinity, d.vendor) for d in facts_of("metax-pairs.txt").accelerators] == [
            (0, "0-31", "metax"),
            (0, "0-31", "metax"),
            (1, "32-63", "metax"),
            (1, "32-63", "metax"),
        ]

    def test_nics_have_names(self) -> None:
        assert [d.name for d in facts_of("metax-pairs.txt").devices if d.kind == "nic"] == ["mlx5_0", "mlx5_1"]

    def test_pcie_cards_are_not_nvidia(self) -> None:
        facts = read(text_of("metax-pairs.txt").replace("MX ", "PXB"))
        assert facts.origin is not None
        assert facts.origin.format == "mx-smi topo -m"
        assert facts.accelerators[0].vendor == "metax"


class TestHwloc:
    def test_baseboards_of_switches_are_one_fabric_with_a_note(self) -> None:
        facts = facts_of("hwloc-two-switch-boards.xml")
        verdict = classify(merge([facts]))
        assert (verdict.name, verdict.confidence, len(verdict.islands[0].members)) == ("switch", "medium", 4)
        assert "the trunk between them is in no source" in str(facts.notes[0])

    def test_links_to_switches(self) -> None:
        graph = merge([facts_of("hwloc-two-switch-boards.xml")])
        to_switch = [edge for edge in graph.edges if edge.is_peer and edge.label == "25000 MB/s"]
        assert {(edge.count, edge.bandwidth_gbs, edge.source) for edge in to_switch} == {(1, 25.0, "published")}
        assert len(to_switch) == 8

    def test_indices_are_those_of_nvidia_smi(self) -> None:
        """nvml counts as nvidia-smi does; cuda may count otherwise."""
        found = [(d.id, d.bus_id, d.numa_node) for d in facts_of("hwloc-pairs-and-cpus.xml").accelerators]
        assert found[:2] == [("GPU0", "0000:01:00.0", 0), ("GPU1", "0001:01:00.0", 0)]

    def test_links_to_cpus(self) -> None:
        links = [link for link in facts_of("hwloc-pairs-and-cpus.xml").links if link.kind == "c2c"]
        assert {(link.b, link.count, link.bandwidth_gbs) for link in links} == {
            ("Package0", 2, 40.0),
            ("Package1", 2, 40.0),
        }

    def test_a_screen_is_no_accelerator(self) -> None:
        found = [(d.id, d.vendor, d.numa_node) for d in facts_of("hwloc1-two-vendors.xml").accelerators]
        assert found == [("GPU1", "amd", 0), ("GPU0", "nvidia", 8)]

    def test_a_matrix_of_another_size(self) -> None:
        text = text_of("hwloc-pairs-and-cpus.xml").replace("1000000 40000", "40000", 1)
        with pytest.raises(TopologyError, match="hwloc XML: 6 devices have a matrix of 35 numbers"):
            read(text)

    @pytest.mark.parametrize("encoding", ["UTF-16", "cp037", "no-such-thing"])
    def test_the_encoding_in_the_declaration_is_past(self, encoding: str) -> None:
        text = text_of("hwloc1-two-vendors.xml").replace("UTF-8", encoding)
        assert verdict_of(text).name == "pcie-numa"

    def test_entities_are_refused(self) -> None:
        text = '<!DOCTYPE topology [<!ENTITY a "b">]>\n<topology><object type="&a;"/></topology>'
        with pytest.raises(TopologyError, match="declarations of its own"):
            read(text)


class TestNvlink:
    def test_rates_are_payload(self) -> None:
        assert {(d.ports, d.gbs) for d in facts_of("nvlink-s-switch.txt").accelerators} == {(8, 25.0)}

    def test_inactive_links_do_not_count(self) -> None:
        assert [d.ports for d in facts_of("nvlink-s-inactive.txt").accelerators] == [12, 12, 11, 12]

    def test_remote_ends_give_bus_ids(self) -> None:
        found = [d.bus_id for d in facts_of("nvlink-R-mesh.txt").accelerators]
        assert found == ["0000:07:00.0", "0000:0f:00.0", "0000:47:00.0", "0000:4e:00.0"]

    def test_remote_ends_that_are_nobody(self) -> None:
        text = text_of("nvlink-R-mesh.txt").split("GPU 2:")[0]  # two of four: their peers have no names here
        assert verdict_of(text).name == "unknown"
        assert "the remote ends are neither these GPUs nor switches of all of them" in notes_of(text)

    def test_indented_as_in_mail(self) -> None:
        text = textwrap.indent(text_of("nvlink-R-mesh.txt"), "      ")
        assert verdict_of("      root@host:~# nvidia-smi nvlink -R\n" + text).name == "full-mesh"

    def test_switches_are_listed_unevenly(self) -> None:
        """Two GPUs and two remote ends: switches, as a GPU is not linked to itself."""
        ends = "".join(
            f"\t Link {i}: Remote Device 00000000:{bus}:00.0: Link 2{i}\n" for i, bus in enumerate(("CD", "CD", "CA"))
        )
        text = f"GPU 0: NVIDIA H100 (UUID: GPU-0)\n{ends}\nGPU 1: NVIDIA H100 (UUID: GPU-1)\n{ends}"
        assert verdict_of(text).name == "switch"

    def test_with_the_matrix_of_the_same_machine(self) -> None:
        rows = ["\t".join([f"GPU{i}", *("X" if i == j else "NV8" for j in range(4))]) for i in range(4)]
        matrix = "\t" + "\t".join(f"GPU{i}" for i in range(4)) + "\n" + "\n".join(rows)
        graph = merge([read(matrix), facts_of("nvlink-s-switch.txt")])
        assert classify(graph).name == "switch"
        assert {(edge.bandwidth_gbs, edge.source) for edge in graph.edges} == {(200.0, "published")}


class TestLists:
    def test_query_and_q_say_the_same(self) -> None:
        assert facts_of("nvidia-q.txt").devices == facts_of("nvidia-query.csv").devices
        assert facts_of("nvidia-q.txt").devices[1].bus_id == "0000:2a:00.0"

    def test_slices_and_screens_are_no_accelerators(self) -> None:
        assert [d.index for d in facts_of("nvidia-L-mig.txt").accelerators] == [0, 2]

    @pytest.mark.parametrize(
        "text",
        [
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.86\n",
            "No devices were found\n",
            "Unable to determine the device handle for GPU0000:1A:00.0: Unknown Error\n",
        ],
    )
    def test_failures_are_facts(self, text: str) -> None:
        assert verdict_of(text).name == "unknown"
        assert notes_of(text) == [f"line 1: nvidia-smi says: {text.splitlines()[0]}"]

    def test_a_row_without_an_index(self) -> None:
        with pytest.raises(TopologyError, match="2:1: nvidia-smi -q: expected a GPU's index first"):
            read("index, pci.bus_id\nx, 00000000:18:00.0\n")


class TestLspci:
    def test_devices(self) -> None:
        found = [
            (d.kind, d.bus_id, d.vendor)
            for d in facts_of("lspci-roots.txt").devices
            if d.kind in ("accelerator", "nic")
        ]
        assert found == [
            ("nic", "0000:01:00.0", None),
            ("accelerator", "0000:03:00.0", "nvidia"),
            ("accelerator", "0000:41:00.0", "nvidia"),
            ("nic", "0000:42:00.0", None),
        ]

    def test_ways(self) -> None:
        ways = {(link.a, link.b): link.kind for link in facts_of("lspci-switches.txt").links}
        assert ways["0000:03:00.0", "0000:05:00.0"] == "pix"
        assert ways["0000:03:00.0", "0000:06:00.0"] == "phb"


class TestGraphs:
    def test_what_pcie_cannot_carry_has_links_of_its_own(self) -> None:
        links = {(link.a, link.b): link.kind for link in facts_of("nccl-graph-pairs.xml").links}
        assert links == {
            ("GPU0", "GPU1"): "nvlink",
            ("GPU2", "GPU3"): "nvlink",
            ("GPU1", "GPU2"): "pcie",
            ("GPU0", "GPU3"): "pcie",
        }

    def test_slow_rings_prove_nothing(self) -> None:
        text = text_of("nccl-graph-pairs.xml").replace('speedintra="20"', 'speedintra="5"')
        assert verdict_of(text).name == "unknown"


class TestMatrixJson:
    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ('{"matrix": [], "ids": []}', "expected ids, and a matrix of as many rows"),
            ('{"matrix": [["X"]], "ids": [1]}', "expected ids that are words"),
            ('{"matrix": [["X", "NV4"], ["NV4"]], "ids": ["0", "1"]}', "row 1 of the matrix is not a list of 2 labels"),
            ('{"matrix": [["X", "X"], ["X", "X"]], "ids": ["0", "0"]}', "two ids are the same"),
            ('{"matrix": [', "broken JSON"),
        ],
    )
    def test_what_is_refused(self, text: str, says: str) -> None:
        with pytest.raises(TopologyError, match=says):
            read(text)

    def test_two_directions_that_differ(self) -> None:
        text = '{"ids": ["0", "1"], "matrix": [["X", "NV4"], ["SYS", "X"]]}'
        assert verdict_of(text).name == "unknown"
        assert notes_of(text) == ["#0 and #1 are 'NV4' one way, 'SYS' the other: unknown"]
