"""Every format and every quirk, in full: class, links and what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import Facts
from tokenring.topology.model.graph import Graph, merge
from tokenring.topology.model.verdict import classify
from tokenring.topology.sources import read

DATA = Path(__file__).resolve().parents[1] / "data" / "topology"


def facts_of(name: str) -> Facts:
    return read((DATA / name).read_text(encoding="utf-8"), name)


def graph_of(name: str) -> Graph:
    return merge([facts_of(name)])


def tally(graph: Graph) -> dict[str, int]:
    """Pairs of accelerators by kind and count of links: `nvlink×4`."""
    ends = {device.id for device in graph.accelerators}
    found: dict[str, int] = {}
    for edge in graph.between().values():
        if {edge.a, edge.b} <= ends:
            word = edge.kind + ("" if edge.count is None else f"×{edge.count}") + ("→" if edge.switched else "")
            found[word] = found.get(word, 0) + 1
    return found


class Case(NamedTuple):
    file: str
    verdict: str
    accelerators: int
    pairs: dict[str, int]


CASES = [
    Case("nvidia-mesh.txt", "full-mesh", 4, {"nvlink×4": 6}),
    Case("nvidia-switch.txt", "switch", 8, {"nvlink×18": 28}),
    Case("nvidia-pairs-spaces.txt", "islands", 4, {"nvlink×4": 2, "sys": 4}),
    Case("nvidia-cube-squashed-header.txt", "cube-mesh", 8, {"nvlink×1": 16, "sys": 12}),
    Case("nvidia-ansi.txt", "full-mesh", 2, {"nvlink×2": 1}),
    Case("nvidia-glued.txt", "full-mesh", 2, {"nvlink×18": 1}),
    Case("nvidia-markdown.txt", "full-mesh", 3, {"nvlink×4": 3}),
    Case("nvidia-no-header.txt", "pcie-bridge", 2, {"phb": 1}),
    Case("nvidia-elided.txt", "unknown", 2, {}),
    Case("nvidia-dots.txt", "islands", 3, {"nvlink×4": 1, "node": 2}),
    Case("nvidia-label-before.txt", "pcie-host", 2, {"node": 1}),
    Case("nvidia-chinese.txt", "switch", 3, {"nvlink×18": 3}),
    Case("nvidia-numeric-numa.txt", "full-mesh", 2, {"nvlink×6": 1}),
    Case("nvidia-blank-affinity.txt", "pcie-bridge", 2, {"pix": 1}),
    Case("nvidia-multitab.txt", "pcie-numa", 2, {"sys": 1}),
    Case("nvidia-wrapped.txt", "pcie-bridge", 4, {"pix": 2, "pxb": 4}),
    Case("nvidia-degraded.txt", "switch", 8, {"nvlink×18": 21, "node": 7}),
    Case("nvidia-single.txt", "single", 1, {}),
    Case("nvidia-cut-switch.txt", "switch", 6, {"nvlink×12": 12}),
    Case("nvidia-cut-mesh.txt", "unknown", 4, {"nvlink×4": 5}),
    Case("nvidia-quoted.txt", "pcie-numa", 3, {"pix": 1, "sys": 2}),
    Case("nvidia-logged.txt", "full-mesh", 2, {"nvlink×4": 1}),
    Case("nvidia-string.txt", "pcie-host", 3, {"node": 2, "phb": 1}),
    Case("nvidia-table-cell.txt", "islands", 3, {"nvlink×4": 1, "sys": 2}),
    Case("nvidia-then-p2p.txt", "pcie-bridge", 2, {"phb": 1}),
    Case("npu-910a.txt", "islands", 8, {"hccs": 12, "sys": 16}),
    Case("npu-910b.txt", "full-mesh", 8, {"hccs": 28}),
    Case("npu-a3.txt", "switch", 16, {"sio": 8, "hccs→": 112}),
    Case("npu-950-pairs.txt", "islands", 4, {"ub": 2, "sys": 4}),
    Case("npu-a3-rows-missing.txt", "switch", 4, {"sio": 1, "hccs→": 4}),
    Case("npu-a3-xlink.txt", "switch", 4, {"sio": 2, "hccs→": 4}),
    Case("npu-950-mesh-nics.txt", "full-mesh", 8, {"ub": 28}),
    Case("npu-nic.txt", "full-mesh", 2, {"ub": 1}),
    Case("npu-refused.txt", "unknown", 0, {}),
    Case("nccl-switch.xml", "switch", 4, {"sys": 4}),
    Case("nccl-hidden-switch.xml", "switch", 4, {}),
    Case("nccl-in-a-page.txt", "full-mesh", 2, {"nvlink×12": 1}),
    Case("nccl-no-links.xml", "unknown", 4, {"sys": 4}),
    Case("nccl-itself.xml", "unknown", 2, {"sys": 1}),
    Case("rccl-mesh.xml", "full-mesh", 8, {"xgmi×1": 28}),
    Case("rccl-ring.xml", "ring", 4, {"xgmi×1": 4}),
    Case("rccl-two-rings.xml", "islands", 8, {"xgmi×1": 8, "sys": 16}),
    Case("rccl-ladder.xml", "partial-mesh", 8, {"xgmi×4": 4, "xgmi×2": 4, "xgmi×1": 4, "sys": 12}),
    Case("rccl-pcie.xml", "pcie-numa", 4, {"sys": 4}),
    Case("npu-info-910b.txt", "unknown", 2, {}),
    Case("npu-info-a3.txt", "unknown", 4, {}),
    Case("npu-info-950.txt", "unknown", 2, {}),
    Case("npu-info-310p.txt", "unknown", 2, {}),
    Case("npu-map-910b.txt", "unknown", 2, {}),
    Case("npu-map-a3.txt", "unknown", 2, {}),
    Case("npu-map-950.txt", "unknown", 2, {}),
    Case("npu-hccs.txt", "unknown", 0, {}),
    Case("npu-pod.txt", "unknown", 0, {}),
    Case("npu-refused-pod.txt", "unknown", 0, {}),
    Case("hccl-1.0.json", "multi-node", 4, {}),
    Case("hccl-1.0-of-a-page.json", "unknown", 2, {}),
    Case("hccl-1.2.json", "multi-node", 3, {}),
    Case("hccl-2.0.json", "multi-node", 3, {}),
    Case("hccl-2.0-one-server.json", "unknown", 2, {}),
    Case("hccl-group-list.json", "multi-node", 2, {}),
    Case("hccl-server-groups.json", "multi-node", 3, {}),
    Case("ascend950-mesh.json", "full-mesh", 4, {"ub×1": 6}),
    Case("ascend950-quads.json", "islands", 8, {"ub×1": 12}),
    Case("ascend950-bridges.json", "islands", 4, {"ub×4": 2, "pcie": 4}),
    Case("ascend950-switch.json", "switch", 4, {"pcie": 6}),
    Case("ascend950-pcie.json", "pcie", 3, {"pcie": 3}),
    Case("ascend950-ring.json", "ring", 4, {"ub×1": 4}),
    Case("ascend950-near-mesh.json", "partial-mesh", 4, {"ub×2": 1, "ub×1": 4}),
    Case("ascend-tor.json", "multi-node", 6, {}),
    Case("ascend-collected.txt", "full-mesh", 2, {"hccs": 1}),
    Case("hccn-link.txt", "unknown", 0, {}),
    Case("hccn-conf.txt", "unknown", 0, {}),
    Case("hccn-status.txt", "unknown", 0, {}),
    Case("hccn-950.txt", "unknown", 0, {}),
    Case("hccn-health.txt", "unknown", 0, {}),
    Case("dmi-pair.json", "unknown", 2, {}),
    Case("dmi-matrix.txt", "unknown", 3, {}),
    Case("amd-smi-topology.txt", "full-mesh", 4, {"xgmi×2": 6}),
    Case("amd-smi-xgmi-ring.txt", "ring", 4, {"xgmi": 4}),
    Case("hwloc-pairs-and-cpus.xml", "islands", 4, {"nvlink×2": 2, "sys": 4}),
    Case("hwloc-two-switch-boards.xml", "switch", 4, {"pix": 2, "sys": 4}),
    Case("hwloc1-two-vendors.xml", "pcie-numa", 2, {"sys": 1}),
    Case("lspci-roots.txt", "pcie-numa", 2, {"sys": 1}),
    Case("lspci-switches.txt", "pcie-bridge", 3, {"pix": 1, "phb": 2}),
    Case("matrix-degraded.json", "switch", 4, {"nvlink×18→": 3}),
    Case("matrix-hops.json", "pcie-numa", 3, {"sys": 2, "node": 1}),
    Case("metax-pairs.txt", "islands", 4, {"mxlink": 2, "node": 4}),
    Case("nccl-g-instance.xml", "pcie-numa", 4, {"sys": 4}),
    Case("nccl-graph-nvl.xml", "unknown", 4, {}),
    Case("nccl-graph-nvls.xml", "switch", 4, {}),
    Case("nccl-graph-pairs.xml", "islands", 4, {"nvlink": 2, "pcie": 2}),
    Case("nvidia-L-mig.txt", "unknown", 2, {}),
    Case("nvidia-failed.txt", "unknown", 0, {}),
    Case("nvidia-p2p.txt", "unknown", 3, {}),
    Case("nvidia-q.txt", "unknown", 2, {}),
    Case("nvidia-query.csv", "unknown", 2, {}),
    Case("nvlink-R-hidden-switch.txt", "switch", 2, {}),
    Case("nvlink-R-mesh.txt", "full-mesh", 4, {"nvlink×4": 6}),
    Case("nvlink-R-pairs.txt", "islands", 4, {"nvlink×4": 2}),
    Case("nvlink-R-two-boards.txt", "switch", 4, {}),
    Case("nvlink-c.txt", "unknown", 2, {}),
    Case("nvlink-s-inactive.txt", "unknown", 4, {}),
    Case("nvlink-s-elided.txt", "unknown", 2, {}),
    Case("nvlink-s-switch.txt", "switch", 4, {}),
    Case("rocm-cut.txt", "unknown", 3, {"xgmi": 2}),
    Case("rocm-json.json", "islands", 3, {"xgmi": 1, "sys": 2}),
    Case("rocm-mesh.txt", "full-mesh", 4, {"xgmi": 6}),
    Case("rocm-partitions.txt", "unknown", 6, {"xgmi": 9}),
    Case("rocm-pcie-hops.txt", "pcie-numa", 4, {"sys": 4, "node": 2}),
    Case("rocm-quads.txt", "islands", 8, {"xgmi": 12, "sys": 16}),
    Case("rocm-single.txt", "single", 1, {}),
    Case("p2p-switch.txt", "switch", 4, {"link→": 6}),
    Case("p2p-cut-rows.txt", "switch", 3, {"link→": 2}),
    Case("p2p-cut-unsure.txt", "unknown", 3, {"link": 2}),
    Case("p2p-cube.txt", "cube-mesh", 8, {"link": 16, "pcie": 12}),
    Case("p2p-numa.txt", "pcie-numa", 4, {"pcie": 2, "sys": 4}),
    Case("p2p-no-peer-cut.txt", "pcie", 2, {"pcie": 1}),
    Case("p2p-bridge.txt", "pcie-bridge", 2, {"phb": 1}),
    Case("nvbandwidth-switch.txt", "switch", 8, {"link→": 28}),
    Case("nvbandwidth-no-bus.txt", "single", 1, {}),
    Case("nvbandwidth-one.txt", "single", 1, {}),
    Case("gpu-copy.log", "switch", 2, {"link→": 1}),
    Case("nccl-tests-switch.txt", "switch", 8, {"nvlink→": 28}),
    Case("nccl-tests-pcie.txt", "pcie", 4, {"pcie": 6}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
def test_class_and_links(case: Case) -> None:
    graph = graph_of(case.file)
    assert (classify(graph).name, len(graph.accelerators)) == (case.verdict, case.accelerators)
    assert tally(graph) == case.pairs


def test_every_fixture_is_in_the_table() -> None:
    assert {case.file for case in CASES} == {path.name for path in DATA.iterdir()}


def places(name: str) -> list[tuple[str, str | None, int | None, str | None]]:
    return [(each.id, each.cpu_affinity, each.numa_node, each.numa_affinity) for each in facts_of(name).accelerators]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("nvidia-markdown.txt", [("GPU0", "0-7", 1, "1"), ("GPU1", "8-15", 0, "0"), ("GPU2", "16-23", 0, "0")]),
        ("nvidia-blank-affinity.txt", [("GPU0", "0", 0, "0"), ("GPU1", None, 1, "1")]),
        ("nvidia-multitab.txt", [("GPU0", "0-23,48-71", 0, "0"), ("GPU1", "24-47", 1, "1")]),
        ("nvidia-numeric-numa.txt", [("GPU0", "0-71", None, "0,5-11"), ("GPU1", "72-143", None, "1,5-11")]),
        ("nvidia-elided.txt", [("GPU0", "0-15", 3, "3"), ("GPU1", "16-31", 1, "1")]),
        ("nvidia-no-header.txt", [("GPU0", None, None, None), ("GPU1", None, None, None)]),
    ],
)
def test_affinity(name: str, wanted: list[tuple[str, str | None, int | None, str | None]]) -> None:
    assert places(name) == wanted


def test_nics_have_names_and_ways() -> None:
    facts = facts_of("nvidia-ansi.txt")
    assert [(each.id, each.name) for each in facts.devices if each.kind == "nic"] == [
        ("NIC0", "mlx5_0"),
        ("NIC1", "mlx5_1"),
    ]
    assert {(link.a, link.b): link.kind for link in facts.links}["GPU0", "NIC0"] == "pix"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nvidia-then-p2p.txt", "line 8: another table follows: only the first is read"),
        ("nvidia-cut-switch.txt", "line 5: the row of GPU3 has 4 of 7 cells"),
        ("rocm-cut.txt", "no row for GPU1, GPU2"),
        ("nvlink-s-elided.txt", "line 6: parts are left out (...): links may be missing"),
        ("nvidia-quoted.txt", None),
        ("nvidia-mesh.txt", None),
    ],
)
def test_what_is_missing_is_said(name: str, said: str | None) -> None:
    notes = [str(note) for note in facts_of(name).notes]
    assert (said in notes) if said else not notes


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nvidia-cut-mesh.txt", "1 of 6 pairs are not known"),
        ("nvidia-cut-switch.txt", "every pair that is not cut off is linked; 12 × 5 peers = 60 links, a device has 12"),
        ("p2p-cut-unsure.txt", "1 of 3 pairs are not known"),
    ],
)
def test_of_a_dump_that_was_cut_no_more_is_said_than_is_known(name: str, why: str) -> None:
    verdict = classify(graph_of(name))
    assert verdict.evidence[0] == why
    assert verdict.confidence != "high"


def test_a_log_is_read_with_its_nics() -> None:
    facts = facts_of("nvidia-logged.txt")
    assert [(each.id, each.name) for each in facts.devices if each.kind == "nic"] == [("NIC0", "mlx5_3")]
    assert places("nvidia-logged.txt") == [("GPU0", "0-7", 0, "0"), ("GPU1", "8-15", 1, "1")]


def test_ranks_of_several_instances_are_several_devices() -> None:
    hosts = [(each.id, each.index, each.host) for each in facts_of("hccl-server-groups.json").accelerators]
    assert hosts == [("device0", 0, "10.0.0.2"), ("device1", 1, "10.0.0.2"), ("device2", 0, "10.0.0.3")]


def test_broken_xml_in_a_page_is_shown_where_it_stands() -> None:
    page = (DATA / "nccl-in-a-page.txt").read_text(encoding="utf-8")
    with pytest.raises(TopologyError, match="broken XML") as caught:
        read(page[: page.index("</system>")])
    assert caught.value.line == 17


def test_glued_cells_are_two() -> None:
    kinds = {(link.a, link.b): link.kind for link in facts_of("nvidia-glued.txt").links}
    assert (kinds["GPU0", "NIC0"], kinds["GPU0", "NIC1"], kinds["NIC0", "NIC1"]) == ("pix", "node", "node")


def test_two_directions_that_differ_are_unknown() -> None:
    text = (DATA / "nvidia-mesh.txt").read_text().replace("GPU1\tNV4", "GPU1\tSYS", 1)
    facts = read(text)
    assert len(facts.links) == 5
    assert any("GPU0 to GPU1 is NV4, the other way SYS: unknown" in note.text for note in facts.notes)


def test_a_row_that_lost_a_cell_is_not_used() -> None:
    text = (DATA / "nvidia-mesh.txt").read_text().replace("GPU2\tNV4\t", "GPU2\t", 1)
    facts = read(text)
    assert len(facts.links) == 6  # the other rows say it all
    assert [str(note) for note in facts.notes] == ["line 4: the row of GPU2 does not fit the header: not used"]


def test_refusals_are_facts_with_a_reason() -> None:
    verdict = classify(graph_of("npu-refused.txt"))
    assert verdict.evidence[1] == (
        "line 1: npu-smi says: dcmi model initialized failed, because the device is used. ret is -8020"
    )


def test_bandwidth_is_published_where_the_model_is_known() -> None:
    assert {(e.bandwidth_gbs, e.source) for e in graph_of("npu-910b.txt").edges} == {(28.0, "published")}
    assert {(e.bandwidth_gbs, e.source) for e in graph_of("nvidia-switch.txt").edges} == {(None, "label")}
    peers = [edge for edge in graph_of("nccl-switch.xml").edges if edge.is_peer]
    assert {(e.bandwidth_gbs, e.source) for e in peers} == {(225.0, "published")}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hello", "unknown format"),
        ("", "unknown format"),
        ("<system>\n <cpu>\n</system>", "3:3: NCCL topology XML: broken XML: mismatched tag"),
        ("<system/>", "1:1: NCCL topology XML: no device in it"),
        (
            '<!DOCTYPE s [<!ENTITY a "b">]>\n<system/>',
            "1:13: NCCL topology XML: a document type with declarations of its own is refused",
        ),
        ("GPU0 CPU Affinity\n", "2:1: nvidia-smi topo -m: no row of a matrix in it"),
    ],
)
def test_what_is_refused_has_a_place(text: str, says: str) -> None:
    with pytest.raises(TopologyError) as refusal:
        read(text)
    assert str(refusal.value).startswith(says)


def test_new_vendor_of_the_documentation() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/topology.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    text = "acc0 acc1 4\nacc1 acc2 4\nacc0 acc2 4\n"
    assert names["recognises"](text)
    assert classify(merge([names["parse"](text)])).name == "full-mesh"
    with pytest.raises(TopologyError, match="2:1: expected two accelerators"):
        names["parse"]("acc0 acc1 4\nacc0")
