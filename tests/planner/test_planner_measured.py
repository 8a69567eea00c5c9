"""Measured topologies in the planner: what pairs share is shared in plans as well, and ranks compute as CPUs do."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from itertools import combinations
from pathlib import Path

import pytest
import torch
from nets import call, pcie_tree, setting, two_node, workload
from networks import Network, NetworkLab, bus, islands, mesh, ring, switch

import tokenring as tr
from tokenring.cli.main import main
from tokenring.planner.choosing.auto import plan_call
from tokenring.planner.choosing.planner import Planner
from tokenring.planner.interconnects.interconnect import Interconnect
from tokenring.planner.interconnects.interconnect import full_mesh as mesh_net
from tokenring.planner.interconnects.interconnect import switch as switch_net
from tokenring.planner.interconnects.wiring import interconnect_of
from tokenring.planner.machines.machine import CPU
from tokenring.topology.measure.infer import infer
from tokenring.topology.measure.model import Model, facts
from tokenring.topology.measure.survey import Tables, survey
from tokenring.topology.model.facts import PROCESS, Facts
from tokenring.topology.model.schema import to_json
from tokenring.topology.ranks import Topology, topology_of

LINK = 0.0125


def measured(network: Network) -> Facts:
    lab, tables = NetworkLab(network, noise=0.01), Tables(network.ranks)
    survey(lab, tables)
    return facts(infer(tables, lab), tables)


def net_of(network: Network) -> Interconnect:
    return interconnect_of(topology_of(measured(network)))


def shared(net: Interconnect, one: tuple[int, int], other: tuple[int, int]) -> list[float]:
    """The widths of the wires that two transfers share."""
    return [net.gbs(wire) for wire in net.way(*one) if wire in net.way(*other)]


# ---------- wires


def test_pairs_of_a_mesh_share_nothing() -> None:
    net = net_of(mesh(4, LINK))
    ways = [net.way(a, b) for a in range(4) for b in range(4) if a != b]
    assert all(not set(one) & set(other) for one, other in combinations(ways, 2))


def test_ports_of_a_switch_are_shared() -> None:
    net = net_of(switch(4, LINK))
    assert shared(net, (0, 1), (0, 2)) == [pytest.approx(LINK, rel=0.05)]
    assert shared(net, (0, 2), (1, 2)) == [pytest.approx(LINK, rel=0.05)]
    assert shared(net, (0, 1), (1, 0)) == shared(net, (0, 1), (2, 3)) == []


def test_a_half_duplex_port_is_shared_both_ways() -> None:
    assert len(shared(net_of(switch(4, LINK, half=True)), (0, 1), (1, 0))) == 2


def test_messages_pass_on_round_a_ring() -> None:
    net = net_of(ring(5, LINK))
    assert len(net.way(0, 1)) == 1 and len(net.way(0, 2)) == 2
    assert shared(net, (0, 2), (1, 2)) == [pytest.approx(LINK, rel=0.05)]


@pytest.mark.parametrize("inside", ["mesh", "switch"])
@pytest.mark.parametrize("half", [False, True], ids=["full", "half"])
@pytest.mark.parametrize("sizes", [[4, 4], [2, 2, 2]], ids=str)
def test_uplinks_are_shared(sizes: list[int], half: bool, inside: str) -> None:
    uplink, last = LINK / 2, sum(sizes) - 1
    net = net_of(islands(sizes, LINK, uplink, inside=inside, half=half))
    out = shared(net, (0, last), (1, last - 1))
    assert out == [pytest.approx(uplink, rel=0.08)] * (len(sizes) - 1)
    assert bool(shared(net, (0, last), (last - 1, 1))) == half
    assert shared(net, (0, 1), (0, last)) == ([pytest.approx(LINK, rel=0.05)] if inside == "switch" else [])


def test_no_shape_at_all_is_said() -> None:
    """A pair gets what it had alone, and one port is shared."""
    net = net_of(bus(4, LINK))
    assert net.pair_gbs(0, 1) == pytest.approx(LINK, rel=0.1)
    assert shared(net, (0, 1), (0, 2)) == [pytest.approx(LINK, rel=0.1)]
    assert net.notes == ("no shape fits what was measured: one port a rank is assumed, as wide as its fastest pair",)


def test_too_short_a_time_leaves_nothing() -> None:
    net = interconnect_of(topology_of(facts(Model(3, doubts=["too short"]), Tables(3))))
    assert net.way(0, 1) == net.way(2, 0) == ("0:memory",)
    assert net.notes == ("between ranks of one machine 8 GB/s in all are assumed",)


# ---------- plans

BUILT = {
    "mesh": (mesh(8, LINK), mesh_net(8, LINK)),
    "switch": (switch(8, LINK), switch_net(8, LINK)),
    "two nodes": (islands([4, 4], LINK, LINK / 4, inside="mesh"), two_node(8, LINK, LINK / 4)),
    "PCIe tree": (islands([2, 2, 2, 2], LINK, LINK, inside="switch"), pcie_tree(8, LINK, LINK)),
}


@pytest.mark.parametrize("name", BUILT)
def test_planned_as_what_it_is(name: str) -> None:
    """The same restricted choice takes as long on what was measured as on what was built."""
    network, built = BUILT[name]
    times = []
    for net in (net_of(network), built):
        asked = setting(replace(net, notes=()), workload(8, (8, 8), 64))
        plan = plan_call(call(asked, tr.Full(), "contiguous", families=("ring", "direct-kv", "ulysses")))
        times.append({each.name: each.predicted_seconds for each in plan.candidates})
    best = min(times[1], key=lambda each: times[1][each] or float("inf"))
    assert times[0][best] == pytest.approx(times[1][best], rel=0.1)


def test_cpu_ranks_compute_as_a_cpu() -> None:
    planner = Planner(None, 4, topology_of(measured(switch(4, LINK))), (), None)
    net, machine = planner.look(torch.device("cpu"), torch.float32)
    assert (machine.rates, net.notes) == (CPU, (machine.source,)), "links were measured, kernels were not"


def test_accelerators_do_not() -> None:
    """What measured was a CPU process; the ranks' device is none."""
    planner = Planner(None, 4, topology_of(measured(switch(4, LINK))), (), None)
    net, machine = planner.look(torch.device("cuda"), torch.bfloat16)
    assert "A100" in machine.source
    assert net.notes[0].startswith("no compute figures of these accelerators; those of ")


def test_accelerators_of_no_model_on_a_cpu() -> None:
    """Of documents that were saved before they said what measured."""
    old = measured(switch(2, LINK))
    old = replace(old, devices=tuple(replace(each, model=None) for each in old.devices))
    _, machine = Planner(None, 2, topology_of(old), (), None).look(torch.device("cpu"), torch.float32)
    assert machine.rates == CPU


def printed(*options: str) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    return main(["plan", *options], out, err), out.getvalue(), err.getvalue()


SMALL = ("--seq", "4k", "--heads", "8", "--mask", "full", "--pass", "forward", "--schedules", "ring,ulysses")


def test_the_command_plans_for_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As documented, with no other word; a document that does not say what measured asks for one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    from tokenring.topology.probing.cache import keep_measured

    made = measured(switch(4, LINK))
    assert {each.model for each in made.accelerators} == {PROCESS}
    keep_measured(to_json([made]), {"XDG_CACHE_HOME": str(tmp_path)})
    code, text, err = printed("--topology", "measured", *SMALL)
    assert (code, err) == (0, "")
    assert f"on switch: 4 ranks; {CPU.source}" in text
    old = replace(made, devices=tuple(replace(each, model=None) for each in made.devices))
    (tmp_path / "old.json").write_text(to_json([old]), encoding="utf-8")
    code, _, err = printed("--topology", str(tmp_path / "old.json"), *SMALL)
    assert code == 2
    assert "name the device, as in --device " in err and "--rates FILE" in err
    assert printed("--topology", str(tmp_path / "old.json"), *SMALL, "--tflops", "1")[0] == 0


def test_of_pairs_alone_each_has_its_own_wire() -> None:
    """What a user writes down by hand, with no graph."""
    net = interconnect_of(Topology("pairs", 3, {(a, b): 1.0 for a in range(3) for b in range(3) if a != b}))
    assert shared(net, (0, 1), (0, 2)) == []
