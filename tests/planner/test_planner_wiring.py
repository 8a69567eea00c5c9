"""From topologies to ways and wires, by hand; groups of ranks, and what tensor parallelism leaves of shared wires."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from nets import call, clusters, of_hosts, pcie_tree, setting, tree_fabric, two_node, with_network, workload
from test_topology_sources import graph_of

import tokenring as tr
from tokenring.errors import ConfigurationError
from tokenring.planner.choosing.auto import plan_call
from tokenring.planner.interconnects.interconnect import (
    Interconnect,
    LinkFabric,
    full_mesh,
    of_one_host,
    ring,
    ring_fabric,
    switch,
    switch_fabric,
)
from tokenring.planner.interconnects.rank_order import context_parallel_group, good_order, heads_of_group, node_sizes
from tokenring.planner.interconnects.wiring import ASSUMED, REACHED, interconnect_of
from tokenring.planner.machines.presets import preset
from tokenring.topology.model.facts import Device
from tokenring.topology.model.graph import Edge, Graph
from tokenring.topology.ranks import Topology


def way(net: Interconnect, src: int, dst: int) -> list[tuple[str, Any]]:
    return [(wire, pytest.approx(net.gbs(wire))) for wire in net.way(src, dst)]


def widths(net: Interconnect, src: int, dst: int) -> list[float]:
    return [net.gbs(wire) for wire in net.way(src, dst)]


class TestShapes:
    def test_mesh(self) -> None:
        assert way(full_mesh(4, 2.0), 1, 3) == [("0:1>3", 2.0)]

    def test_switch(self) -> None:
        assert way(switch(4, 2.0), 1, 3) == [("0:1>", 2.0), ("0:>3", 2.0)]

    def test_ring_passes_through_the_shorter_way(self) -> None:
        net = ring(5, 2.0)
        assert net.way(0, 2) == ("0:0>1", "0:1>2")
        assert net.way(0, 3) == ("0:0>4", "0:4>3")

    def test_ring_at_a_tie(self) -> None:
        """Opposite ranks: even sources go up, so that no direction carries all."""
        net = ring(4, 2.0)
        assert net.way(0, 2) == ("0:0>1", "0:1>2")
        assert net.way(1, 3) == ("0:1>0", "0:0>3")

    def test_tree(self) -> None:
        net = pcie_tree(4, 2.0, 3.0)
        assert way(net, 0, 1) == [("0:0>", 2.0), ("0:>1", 2.0)]
        assert way(net, 0, 3) == [("0:0>", 2.0), ("0:leaf0>", 3.0), ("0:>leaf1", 3.0), ("0:>3", 2.0)]

    def test_half_duplex_uplinks_have_one_name_both_ways(self) -> None:
        net = pcie_tree(4, 2.0, 3.0, half_duplex=True)
        assert net.way(0, 3)[1:3] == ("0:leaf0", "0:leaf1")
        assert net.way(3, 0)[1:3] == ("0:leaf1", "0:leaf0")

    def test_two_nodes_share_an_uplink(self) -> None:
        net = two_node(8, 2.0, 0.5)
        assert way(net, 1, 6) == [("0:uplink>", 0.5), ("1:>uplink", 0.5)]
        assert way(net, 5, 6) == [("1:1>2", 2.0)]
        assert net.local == 4

    def test_two_nodes_with_a_nic_each(self) -> None:
        assert two_node(8, 2.0, 0.5, nic_per_rank=True).way(1, 6) == ("0:nic1>", "1:>nic2")

    def test_pair(self) -> None:
        assert two_node(8, 2.0, 0.5).pair_gbs(0, 4) == 0.5
        assert full_mesh(2, 1.0).pair_gbs(0, 0) == float("inf")

    @pytest.mark.parametrize("gbs", [0.0, -1.0, float("nan")])
    def test_refuses_wires_without_width(self, gbs: float) -> None:
        with pytest.raises(ConfigurationError, match="must be above 0"):
            full_mesh(2, gbs)

    def test_refuses_ways_over_unknown_wires(self) -> None:
        with pytest.raises(ConfigurationError, match="'a' is passed but has no bandwidth"):
            LinkFabric(2, {(0, 1): ("a",)}, {})

    def test_no_way(self) -> None:
        net = of_one_host("broken", LinkFabric(2, {(0, 1): ("a",)}, {"a": 1.0}))
        assert net.way(0, 1) == ("0:a",)
        with pytest.raises(ConfigurationError, match="no way from rank 1 to rank 0 in 'broken'"):
            net.way(1, 0)

    def test_no_way_between_hosts_without_network(self) -> None:
        with pytest.raises(ConfigurationError, match="not connected"):
            of_hosts("islands", switch_fabric(2, 1.0), 2).way(0, 2)

    def test_local_needs_equal_hosts_in_order(self) -> None:
        fabric = with_network(switch_fabric(2, 1.0), 1.0)
        assert Interconnect("mixed", (fabric, fabric), ((0, 0), (1, 0), (0, 1), (1, 1))).local is None
        assert Interconnect("uneven", (fabric, fabric), ((0, 0), (0, 1), (1, 0))).local is None


class TestTopologies:
    def of(self, name: str) -> Interconnect:
        return interconnect_of(Topology.of(graph_of(name)))

    def test_labels_of_a_switch(self) -> None:
        """NV18 between all pairs is one port of 18 links; what a link carries no one said."""
        net = self.of("nvidia-switch.txt")
        assert way(net, 0, 5) == [("0:GPU0>", 18 * ASSUMED["link"]), ("0:>GPU5", 18 * ASSUMED["link"])]
        assert net.notes == ("links of kind nvlink have no known bandwidth: 25 GB/s each is assumed",)

    def test_labels_of_a_mesh(self) -> None:
        assert way(self.of("nvidia-mesh.txt"), 0, 3) == [("0:GPU0>GPU3", 4 * ASSUMED["link"])]

    def test_a_switch_that_is_a_device(self) -> None:
        """450 published, of which a copy reaches 0.85."""
        net = self.of("nccl-switch.xml")
        assert way(net, 0, 1) == [("0:GPU0>", 382.5), ("0:>GPU1", 382.5)]
        assert net.notes == ("shares of published widths are assumed: nvlink 0.85",)

    def test_shares_that_were_given_are_not_assumed(self) -> None:
        """Of what is said in one note for all kinds, only what was not given; nothing of what was measured."""
        a2 = preset("atlas-800t-a2*2")
        assert not interconnect_of(a2).notes
        both = {"hccs": 0.94, "network": 0.97}
        for given in ((), ("hccs",), ("network",)):
            net = interconnect_of(replace(a2, reached=dict.fromkeys(given, 0.5)))
            says = ", ".join(f"{kind} {share}" for kind, share in both.items() if kind not in given)
            assert net.notes == (f"shares of published widths are assumed: {says}",)
        assert not self.of("p2p-cube.txt").notes

    def test_dies_of_a_package_beside_a_switch(self) -> None:
        net = self.of("npu-a3.txt")
        assert way(net, 0, 1) == [("0:Phy-ID0>Phy-ID1", ASSUMED["sio"])]
        assert way(net, 0, 2) == [("0:Phy-ID0>", 196 * 0.94), ("0:>Phy-ID2", 196 * 0.94)]

    def test_measured_bandwidths_are_reached(self) -> None:
        assert way(self.of("p2p-cube.txt"), 0, 1) == [("0:GPU0>GPU1", 24.2)]

    def test_only_labels_of_pcie(self) -> None:
        net = self.of("metax-pairs.txt")
        assert way(net, 0, 2) == [("0:GPU0>pcie", 25.0), ("0:pcie>GPU2", 25.0)]
        assert "PCIe has no known bandwidth: 25 GB/s a slot is assumed" in net.notes

    def test_numa_labels_without_bandwidth(self) -> None:
        """Both directions between two sockets are wires of their own, which all that cross share."""
        ends = [Device(f"g{each}", "accelerator", index=each, numa_node=each // 2) for each in range(4)]
        pairs = [(a, b) for a in range(4) for b in range(a)]
        edges = [Edge(f"g{b}", f"g{a}", "phb" if a // 2 == b // 2 else "sys") for a, b in pairs]
        net = interconnect_of(Topology.of(Graph(tuple(ends), tuple(edges))))
        assert way(net, 0, 1) == [("0:g0>pcie", 25.0), ("0:pcie>g1", 25.0)]
        assert way(net, 0, 3) == [("0:g0>pcie", 25.0), ("0:numa0>numa1", 16.0), ("0:pcie>g3", 25.0)]
        assert net.way(2, 1)[1] == "0:numa1>numa0"
        assert "between NUMA nodes 16 GB/s are assumed" in net.notes

    def test_a_tree_of_pcie_shares_its_uplinks(self) -> None:
        net = interconnect_of(replace(preset("l40s-pcie-8"), reached={"pcie": 0.5, "sys": 1.0}))
        assert way(net, 0, 1) == [("0:GPU0>pcie-switch0", 15.5), ("0:pcie-switch0>GPU1", 15.5)]
        assert way(net, 0, 4) == [
            ("0:GPU0>pcie-switch0", 15.5), ("0:pcie-switch0>host-bridge0", 15.5), ("0:numa0>numa1", 22.0),
            ("0:host-bridge1>pcie-switch1", 15.5), ("0:pcie-switch1>GPU4", 15.5),
        ]  # fmt: skip
        assert net.way(0, 4)[1:4] == net.way(3, 6)[1:4]

    def test_sockets_reach_what_was_published(self) -> None:
        """NCCL's figure of 6 GB/s is what traffic gets: no share is taken off it again."""
        assert min(widths(interconnect_of(preset("dgx-1-v100")), 0, 7)) == 6.0

    def test_measured_rings_pass_messages_on(self) -> None:
        """Where links were measured, ranks without one between them go through others."""
        ends = tuple(Device(f"r{each}", "accelerator", index=each) for each in range(4))
        edges = tuple(Edge(f"r{a}", f"r{(a + 1) % 4}", "link", 1, 3.0, "measured") for a in range(4))
        net = interconnect_of(Topology.of(Graph(ends, edges)))
        assert way(net, 0, 1) == [("0:r0>r1", 3.0)]
        assert widths(net, 0, 2) == [3.0, 3.0]

    def test_labels_do_not_make_ranks_pass_messages_on(self) -> None:
        ends = tuple(Device(f"r{each}", "accelerator", index=each) for each in range(4))
        edges = tuple(Edge(f"r{a}", f"r{(a + 1) % 4}", "nvlink", 1, 3.0, "published") for a in range(4))
        net = interconnect_of(Topology.of(Graph(ends, edges)))
        assert net.way(0, 2) == ("0:r0>pcie", "0:pcie>r2")

    def test_hosts_with_their_own_nics(self) -> None:
        net = interconnect_of(preset("atlas-800t-a2*2"))
        assert way(net, 0, 15) == [("0:NIC0>", 25 * 0.97), ("1:>NIC7", 25 * 0.97)]
        assert net.fabrics[0] is net.fabrics[1]  # equal hosts cost no more than one

    def test_hosts_that_share_a_nic(self) -> None:
        net = interconnect_of(preset("a10-pix-4*2"))
        assert all("0:NIC0>" in net.way(src, dst) for src in range(4) for dst in range(4, 8))

    def test_hosts_of_unknown_nics(self) -> None:
        topology = Topology("hosts", 4, hosts=("a", "a", "b", "b"))
        net = interconnect_of(topology)
        assert way(net, 0, 1) == [("0:memory", ASSUMED["memory"])]
        assert way(net, 0, 2) == [("0:nic>", 12.5), ("1:>nic", 12.5)]
        assert net.notes == (
            "between ranks of one machine 8 GB/s in all are assumed",
            "no NIC is known: one of 12.5 GB/s a host is assumed",
        )

    def test_bandwidths_of_pairs_without_a_graph(self) -> None:
        net = interconnect_of(Topology("pairs", 2, {(0, 1): 3.0, (1, 0): None}))
        assert way(net, 0, 1) == [("0:0>1", 3.0)]
        assert way(net, 1, 0) == [("0:memory", 8.0)]

    def test_two_ranks_on_one_device(self) -> None:
        graph = graph_of("nvidia-mesh.txt")
        ids = [device.id for device in graph.accelerators]
        net = interconnect_of(Topology.of(graph, [ids[0], ids[0], ids[1]]))
        assert net.way(0, 1) == ()
        assert net.way(0, 2) == net.way(1, 2) != ()

    def test_no_ranks(self) -> None:
        with pytest.raises(ConfigurationError, match="no ranks"):
            interconnect_of(Topology.of(graph_of("npu-hccs.txt")))

    def test_every_preset_is_wired_without_assumptions(self) -> None:
        for name in ("dgx-1-v100", "dgx-a100", "hgx-h100", "l40s-pcie-8", "a10-pix-4", "atlas-800-910a", "atlas-a3"):
            for text in (name, f"{name}*2"):
                net = interconnect_of(preset(text))
                assert not net.notes
                assert all(net.pair_gbs(0, other) > 0 for other in range(1, net.world_size))

    def test_shares_are_shares(self) -> None:
        assert all(0 < share <= 1 for share in REACHED.values())


class TestTensorParallelism:
    def test_ranks_and_ways(self) -> None:
        """Ranks 0, 2, 4, 6 of a mesh have links of their own; the other group has others."""
        net = context_parallel_group(full_mesh(8, 2.0), 2)
        assert net.world_size == 4
        assert way(net, 1, 3) == [("0:2>6", 2.0)]

    def test_ports_are_not_shared_uplinks_are(self) -> None:
        net = context_parallel_group(of_one_host("tree", tree_fabric(8, 2.0, 3.0, leaf=4)), 2)
        assert way(net, 0, 1) == [("0:0>", 2.0), ("0:>2", 2.0)]
        assert way(net, 0, 2) == [("0:0>", 2.0), ("0:leaf0>", 1.5), ("0:>leaf1", 1.5), ("0:>4", 2.0)]

    def test_one_uplink_is_shared_by_all_groups(self) -> None:
        net = context_parallel_group(two_node(8, 2.0, 0.5), 4)
        assert net.world_size == 2
        assert widths(net, 0, 1) == [0.125, 0.125]

    def test_nics_of_their_own_are_not(self) -> None:
        net = context_parallel_group(two_node(8, 2.0, 0.5, nic_per_rank=True), 4)
        assert widths(net, 0, 1) == [0.5, 0.5]

    @pytest.mark.parametrize("tensor_parallel", [0, 3, 16])
    def test_refuses_what_does_not_divide(self, tensor_parallel: int) -> None:
        with pytest.raises(ConfigurationError, match="does not divide 8 ranks"):
            context_parallel_group(full_mesh(8, 1.0), tensor_parallel)

    def test_refuses_groups_across_hosts(self) -> None:
        with pytest.raises(ConfigurationError, match="does not fit hosts of 2"):
            context_parallel_group(clusters(4, local=2), 4)

    @pytest.mark.parametrize(
        ("heads", "tensor_parallel", "wanted"),
        [((8, 8), 2, (4, 4)), ((8, 2), 4, (2, 1)), ((8, 2), 2, (4, 1)), ((12, 6), 3, (4, 2))],
    )
    def test_heads(self, heads: tuple[int, int], tensor_parallel: int, wanted: tuple[int, int]) -> None:
        found = heads_of_group(workload(heads=heads), tensor_parallel)
        assert (found.q_heads, found.kv_heads) == wanted

    @pytest.mark.parametrize(("heads", "tensor_parallel"), [((6, 6), 4), ((12, 6), 4), ((8, 2), 16)])
    def test_refuses_heads_that_do_not_split(self, heads: tuple[int, int], tensor_parallel: int) -> None:
        with pytest.raises(ConfigurationError, match="heads do not split over tensor parallelism"):
            heads_of_group(workload(heads=heads), tensor_parallel)


class TestOrder:
    def test_nodes(self) -> None:
        assert node_sizes(full_mesh(8, 1.0)) == (8,)
        assert node_sizes(two_node(8, 1.0, 0.1)) == (4,)
        assert node_sizes(interconnect_of(preset("atlas-a3"))) == (16, 2)  # one host, of pairs
        assert node_sizes(interconnect_of(preset("atlas-800-910a*2"))) == (8, 4)

    @pytest.mark.parametrize(("between", "wanted"), [(0.3, (8, 4)), (1.0, (8,))])
    def test_measured_links_differ_a_little(self, between: float, wanted: tuple[int, ...]) -> None:
        """Two quads with something slower between them, every link 5% off: still quads, and a mesh is still a mesh."""
        chosen = random.Random(7)
        pairs = [(a, b) for a in range(8) for b in range(8) if a != b]
        gbs = {f"{a}>{b}": (1.0 if a // 4 == b // 4 else between) * chosen.uniform(0.95, 1.05) for a, b in pairs}
        fabric = LinkFabric(8, {(a, b): (f"{a}>{b}",) for a, b in pairs}, gbs)
        assert node_sizes(of_one_host("measured", fabric)) == wanted

    def test_ranks_that_are_dealt_out_to_hosts(self) -> None:
        """Rank r on host r % 2: schedules of two levels number the ranks host by host, and are as good as ever."""
        net = two_node(8, 1.0, 0.1, nic_per_rank=True)
        dealt = Interconnect("dealt", net.fabrics, tuple((rank % 2, rank // 2) for rank in range(8)))
        assert node_sizes(dealt) == node_sizes(net) == (4,)
        settings = [setting(each, workload(8, (32, 1), 64)) for each in (net, dealt)]
        plans = [plan_call(call(each, tr.Full(), "contiguous")) for each in settings]
        assert plans[0].name == plans[1].name and plans[0].name.startswith("relay/4")
        seconds = [plan.candidates[0].predicted_seconds for plan in plans]
        assert seconds[1] == pytest.approx(seconds[0])

    def test_hosts_of_different_sizes_are_no_nodes(self) -> None:
        fabric = two_node(8, 1.0, 0.1).fabrics[0]
        places = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (0, 3), (1, 2))
        assert node_sizes(Interconnect("unequal", (fabric, fabric), places)) == (7,)

    @pytest.mark.parametrize("net", [full_mesh(8, 1.0), ring(6, 1.0), switch(4, 1.0), two_node(8, 1.0, 0.1)])
    def test_what_is_in_order_stays(self, net: Interconnect) -> None:
        assert good_order(net) == tuple(range(net.world_size))

    def test_round_a_cube(self) -> None:
        """A ring of NVLinks alone; 3 and 4 have none between them."""
        net = interconnect_of(preset("dgx-1-v100"))
        order = good_order(net)
        steps = list(zip(order, (*order[1:], order[0]), strict=True))
        assert sorted(order) == list(range(8))
        assert all(len(net.way(a, b)) == 1 for a, b in steps)
        assert any(len(net.way(a, (a + 1) % 8)) > 1 for a in range(8))

    def test_host_by_host(self) -> None:
        fabric = with_network(switch_fabric(2, 1.0), 0.1)
        net = Interconnect("mixed", (fabric, fabric), ((0, 0), (1, 0), (0, 1), (1, 1)))
        assert good_order(net) == (0, 2, 1, 3)

    def test_hosts_that_are_alike_are_ordered_alike(self) -> None:
        """Each by its fabric and its devices: 0 and 1 share the fabric, 0 and 2 all, 3 has another fabric."""
        round_ring, other = ring(5, 1.0).fabrics[0], with_network(full_mesh(5, 1.0).fabrics[0], 0.1)
        joined = with_network(round_ring, 0.1)
        devices = ((0, 2, 4, 1, 3), (0, 1, 2, 3, 4), (0, 2, 4, 1, 3), (0, 2, 4, 1, 3))
        places = tuple((host, device) for host, some in enumerate(devices) for device in some)
        net = Interconnect("four", (joined, joined, joined, other), places)
        order = good_order(net)
        for host in range(4):
            alone = Interconnect("one", net.fabrics, places[5 * host : 5 * host + 5])
            assert order[5 * host : 5 * host + 5] == tuple(5 * host + rank for rank in good_order(alone))
        assert order[:5] != tuple(range(5)) and order[5:10] == tuple(range(5, 10))
        assert order[15:] == tuple(range(15, 20))

    def test_a_ring_that_is_numbered_badly(self) -> None:
        """Device d sits at place[d] of the ring: ranks are taken round it."""
        place = [0, 3, 1, 4, 2, 5]
        whole = ring_fabric(6, 1.0)
        at = {(a, b): whole.ways[place[a], place[b]] for a in range(6) for b in range(6) if a != b}
        order = good_order(of_one_host("shuffled", LinkFabric(6, at, whole.gbs)))
        steps = {abs(place[a] - place[b]) % 4 for a, b in zip(order, (*order[1:], order[0]), strict=True)}
        assert steps == {1}
