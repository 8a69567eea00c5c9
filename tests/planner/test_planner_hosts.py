"""Hundreds of equal hosts: what one of them is like is found out once, and names are all that differs."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest

from tokenring.planner.interconnects import wiring
from tokenring.planner.interconnects.wiring import interconnect_of
from tokenring.planner.machines import server_spec as server
from tokenring.planner.machines.presets import PRESETS, preset
from tokenring.planner.machines.server_spec import Links, Nics, Server, Switch, cluster_facts, full_mesh
from tokenring.planner.machines.sourced import Figure
from tokenring.topology.model.facts import Device, changed
from tokenring.topology.model.graph import Edge, Graph, merge
from tokenring.topology.ranks import Topology

GBS = Figure(25.0, "made up", "assumed")
NIC = Nics(1, GBS)


def mesh(members: range, switch: Switch | None = None) -> Server:
    """Of which some are linked, all to a switch of the same kind if there is one."""
    return Server(4, "GPU", "H100", "nvidia", NIC, (Links("nvlink", GBS, full_mesh(members)),), switch)


NAMED = {
    "a switch in the evidence": mesh(range(4), Switch("NVSwitch", "nvlink", GBS, 1)),
    "islands": mesh(range(2)),
}


@pytest.mark.parametrize("name", NAMED)
def test_verdicts_have_each_host_s_own_names(name: str) -> None:
    """In islands, and in what is said of them."""
    made = server.topology(NAMED[name], 3)
    assert made == Topology.of(merge(cluster_facts(NAMED[name], 3)))
    assert made.verdict is not None
    said = [repr(verdict) for _, verdict in made.verdict.inside]
    assert ["node1:" in text for text in said] == [False, True, False]
    assert ("NVSwitch" in said[0]) == (name == "a switch in the evidence")


def work(monkeypatch: pytest.MonkeyPatch, hosts: int) -> Counter[str]:
    """How often what takes long is called for the interconnect of so many hosts."""
    calls = Counter[str]()

    def counted(module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(*given: Any, **how: Any) -> Any:
            calls[f"{module.__name__}.{name}"] += 1
            return real(*given, **how)

        patched.setattr(module, name, call)

    with monkeypatch.context() as patched:
        for module, name in ((server, "replace"), (server, "classify"), (wiring, "replace"), (wiring, "_local")):
            counted(module, name)
        net = interconnect_of(preset(f"hgx-h100*{hosts}"))
    assert len(net.fabrics) == hosts and len({id(fabric) for fabric in net.fabrics}) == 1
    return calls


def test_more_equal_hosts_are_little_more_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is classified, renamed by dataclasses.replace or stripped of its host's name once for each host."""
    few = work(monkeypatch, 2)
    assert few == work(monkeypatch, 64) and few["tokenring.planner.interconnects.wiring._local"] == 1


# ---------- what is alike


def two_hosts(**other: Any) -> Topology:
    """Of a NIC and two linked accelerators each; the second host's edge or NIC differs by these fields."""
    devices, edges = list[Device](), list[Edge]()
    for host, more in (("a", {}), ("b", other)):
        nic = {key: value for key, value in more.items() if key in ("gbs", "numa_node", "parent")}
        edge = {key: value for key, value in more.items() if key not in nic}
        ends = [Device(f"{host}:{each}", "accelerator", host=host) for each in "xy"]
        devices += [*ends, replace(Device(f"{host}:n", "nic", gbs=5.0, host=host, parent=f"{host}:x"), **nic)]
        edges += [replace(Edge(f"{host}:x", f"{host}:y", "nvlink", 1, 25.0, "published"), **edge)]
        edges += [Edge(f"{host}:{end}", f"{host}:n", "network", None, 5.0) for end in "xy"]
    return Topology.of(Graph(tuple(devices), tuple(edges)))


@pytest.mark.parametrize(
    "other",
    [{"bandwidth_gbs": 24.0}, {"count": 2}, {"source": "measured"}, {"kind": "xgmi"}, {"switched": True}, {"gbs": 4.0},
     {"numa_node": 1}, {"parent": "b:y"}, {"b": "b:n"}],
    ids=str,
)  # fmt: skip
def test_hosts_that_differ_are_told_apart(other: dict[str, Any]) -> None:
    alike, apart = interconnect_of(two_hosts()).fabrics, interconnect_of(two_hosts(**other)).fabrics
    assert alike[0] is alike[1] and apart[0] is not apart[1]


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_changed_is_as_replaced(name: str) -> None:
    """Every device and edge of a preset, by other values and by none."""
    graph = preset(name).graph
    assert graph is not None
    each: Any
    for each in (*graph.devices, *graph.edges):
        changes = {field.name: f"other {field.name}" for field in fields(each)[:2]}
        assert changed(each, **changes) == replace(each, **changes) != each
        assert changed(each) == each and hash(changed(each)) == hash(each) and changed(each) is not each
