"""Shapes of emulated links as data: links, ways, loads and the tools' lines. No root is needed."""

from __future__ import annotations

from typing import Any

import pytest
from networks import Network, islands, mesh, ring, switch

from tokenring.emulate.build import explain
from tokenring.emulate.plan import Batch, bucket, make_plan, packet_bytes
from tokenring.emulate.shapes import SHAPES, Shape
from tokenring.emulate.ways import heaviest, ways, wires
from tokenring.errors import ConfigurationError

EVERY: list[dict[str, Any]] = [
    *({"kind": kind} for kind in SHAPES),
    {"kind": "pcie-tree", "half_duplex_uplink": True, "uplink_gbit": 0.05},
    {"kind": "two-node", "nic_per_rank": True},
    {"kind": "two-node", "node_fabric": "switch"},
    {"kind": "two-node", "node_fabric": "switch", "nic_per_rank": True},
    {"kind": "two-node", "half_duplex_uplink": True},
]


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("options", EVERY, ids=str)
def test_every_pair_has_a_way_and_every_wire_a_use(options: dict[str, Any], ranks: int) -> None:
    fabric = Shape(ranks=ranks, link_gbit=0.1, **options).fabric
    found = ways(fabric)
    assert set(found) == {(a, b) for a in range(ranks) for b in range(ranks) if a != b}
    used = {wire for way in found.values() for wire in way}
    idle = {name for name in wires(fabric) if name not in used}
    assert not idle or (ranks == 2 and options["kind"] == "pcie-tree"), "one leaf needs no uplink"
    assert all(len(set(way)) == len(way) for way in found.values())


def alike(shape: Shape, network: Network) -> None:
    """The same pairs share wires, of the same rates, as in a network that was written down elsewhere."""
    found, gbit = ways(shape.fabric), wires(shape.fabric)
    for some in found:
        rates = sorted(gbit[wire] for wire in found[some])
        assert rates == sorted(network.gbs[part] for part in network.ways[some]), some
        for other in found:
            ours = sorted(gbit[wire] for wire in set(found[some]) & set(found[other]))
            theirs = sorted(network.gbs[part] for part in set(network.ways[some]) & set(network.ways[other]))
            assert ours == theirs, (some, other)


@pytest.mark.parametrize("ranks", [4, 6, 8])
def test_shapes_are_what_they_are_called(ranks: int) -> None:
    half = ranks // 2
    alike(Shape("full-mesh", ranks, 0.1), mesh(ranks, 0.1))
    alike(Shape("switch", ranks, 0.1), switch(ranks, 0.1))
    alike(Shape("ring", ranks, 0.1), ring(ranks, 0.1))
    for fabric in ("full-mesh", "switch"):
        alike(Shape("two-node", ranks, 0.1, 0.05, False, fabric), _one_uplink(half, fabric))


def _one_uplink(half: int, inside: str) -> Network:
    """Two islands with one link between them: not two uplinks that meet in a root."""
    network = islands([half, half], 0.1, 0.05, inside=inside)
    for pair, way in network.ways.items():
        network.ways[pair] = tuple(part for part in way if not (part.startswith("up") and part.endswith("in")))
    return network


def test_tree() -> None:
    """Three leaves: what leaves one passes its uplink and that of the other."""
    found = ways(Shape("pcie-tree", 6, 0.1).fabric)
    assert found[0, 1] == ("0 port out", "1 port in")
    assert found[0, 5] == ("0 port out", "leaf0>root", "root>leaf2", "5 port in")
    half = ways(Shape("pcie-tree", 6, 0.1, half_duplex_uplink=True).fabric)
    assert half[0, 5][1:3] == ("leaf0-root", "leaf2-root") and half[5, 0][1:3] == ("leaf2-root", "leaf0-root")


def test_nic_per_rank() -> None:
    for inside, near in (("full-mesh", ("0>1",)), ("switch", ("0 port out", "1 port in"))):
        shape = Shape("two-node", 4, 0.1, 0.02, node_fabric=inside, nic_per_rank=True)
        found = ways(shape.fabric)
        assert found[0, 1] == near and found[0, 3] == ("0 nic out", "3 nic in")
        assert wires(shape.fabric)["0 nic out"] == 0.02


def test_heaviest() -> None:
    around = {(rank, (rank + 1) % 4): 1_000_000 for rank in range(4)}
    load = heaviest(Shape("two-node", 4, 0.1, 0.02).fabric, around)
    assert load is not None and load.wire == "node0>node1" and load.seconds == pytest.approx(0.4)
    opposite = heaviest(Shape("ring", 4, 0.1).fabric, {(0, 2): 1_000_000, (0, 1): 500_000})
    assert opposite is not None and opposite.wire == "0>1" and opposite.seconds == pytest.approx(0.12)
    both = {(0, 2): 1_000_000, (2, 0): 1_000_000}
    shared = heaviest(Shape("two-node", 4, 0.1, half_duplex_uplink=True).fabric, both)
    assert shared is not None and shared.wire == "node0-node1" and shared.seconds == pytest.approx(0.16)
    assert heaviest(Shape("ring", 4, 0.1).fabric, {}) is None


@pytest.mark.parametrize("options", EVERY, ids=str)
def test_plan_is_whole(options: dict[str, Any]) -> None:
    """Every node is made once, every device brought up and shaped where its link says so, every route written."""
    fabric = Shape(ranks=4, link_gbit=0.1, **options).fabric
    plan = make_plan(fabric, "x-")
    assert plan.namespaces.lines == tuple(f"netns add x-{node}" for node in fabric.nodes)
    lines = [(batch.namespace, line) for batch in plan.batches for line in batch.lines]
    for link in fabric.links:
        for node, device in (link.a, link.b):
            assert sum(at == f"x-{node}" and line.startswith(f"link set {device} ") for at, line in lines) == 1
    shaped = sum(" tbf " in line for _, line in lines)
    assert shaped == sum(1 if link.half_duplex else 2 for link in fabric.links)
    assert sum(line.startswith("route add") for _, line in lines) == len(fabric.routes) == 12
    devices = [device for link in fabric.links for _, device in (link.a, link.b)]
    assert max(map(len, devices)) < 16, "what the kernel takes as a name"
    assert plan.settings["net/ipv4/ip_forward"] == str(int(options["kind"] == "ring"))


def test_rates_are_of_payload() -> None:
    """1,448 of 1,514 bytes, and acknowledgements of what comes the other way."""
    words = bucket(0.1, 1500).split()
    rate, burst = int(words[words.index("rate") + 1].removesuffix("bit")), int(words[words.index("burst") + 1])
    assert 1.04e8 < rate < 1.05e8
    assert 1514 + 12_500 < burst < 1600 + 12_500, "one packet and a millisecond"


def test_packets_are_as_small_as_the_processor_allows() -> None:
    sizes = [packet_bytes(Shape("full-mesh", ranks, gbit).fabric) for ranks, gbit in ((2, 0.05), (8, 0.05), (16, 10.0))]
    assert sizes == [1500, 17500, 64000]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "torus"}, "unknown shape 'torus'; choose one of full-mesh, switch"),
        ({"ranks": 5}, "5 ranks cannot be emulated: use an even number from 2 to 16"),
        ({"ranks": 18}, "18 ranks cannot be emulated"),
        ({"link_gbit": 0.0}, "link of 0 Gbit/s: use 0.001 to 100"),
        ({"link_gbit": float("nan")}, "link of nan Gbit/s"),
        ({"kind": "two-node", "uplink_gbit": 1e6}, "uplink of 1e+06 Gbit/s"),
        ({"uplink_gbit": 0.1}, "full-mesh has no uplink"),
        ({"half_duplex_uplink": True}, "full-mesh has no uplink"),
        ({"kind": "pcie-tree", "nic_per_rank": True}, "pcie-tree has no nodes"),
        ({"kind": "two-node", "node_fabric": "ring"}, "unknown node fabric 'ring'"),
        ({"kind": "two-node", "nic_per_rank": True, "half_duplex_uplink": True}, "no shared uplink to be half duplex"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Shape(**{"kind": "full-mesh", "ranks": 4, "link_gbit": 0.1, **change})
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("line", "said", "wanted"),
    [
        ("link add a type veth peer name b", "Error: Unknown device type.", "'modprobe veth'"),
        ("qdisc add dev a root tbf rate 1bit", "Error: Specified qdisc kind is unknown.", "'modprobe sch_tbf'"),
        ("netns add a", "mount --make-shared /run/netns failed: Operation not permitted", "--privileged"),
    ],
)
def test_what_a_machine_lacks_is_named(line: str, said: str, wanted: str) -> None:
    text = explain(Batch("ip", "x", ("link set lo up", line)), f"{said}\nCommand failed -:2\n")
    assert f"'ip {line}' failed: {said}" in text and wanted in text


def test_texts() -> None:
    assert str(Shape("switch", 4, 0.1)) == "switch, ports of 0.1 Gbit/s"
    text = "two-node, switch inside, links of 0.2 Gbit/s, one uplink of 0.05 Gbit/s, half duplex"
    assert str(Shape("two-node", 4, 0.2, 0.05, True, "switch")) == text
    assert str(Shape("two-node", 4, 0.2, nic_per_rank=True)).endswith("a NIC of 0.2 Gbit/s for each rank")
