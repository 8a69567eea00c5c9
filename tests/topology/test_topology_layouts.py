"""Twenty layouts in full, one for each format and quirk: every pair, its links, their width and who says so.

The pairs are written here from what the fixtures show, not taken from the program. What is not written
has no link at all.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import pytest
from test_topology_sources import graph_of

from tokenring.topology.model.graph import Edge, Graph

Pairs = set[frozenset[str]]


def all_of(*ids: object) -> Pairs:
    """Every pair of some."""
    return {frozenset((str(a), str(b))) for a, b in combinations(ids, 2)}


def across(*groups: range) -> Pairs:
    """Every pair of two different groups."""
    return all_of(*(i for group in groups for i in group)) - within(*groups)


def within(*groups: range) -> Pairs:
    """Every pair inside one of the groups."""
    return {pair for group in groups for pair in all_of(*group)}


def pairs(text: str) -> Pairs:
    """`0-1 2-3`"""
    return {frozenset(word.split("-")) for word in text.split()}


def ring(count: int) -> Pairs:
    return {frozenset((str(i), str((i + 1) % count))) for i in range(count)}


DGX_1_SINGLE = pairs("0-1 0-2 1-3 2-3 4-5 4-6 5-7 6-7 0-3 1-2 4-7 5-6 0-4 1-5 2-6 3-7")
LADDER_FOUR, LADDER_TWO, LADDER_ONE = pairs("0-1 2-3 4-5 6-7"), pairs("1-3 1-7 3-5 5-7"), pairs("0-2 0-6 2-4 4-6")
P2P_ONE, P2P_TWO = pairs("0-1 0-2 1-3 2-4 3-5 4-6 5-7 6-7"), pairs("0-3 0-6 1-2 1-7 2-3 4-5 4-7 5-6")
QUADS, FOURS, EIGHT, SIXTEEN = (range(4), range(4, 8)), (range(2), range(2, 4)), range(8), range(16)


class Layout(NamedTuple):
    file: str
    prefix: str  # of the accelerators' ids; what follows it is in the pairs
    links: dict[str, Pairs]  # kind, ×count, → where switched, GB/s one way (? where unknown), who says so
    switch_ports: dict[str, str] = {}  # a switch, and what each accelerator has to it  # noqa: RUF012


LAYOUTS = [
    # nvidia-smi topo -m: tabs, a mesh with NICs; a switch; pairs over PCIe; the cube of a header without tabs
    Layout("nvidia-mesh.txt", "GPU", {"nvlink×4 ? label": all_of(*range(4))}),
    Layout("nvidia-switch.txt", "GPU", {"nvlink×18 ? label": all_of(*EIGHT)}),
    Layout("nvidia-pairs-spaces.txt", "GPU", {"nvlink×4 ? label": within(*FOURS), "sys ? label": across(*FOURS)}),
    Layout(
        "nvidia-cube-squashed-header.txt",
        "GPU",
        {"nvlink×1 ? label": DGX_1_SINGLE, "sys ? label": all_of(*EIGHT) - DGX_1_SINGLE},
    ),
    # rows wrapped, a device off the fabric
    Layout("nvidia-wrapped.txt", "GPU", {"pix ? label": within(*FOURS), "pxb ? label": across(*FOURS)}),
    Layout(
        "nvidia-degraded.txt",
        "GPU",
        {
            "nvlink×18 ? label": all_of(*(i for i in EIGHT if i != 1)),
            "node ? label": all_of(*EIGHT) - all_of(*(i for i in EIGHT if i != 1)),
        },
    ),
    # npu-smi info -t topo: two quads, the mesh of a known model, two dies a package behind a switch, UB bridges
    Layout("npu-910a.txt", "NPU", {"hccs ? label": within(*QUADS), "sys ? label": across(*QUADS)}),
    Layout("npu-910b.txt", "NPU", {"hccs 28 published": all_of(*EIGHT)}),
    Layout(
        "npu-a3.txt",
        "Phy-ID",
        {
            "sio ? label": within(*(range(i, i + 2) for i in range(0, 16, 2))),
            "hccs→ 196 published": across(*(range(i, i + 2) for i in range(0, 16, 2))),
        },
    ),
    Layout("npu-950-pairs.txt", "NPU", {"ub ? label": within(*FOURS), "sys ? label": across(*FOURS)}),
    # the Ascend 950 driver's JSON: ports counted, layers
    Layout("ascend950-quads.json", "NPU", {"ub×1 ? label": within(*QUADS)}, {"CLOS0.0": "ub×4→ ? label"}),
    Layout(
        "ascend950-near-mesh.json",
        "NPU",
        {"ub×2 ? label": pairs("0-1"), "ub×1 ? label": all_of(*range(4)) - pairs("0-1 1-3")},
    ),
    # NCCL's and RCCL's XML: links by target class, counts, ladders
    Layout(
        "nccl-switch.xml",
        "GPU",
        {"sys ? label": across(*FOURS)},
        {"0000:a0:00.0": "nvlink×9→ 225 published", "0000:a1:00.0": "nvlink×9→ 225 published"},
    ),
    Layout(
        "rccl-ladder.xml",
        "GPU",
        {
            "xgmi×4 200 published": LADDER_FOUR,
            "xgmi×2 100 published": LADDER_TWO,
            "xgmi×1 50 published": LADDER_ONE,
            "sys ? label": across(*QUADS) - LADDER_TWO - LADDER_ONE,
        },
    ),
    Layout("rccl-ring.xml", "GPU", {"xgmi×1 ? label": ring(4)}),
    # rocm-smi, mx-smi, hwloc, a PCI tree
    Layout("rocm-quads.txt", "GPU", {"xgmi ? label": within(*QUADS), "sys ? label": across(*QUADS)}),
    Layout("metax-pairs.txt", "GPU", {"mxlink ? label": within(*FOURS), "node ? label": across(*FOURS)}),
    Layout("hwloc-pairs-and-cpus.xml", "GPU", {"nvlink×2 40 published": within(*FOURS), "sys ? label": across(*FOURS)}),
    Layout(
        "lspci-switches.txt",
        "0000:",
        {"pix ? label": pairs("03:00.0-04:00.0"), "phb ? label": pairs("03:00.0-06:00.0 04:00.0-06:00.0")},
    ),
    # a bandwidth test: the cube from measured numbers alone
    Layout(
        "p2p-cube.txt",
        "GPU",
        {
            "link 24.2 measured": P2P_ONE,  # half of what both ways carry
            "link 48.4 measured": P2P_TWO,
            "pcie 5.6 measured": all_of(*EIGHT) - P2P_ONE - P2P_TWO,
        },
    ),
]


def said(edge: Edge) -> str:
    count = "" if edge.count is None else f"×{edge.count}"
    width = "?" if edge.bandwidth_gbs is None else f"{edge.bandwidth_gbs:g}"
    return f"{edge.kind}{count}{'→' if edge.switched else ''} {width} {edge.source}"


def links(graph: Graph, prefix: str) -> dict[str, Pairs]:
    """The pairs of accelerators by what joins them."""
    ends = {device.id for device in graph.accelerators}
    found: dict[str, Pairs] = {}
    for edge in graph.between().values():
        if {edge.a, edge.b} <= ends:
            pair = frozenset((edge.a.removeprefix(prefix), edge.b.removeprefix(prefix)))
            found.setdefault(said(edge), set()).add(pair)
    return found


def switch_ports(graph: Graph) -> dict[str, set[tuple[str, str]]]:
    """What each accelerator has to each switch."""
    ends = {device.id for device in graph.accelerators}
    found: dict[str, set[tuple[str, str]]] = {}
    for edge in graph.edges:
        for device, other in ((edge.a, edge.b), (edge.b, edge.a)):
            if edge.is_peer and edge.switched and device in ends and other not in ends:
                found.setdefault(other, set()).add((device, said(edge)))
    return found


def test_there_are_twenty() -> None:
    assert len({layout.file for layout in LAYOUTS}) == 20


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.file)
def test_every_link(layout: Layout) -> None:
    graph = graph_of(layout.file)
    assert links(graph, layout.prefix) == layout.links
    devices = [device.id for device in graph.accelerators]
    wanted = {switch: {(device, word) for device in devices} for switch, word in layout.switch_ports.items()}
    assert switch_ports(graph) == wanted
