"""Huawei's formats: what devices are called, what merges with what, what is refused and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import Facts
from tokenring.topology.model.graph import merge
from tokenring.topology.model.verdict import classify
from tokenring.topology.report.text import report
from tokenring.topology.sources import read

DATA = Path(__file__).resolve().parents[1] / "data" / "topology"


def facts_of(name: str) -> Facts:
    return read((DATA / name).read_text(encoding="utf-8"), name)


def notes_of(name: str) -> list[str]:
    return [str(note) for note in facts_of(name).notes]


NPU = tuple[str, "int | None", "int | None", "str | None", "str | None", "str | None", "str | None"]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "npu-info-910b.txt",
            [
                ("NPU0", 0, None, "0000:a1:00.0", "910B4", None, None),
                ("NPU3", 3, None, "0000:a4:00.0", "910B4", None, None),
            ],
        ),
        (
            "npu-info-a3.txt",
            [
                ("Phy-ID10", None, 10, "0000:b1:00.0", "Ascend910", "A3", "NPU5"),
                ("Phy-ID11", None, 11, "0000:b3:00.0", "Ascend910", "A3", "NPU5"),
                ("Phy-ID12", None, 12, None, "Ascend910", "A3", "NPU6"),
                ("Phy-ID13", None, 13, "0000:b7:00.0", "Ascend910", "A3", "NPU6"),
            ],
        ),
        (
            "npu-info-950.txt",
            [
                ("NPU0", 0, None, "0000:31:00.0", "Ascend950PR", "950", None),
                ("NPU1", 1, None, "0000:32:00.0", "Ascend950PR", "950", None),
            ],
        ),
        (
            "npu-info-310p.txt",
            [
                ("NPU2.0", 0, None, "0000:05:00.0", "310P3", None, "NPU2"),
                ("NPU2.1", 1, None, "0000:05:00.0", "310P3", None, "NPU2"),
            ],
        ),
        (
            "npu-map-910b.txt",
            [
                ("NPU0", 0, None, None, "Ascend 910B2C", None, None),
                ("NPU1", 1, None, None, "Ascend 910B2C", None, None),
            ],
        ),
        (
            "npu-map-a3.txt",
            [
                ("Phy-ID10", 0, 10, None, "Ascend910", "A3", "NPU5"),
                ("Phy-ID11", 1, 11, None, "Ascend910", "A3", "NPU5"),
            ],
        ),
        (
            "npu-map-950.txt",
            [
                ("NPU0", 0, 0, None, "Ascend950PR", "950", None),
                ("NPU1", 1, 1, None, "Ascend950PR", "950", None),
            ],
        ),
        (
            "hccl-2.0-one-server.json",
            [("rank0", 0, 0, None, None, "950", None), ("rank1", 9, 1, None, None, "950", None)],
        ),
    ],
)
def test_npus(name: str, wanted: list[NPU]) -> None:
    assert [
        (each.id, each.index, each.phy_id, each.bus_id, each.model, each.arch, each.package)
        for each in facts_of(name).accelerators
    ] == wanted


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("npu-info-910b.txt", ["line 10: NPU 3 reports health Warning"]),
        (
            "npu-info-310p.txt",
            [
                "line 13: rows are left out: which NPUs they name is not known",
                "line 14: NPU 7 is cut before its chips: not used",
            ],
        ),
        ("npu-refused-pod.txt", ["line 1: npu-smi says: This device does not support querying spod-info."]),
        ("hccn-link.txt", ["line 1: link status: DOWN"]),
        ("hccn-health.txt", ["line 1: link status : PARTIAL LINK", "line 3: port 2 : DOWN"]),
        ("hccl-1.2.json", ["super pod 7, linked by HCCS: s0, s1"]),
        ("hccl-2.0.json", ["layer 1: 2 ranks on CLOS az"]),
        ("ascend-tor.json", ["tor0 has IsSharedTor 1"]),
        ("ascend950-pcie.json", ["3 NPUs reach a network: layer 3, ROCE"]),
        (
            "npu-pod.txt",
            [
                "line 1: SDID: 4259841",
                "line 2: Super Pod Size: 48",
                "line 3: Super Pod ID: 2",
                "line 4: Server Index: 3",
            ],
        ),
        (
            "hccl-1.0-of-a-page.json",
            [
                "line 1: no strict JSON: what stands before the JSON is not read",
                "line 4: no strict JSON: comments, which JSON does not have",
                "line 11: no strict JSON: a comma too many",
                "line 12: no strict JSON: parts are left out (...): what they said is unknown",
                "line 17: no strict JSON: a comma too few",
                "the table's status is 'initializing': ranks may be missing",
            ],
        ),
    ],
)
def test_notes(name: str, says: list[str]) -> None:
    assert notes_of(name) == says


def test_a_physical_id_of_two_chips_is_none() -> None:
    text = (DATA / "npu-info-a3.txt").read_text().replace("| 1     11 ", "| 1     10 ")
    found = [(each.id, each.phy_id) for each in read(text).accelerators]
    assert found == [("NPU5.0", None), ("NPU5.1", None), ("Phy-ID12", 12), ("Phy-ID13", 13)]


def test_lanes_that_are_down() -> None:
    assert "line 3: HCCS links [2] have lanes that are down" in notes_of("npu-hccs.txt")


def test_ports() -> None:
    found = {each.id: (each.name, each.gbs) for each in facts_of("hccn-950.txt").devices if each.kind == "nic"}
    assert found == {"0/2": (None, 50.0), "1/2": (None, 50.0), "1/3": (None, None), "end0v0": ("10.6.0.9", None)}
    assert {link.a: link.state for link in facts_of("hccn-950.txt").links} == {"0/2": "up", "1/2": "down"}
    assert [each.gbs for each in facts_of("hccn-status.txt").devices] == [12.5]
    assert [(each.id, each.name) for each in facts_of("hccn-conf.txt").devices] == [
        ("NPU0 port", "10.5.0.1"),
        ("NPU3 port", "10.5.0.4"),
    ]


def test_measurements_of_the_largest_transfer() -> None:
    assert [(each.gbs, each.both_gbs) for each in facts_of("dmi-pair.json").measurements] == [(24.5, 48.0)]
    slow = {(each.a, each.b): each.gbs for each in facts_of("dmi-matrix.txt").measurements}
    assert (len(slow), slow["NPU0", "NPU1"], slow["NPU1", "NPU2"]) == (6, 25.1, 12.0)


def test_outputs_of_one_machine_are_one_machine() -> None:
    topo = "\t   Phy-ID10   Phy-ID11   Phy-ID12   Phy-ID13\n" + "".join(
        f"Phy-ID{10 + a}   "
        + "   ".join("X" if a == b else "SIO" if a ^ b == 1 else "HCCS_SW" for b in range(4))
        + "\n"
        for a in range(4)
    )
    graph = merge([read(topo), facts_of("npu-info-a3.txt"), facts_of("npu-map-a3.txt")])
    assert [(each.id, each.bus_id) for each in graph.accelerators][:2] == [
        ("Phy-ID10", "0000:b1:00.0"),
        ("Phy-ID11", "0000:b3:00.0"),
    ]
    assert len(graph.accelerators) == 4
    assert classify(graph).name == "switch"
    assert {edge.bandwidth_gbs for edge in graph.edges if edge.switched} == {196.0}
    assert {edge.bandwidth_gbs for edge in graph.edges if edge.kind == "sio"} == {None}  # nobody publishes it


def test_measured_beats_published() -> None:
    topo = "\t   NPU0   NPU1   NPU2\nNPU0   X   HCCS   HCCS\nNPU1   HCCS   X   HCCS\nNPU2   HCCS   HCCS   X\n"
    graph = merge([read(topo), facts_of("dmi-matrix.txt")])
    assert {(e.a, e.b): (e.bandwidth_gbs, e.source) for e in graph.edges} == {
        ("NPU0", "NPU1"): (25.1, "measured"),
        ("NPU0", "NPU2"): (25.0, "measured"),
        ("NPU1", "NPU2"): (12.0, "measured"),
    }


def test_rank_table_and_topology_file_are_one_server() -> None:
    graph = merge([facts_of("ascend950-ring.json"), facts_of("hccl-2.0-one-server.json")])
    assert [(each.id, each.phy_id, each.host) for each in graph.accelerators] == [
        ("NPU0", 0, "pod"),
        ("NPU1", None, None),
        ("NPU8", None, None),
        ("NPU9", 1, "pod"),
    ]


def test_a_switch_above_a_mesh_is_told() -> None:
    verdict = classify(merge([facts_of("ascend950-mesh.json")]))
    assert verdict.evidence[1] == "a switch is there besides, the level above: CLOS1.0"
    verdict = classify(merge([facts_of("ascend950-quads.json")]))
    assert verdict.evidence == ("2 × full-mesh of 4; joined by CLOS0.0",)


def test_a_collection_is_one_machine() -> None:
    facts = facts_of("ascend-collected.txt")
    assert [(each.id, each.bus_id, each.model, each.name) for each in facts.devices] == [
        ("NPU0", None, "Ascend 910B1", None),
        ("NPU1", "0000:5a:00.0", "Ascend 910B1", None),
        ("NPU1 port", None, None, "10.7.0.2"),
        ("network", None, None, None),
    ]
    assert notes_of("ascend-collected.txt") == ["line 24: NPU1: link status: DOWN"]
    graph = merge([facts])
    assert [edge.bandwidth_gbs for edge in graph.edges] == [28.0]
    assert report(graph, classify(graph)).startswith("2 × Ascend 910B1, full mesh")


def test_a_ring_in_quads() -> None:
    """910A: two meshes of four. Behind a switch (A3) nothing of the kind is said."""
    graph = merge([facts_of("npu-910a.txt")])
    assert report(graph, classify(graph)).count("; a ring uses 1 of the 3 links of each") == 2
    graph = merge([facts_of("npu-a3.txt")])
    assert "a ring uses" not in report(graph, classify(graph))


TABLE = '{"version": "1.0", "server_list": [{"server_id": "a", "device": [%s]}]}'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TABLE % '{"device_id": "0", "device_id": "1"}', "1:85: HCCL rank table: 'device_id' stands twice"),
        (TABLE % '{"device_id": true}', "1:67: HCCL rank table: a device without a number as its 'device_id'"),
        (
            TABLE % '{"device_id": 0, "rank_id": 1}, {"device_id": 1, "rank_id": 1}',
            "1:83: HCCL rank table: rank1 stands",
        ),
        (TABLE % '"device_id"', "1:55: HCCL rank table: 'device' is not a list of objects"),
        ('{"server_list": 1, "server_count": 1}', "1:2: HCCL rank table: 'server_list' is not a list of objects"),
        ('{"version": "3.0", "server_list": [], "server_count": 0}', "1:2: HCCL rank table: rank table version '3.0'"),
        ('{"rank_count": 1,\n "rank_list": [{"rank_id": 0', "2:29: HCCL rank table: the text ends before its object"),
        ('{"rank_count": 1, "rank_list": ' + "[" * 100_000, "1:95: HCCL rank table: JSON nested deeper than 64"),
        ('{"rank_count": 1, "rank_list": [{]}', "1:34: HCCL rank table: broken JSON at ']'"),
        (
            '{"peer_list": [{"local_id": 0}], "edge_list": [\n{"local_a": 3}]}',
            "2:2: Ascend 950 topology JSON: an edge whose 'local_a' is not one of the peers",
        ),
        (
            '{"tor_count": 1, "server_list": [{"tor_id": 0, "server": [{"server_ip": "a", "npu_count": 99999999}]}]}',
            "1:78: Ascend ToR JSON: more than 1024 devices",
        ),
        ("| npu-smi 24.1 |\n", "2:1: npu-smi info: no NPU in it"),
        ("NPU ID  Chip ID  Chip Name\n", "2:1: npu-smi info -m: no chip in it"),
        ("Unidirectional Peer to Peer Test\n", "1:1: ascend-dmi p2p: no measurement between two NPUs in it"),
    ],
)
def test_refusals_have_a_place(text: str, says: str) -> None:
    with pytest.raises(TopologyError) as refusal:
        read(text)
    assert str(refusal.value).startswith(says)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        '{"server_count": 1, "server_list": [' + "{" * 500_000,
        '{"server_count": 1, "server_list": [' + "/*" * 400_000,
        '{"server_count": 1, "server_list": [' + '{"a": 1},' * 100_000 + "]}",
        '{"peer_list": [' + ",".join(f'{{"local_id": {i}}}' for i in range(128)) + '], "edge_list": ['
        + ",".join(
            f'{{"link_type": "PEER2NET", "topo_type": "CLOS", "protocols": ["UB_TP"], "local_a": {i}}}'
            for i in range(128)
        )
        + "]}",
        "NPU ID Chip ID Chip Name\n" + "0 0 0\n" * 200_000,
        "NPU ID Chip " * 100_000,
        "| npu-smi\n" + "| 0 a | b | c |\n" * 100_000,
        "Unidirectional Peer to Peer\n0 1\n" + "1 2 3\n" * 200_000,
        "link status: UP\n" * 200_000,
        "npu-smi info\n" * 3_000,
        "hccn_tool -i 0\nnpu-smi info -i 0\nNPU ID : 1\n" * 1_000,
        "NPU ID" + " " * 1_000_000 + ":",
    ],
    ids=lambda text: text[:30].strip(),
)  # fmt: skip
def test_big_ones_have_an_answer(text: str) -> None:
    """Within the time limit: each takes minutes if its cost grows with the square of its length."""
    try:
        graph = merge([read(text)])
    except TopologyError as error:
        assert error.line is not None or "unknown format" in error.message
    else:
        assert report(graph, classify(graph))
