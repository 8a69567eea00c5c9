"""Presets: what the graphs of known machines say, written here by hand, and that nothing about them drifts."""

from __future__ import annotations

import heapq
from io import StringIO
from itertools import combinations
from pathlib import Path

import pytest
from test_topology_sources import graph_of

from tokenring.cli.main import main
from tokenring.errors import ConfigurationError
from tokenring.planner.machines.presets import MAX_HOSTS, PRESETS, Preset, find, preset
from tokenring.planner.machines.server_spec import NETWORK, Level, Nics, Server, nics_of
from tokenring.planner.machines.server_spec import topology as server_topology
from tokenring.planner.machines.sourced import Figure
from tokenring.topology.model.bandwidth import published
from tokenring.topology.model.facts import PCIE_PATHS, unordered
from tokenring.topology.model.graph import Graph, merge
from tokenring.topology.model.schema import from_json, to_json
from tokenring.topology.ranks import Topology
from tokenring.topology.sources import read

EACH = pytest.mark.parametrize("known", PRESETS.values(), ids=lambda known: known.name)

# Class; accelerators; GB/s one way between ranks 0 and 1, and 0 and the last; NICs and GB/s of each.
WANTED = {
    "dgx-1-v100": ("cube-mesh", 8, 25.0, 6.0, 4, 12.5),
    "dgx-a100": ("switch", 8, 300.0, 300.0, 8, 25.0),
    "hgx-h100": ("switch", 8, 450.0, 450.0, 8, 50.0),
    "a800-8": ("switch", 8, 200.0, 200.0, 8, 25.0),
    "h800-8": ("switch", 8, 200.0, 200.0, 8, 25.0),
    "l40s-pcie-8": ("pcie-numa", 8, 31.0, 22.0, 2, 25.0),
    "l20-pcie-8": ("pcie-numa", 8, 31.0, 22.0, 2, 25.0),
    "rtx4090-pcie": ("pcie-numa", 8, 31.0, 16.0, 2, 12.5),
    "a10-pix-4": ("pcie-bridge", 4, 31.0, 31.0, 1, 12.5),
    "atlas-800-910a": ("islands", 8, 30.0, 31.0, 8, 12.5),
    "atlas-800t-a2": ("full-mesh", 8, 28.0, 28.0, 8, 25.0),
    "atlas-a3": ("switch", 16, 224.0, 196.0, 16, 25.0),
    "atlas-850": ("full-mesh", 8, 50.0, 50.0, 8, 400.0),
    "mi300x-8": ("full-mesh", 8, 64.0, 64.0, 8, 50.0),
}
# Accelerators that send through one NIC; first and last NIC of the first and last accelerator; the way there.
NICS = {
    "dgx-1-v100": (2, "NIC0", "NIC3", "pix"),
    "dgx-a100": (1, "NIC0", "NIC7", "pix"),
    "hgx-h100": (1, "NIC0", "NIC7", "pix"),
    "a800-8": (1, "NIC0", "NIC7", "pix"),
    "h800-8": (1, "NIC0", "NIC7", "pix"),
    "l40s-pcie-8": (4, "NIC0", "NIC1", "pix"),
    "l20-pcie-8": (4, "NIC0", "NIC1", "pix"),
    "rtx4090-pcie": (4, "NIC0", "NIC1", "node"),
    "a10-pix-4": (4, "NIC0", "NIC0", "phb"),
    "atlas-800-910a": (1, "NIC0", "NIC7", "network"),
    "atlas-800t-a2": (1, "NIC0", "NIC7", "network"),
    "atlas-a3": (1, "NIC0", "NIC15", "network"),
    "atlas-850": (1, "NIC0", "NIC7", "network"),
    "mi300x-8": (1, "NIC0", "NIC7", "pix"),
}


def graph_in(topology: Topology) -> Graph:
    assert topology.graph is not None
    return topology.graph


def resources(graph: Graph) -> list[tuple[str, str, float | None]]:
    """The edges that transfers share: all but the names of ways."""
    ends = {each.id for each in graph.devices if each.kind in ("accelerator", "nic")}
    ways = {id(edge) for edge in graph.edges if edge.kind in PCIE_PATHS and {edge.a, edge.b} <= ends}
    return [(edge.a, edge.b, edge.bandwidth_gbs) for edge in graph.edges if id(edge) not in ways]


def widest(graph: Graph, src: str, dst: str) -> float:
    """What one transfer gets along the widest path, not through other accelerators."""
    closed = {each.id for each in graph.accelerators} - {src, dst}
    around: dict[str, list[tuple[str, float]]] = {}
    for a, b, gbs in resources(graph):
        width = float("inf") if gbs is None else gbs
        around.setdefault(a, []).append((b, width))
        around.setdefault(b, []).append((a, width))
    waiting, done = [(-float("inf"), src)], set()
    while waiting:
        width, at = heapq.heappop(waiting)
        if at == dst:
            return -width
        if at not in done and at not in closed:
            done.add(at)
            for other, gbs in around.get(at, []):
                heapq.heappush(waiting, (max(width, -gbs), other))
    return 0.0


# ---------- graphs


def test_all_are_there() -> None:
    assert list(PRESETS) == list(WANTED) == list(NICS)


@EACH
def test_what_each_is(known: Preset) -> None:
    shape, count, near, far, nics, nic_gbs = WANTED[known.name]
    topology = preset(known.name)
    graph = graph_in(topology)
    assert topology.verdict is not None
    assert (topology.verdict.name, topology.verdict.confidence, known.shape) == (shape, "high", shape)
    assert (topology.world_size, len(graph.accelerators), topology.hosts) == (count, count, ("",) * count)
    assert (topology.bandwidth_gbs[0, 1], topology.bandwidth_gbs[0, count - 1]) == (near, far)
    assert [each.gbs for each in graph.of_kind("nic")] == [nic_gbs] * nics
    assert len(topology.bandwidth_gbs) == count * (count - 1)


@pytest.mark.parametrize(
    ("name", "file", "kind"),
    [
        ("atlas-800-910a", "npu-910a.txt", "hccs"),
        ("atlas-800t-a2", "npu-910b.txt", "hccs"),
        ("atlas-a3", "npu-a3.txt", "sio"),
        ("atlas-850", "npu-950-mesh-nics.txt", "ub"),
        ("mi300x-8", "rccl-mesh.xml", "xgmi"),
    ],
)
def test_links_are_those_that_tools_print(name: str, file: str, kind: str) -> None:
    assert links(graph_in(preset(name)), kind) == links(graph_of(file), kind) != {}


def links(graph: Graph, kind: str) -> dict[tuple[int, int], int]:
    """By places among the accelerators, how many links."""
    order = {each.id: number for number, each in enumerate(graph.accelerators)}
    of_kind = [edge for edge in graph.edges if edge.kind == kind and {edge.a, edge.b} <= order.keys()]
    places = [(*sorted((order[edge.a], order[edge.b])), edge.count or 1) for edge in of_kind]
    return {(a, b): count for a, b, count in places}


DGX_1 = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7
GPU0\t X \tNV1\tNV1\tNV2\tNV2\tSYS\tSYS\tSYS
GPU1\tNV1\t X \tNV2\tNV1\tSYS\tNV2\tSYS\tSYS
GPU2\tNV1\tNV2\t X \tNV2\tSYS\tSYS\tNV1\tSYS
GPU3\tNV2\tNV1\tNV2\t X \tSYS\tSYS\tSYS\tNV1
GPU4\tNV2\tSYS\tSYS\tSYS\t X \tNV1\tNV1\tNV2
GPU5\tSYS\tNV2\tSYS\tSYS\tNV1\t X \tNV2\tNV1
GPU6\tSYS\tSYS\tNV1\tSYS\tNV1\tNV2\t X \tNV2
GPU7\tSYS\tSYS\tSYS\tNV1\tNV2\tNV1\tNV2\t X
"""


def test_cube_mesh_is_the_one_that_a_dgx_1_prints() -> None:
    found = links(graph_in(preset("dgx-1-v100")), "nvlink")
    assert found == links(merge([read(DGX_1)]), "nvlink")
    assert [sum(count for pair, count in found.items() if gpu in pair) for gpu in range(8)] == [6] * 8


@EACH
def test_graph_has_what_is_published(known: Preset) -> None:
    """The figures here and those that a probe's graph takes for the model are the same."""
    graph = graph_in(known.topology())
    by_id = {each.id: each for each in graph.devices}
    for link in known.facts()[0].links:
        edge = next(e for e in graph.edges if unordered(e.a, e.b) == unordered(link.a, link.b) and e.kind == link.kind)
        assert edge.bandwidth_gbs == link.bandwidth_gbs
    peers = [edge for edge in graph.edges if edge.is_peer]
    for edge in peers:
        assert (edge.source == "published") == (published(edge.kind, by_id[edge.a]) is not None)


@EACH
def test_every_edge_is_a_known_resource(known: Preset) -> None:
    """Only the inside of a CPU has no width; and every kind has its share of what is reached."""
    graph = graph_in(known.topology(2))
    kinds = {each.id: each.kind for each in graph.devices}
    for a, b, gbs in resources(graph):
        assert (gbs is None) == ({kinds[a], kinds[b]} == {"host-bridge", "numa"})
    used = {edge.kind for edge in graph.edges}
    assert known.reached.keys() == {kind for kind in used if kind == "sys" or kind not in PCIE_PATHS}
    assert all(0 < figure.known() <= 1 for figure in known.reached.values())


@EACH
def test_ways_are_as_wide_as_their_paths(known: Preset) -> None:
    topology = known.topology()
    graph = graph_in(topology)
    for a, b in combinations(range(topology.world_size), 2):
        one, other = topology.devices[a], topology.devices[b]
        assert one is not None and other is not None
        direct = graph.between().get(unordered(one, other))
        if direct is None or not direct.is_peer:
            through_switch = 7 * 28.0 if known.name == "atlas-a3" else None
            assert topology.bandwidth_gbs[a, b] == (through_switch or widest(graph, one, other))
    for edge in graph.edges:
        if edge.kind in PCIE_PATHS and {edge.a, edge.b} & {each.id for each in graph.of_kind("nic")}:
            assert edge.bandwidth_gbs == widest(graph, edge.a, edge.b)


def test_pcie_uplinks_are_shared() -> None:
    """Four L40S of one socket reach the other by one uplink; pairs of A10 by one each."""
    graph = graph_in(preset("l40s-pcie-8"))
    above = {each.id: each.parent for each in graph.devices}
    assert [above[f"GPU{i}"] for i in range(8)] == ["pcie-switch0"] * 4 + ["pcie-switch1"] * 4
    assert ("pcie-switch0", "host-bridge0", 31.0) in resources(graph)
    assert ("numa0", "numa1", 22.0) in resources(graph)
    graph = graph_in(preset("a10-pix-4"))
    above = {each.id: each.parent for each in graph.devices}
    assert [above[f"GPU{i}"] for i in range(4)] == ["pcie-switch1"] * 2 + ["pcie-switch2"] * 2
    assert above["pcie-switch1"] == above["pcie-switch2"] == "pcie-switch0"
    labels = {unordered(e.a, e.b): e.kind for e in graph.edges if e.kind in PCIE_PATHS and "NIC0" not in (e.a, e.b)}
    pairs = {pair: "pxb" for pair in combinations([f"GPU{i}" for i in range(4)], 2)}
    assert labels == pairs | {("GPU0", "GPU1"): "pix", ("GPU2", "GPU3"): "pix"}


def test_a_narrow_uplink_narrows_only_what_passes_it() -> None:
    slot, narrow, sockets = (Figure(gbs, "made up", "assumed") for gbs in (31, 10, 20))
    levels = (Level("numa", 2, sockets), Level("pcie-switch", 1, narrow))
    server = Server(4, "GPU", "a GPU", "nvidia", Nics(1, slot, level=1), levels=levels, slot=slot)
    found = server_topology(server)
    assert found.bandwidth_gbs[0, 1] == found.bandwidth_gbs[2, 3] == 31
    assert {found.bandwidth_gbs[a, b] for a in (0, 1) for b in (2, 3)} == {10}


# ---------- over NICs


@EACH
def test_whose_nic_is_which(known: Preset) -> None:
    sharing, first, last, way = NICS[known.name]
    graph = graph_in(known.topology())
    nics = nics_of(graph)
    ends = list(nics)
    assert len(ends) == known.server.count
    assert (nics[ends[0]], nics[ends[-1]]) == ((first,), (last,))
    assert {sum(each == mine for each in nics.values()) for mine in nics.values()} == {sharing}
    assert {graph.between()[unordered(end, mine[0])].kind for end, mine in nics.items()} == {way}


@EACH
def test_two_hosts_are_what_probes_would_say(known: Preset) -> None:
    topology = preset(f"{known.name}*2")
    assert topology == Topology.of(merge(known.facts(2)))
    assert topology.verdict is not None
    assert topology.verdict.name == "multi-node"
    assert {inner.name for _, inner in topology.verdict.inside} == {known.shape}
    assert topology.hosts == ("node0",) * known.server.count + ("node1",) * known.server.count
    graph, nic_gbs = graph_in(topology), WANTED[known.name][5]
    nics = nics_of(graph)
    for a, b in ((0, known.server.count), (1, 2 * known.server.count - 1)):
        one, other = topology.devices[a], topology.devices[b]
        assert one is not None and other is not None
        assert (a, b) not in topology.bandwidth_gbs
        assert widest(graph, one, other) == nic_gbs
        assert nics[other][0].startswith("node1:NIC")
    assert (f"{nics['node0:' + known.server.prefix + '0'][0]}", NETWORK, nic_gbs) in resources(graph)


def test_three_hosts_and_one() -> None:
    assert preset("dgx-a100*3") == Topology.of(merge(PRESETS["dgx-a100"].facts(3)))
    assert preset("preset:dgx-a100*1") == preset("dgx-a100")
    assert find("preset:atlas-a3*4") == (PRESETS["atlas-a3"], 4)


def test_512_hosts() -> None:
    topology = preset("hgx-h100*512")
    assert topology.world_size == 4096 and len(topology.bandwidth_gbs) == 4096 * 7


@pytest.mark.parametrize("name", ["", "hgx", "hgx-h100*", "hgx-h100*x", "hgx-h100**2", "*2", "hgx-h100*-1", "a" * 999])
def test_other_names_are_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"unknown preset .*; choose one of dgx-1-v100, .*mi300x-8, or NAME\*4"
    ) as error:
        preset(name)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("hosts", [0, MAX_HOSTS + 1, 999_999_999])
def test_other_numbers_of_hosts_are_refused(hosts: int) -> None:
    with pytest.raises(ConfigurationError, match=f"asks for {hosts} hosts; from 1 to {MAX_HOSTS}"):
        preset(f"mi300x-8*{hosts}")


# ---------- saved, and read by `tokenring topology`


@EACH
@pytest.mark.parametrize("hosts", [1, 2])
def test_saved_and_read_again(known: Preset, hosts: int, tmp_path: Path) -> None:
    saved = to_json(known.facts(hosts))
    again = from_json(saved)
    assert Topology.of(merge(again)) == known.topology(hosts)
    assert Topology.of(merge(again)).digest == known.topology(hosts).digest
    assert to_json(again) == saved
    path, picture, html = tmp_path / "preset.json", tmp_path / "a.svg", tmp_path / "a.html"
    path.write_text(saved, encoding="utf-8")
    out = StringIO()
    assert main(["topology", "--from", str(path)], out, StringIO(), StringIO()) == 0
    assert f"class     {known.shape if hosts == 1 else 'multi-node'}, confidence high" in out.getvalue()
    assert f"{known.server.count * hosts} × " in out.getvalue()
    assert (
        main(["topology", "--from", str(path), "--svg", str(picture), "--html", str(html)], out, out, StringIO()) == 0
    )
    assert "NaN" not in picture.read_text(encoding="utf-8") and html.stat().st_size > 1000


def test_a_report_in_full() -> None:
    assert str(preset("a10-pix-4")) == A10


A10 = """\
4 × NVIDIA A10, PCIe only, below one host bridge

class     pcie-bridge, confidence high
because   4 pairs PXB, 2 pairs PIX

links, GB/s one way
      GPU0    GPU1    GPU2    GPU3    NIC0
GPU0  ·       pix 31  pxb 31  pxb 31  phb 31
GPU1  pix 31  ·       pxb 31  pxb 31  phb 31
GPU2  pxb 31  pxb 31  ·       pix 31  phb 31
GPU3  pxb 31  pxb 31  pix 31  ·       phb 31
NIC0  phb 31  phb 31  phb 31  phb 31  ·

place  NUMA  nearest NIC
GPU0   0     NIC0 (phb)
GPU1   0     NIC0 (phb)
GPU2   0     NIC0 (phb)
GPU3   0     NIC0 (phb)

favours   ring and bidirectional: each device sends to one neighbour at a time

ranks
  rank 0    GPU0
  rank 1    GPU1
  rank 2    GPU2
  rank 3    GPU3
"""
