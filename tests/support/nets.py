"""Interconnects, machines and settings for tests of the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from tokenring.ir.schedule_data import Pass
from tokenring.planner.choosing.auto import CallToPlan
from tokenring.planner.interconnects.interconnect import (
    Interconnect,
    LinkFabric,
    Way,
    full_mesh,
    mesh_fabric,
    of_one_host,
    ring,
    switch,
    switch_fabric,
)
from tokenring.planner.simulation.predict import Setting
from tokenring.schedule.names import make_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import Mask
from tokenring.sequence.workload import Workload
from tokenring.tables.rates import Machine, Messages, constant

BOTH: tuple[Pass, ...] = ("forward", "backward")
FREE = 1e9  # TFLOP/s: kernels take no time
IDEAL = Messages()


def of_hosts(name: str, fabric: LinkFabric, hosts: int, notes: Iterable[str] = ()) -> Interconnect:
    """Return the interconnect of one rank on each device of equal hosts."""
    places = tuple((host, device) for host in range(hosts) for device in range(fabric.size))
    return Interconnect(name, (fabric,) * hosts, places, tuple(notes))


def tree_fabric(size: int, port_gbs: float, uplink_gbs: float, half_duplex: bool = False, leaf: int = 2) -> LinkFabric:
    """Return the fabric of a host with PCIe: switches of `leaf` devices each, whose uplinks meet at a root."""
    ways: dict[tuple[int, int], Way] = {}
    for a in range(size):
        for b in range(size):
            if a != b:
                up, down = a // leaf, b // leaf
                over = (
                    ()
                    if up == down
                    else (_uplink(f"leaf{up}", True, half_duplex), _uplink(f"leaf{down}", False, half_duplex))
                )
                ways[a, b] = (f"{a}>", *over, f">{b}")
    gbs = {wire: uplink_gbs if "leaf" in wire else port_gbs for way in ways.values() for wire in way}
    return LinkFabric(size, ways, gbs)


def _uplink(name: str, up: bool, half_duplex: bool) -> str:
    return name if half_duplex else f"{name}>" if up else f">{name}"


def with_network(fabric: LinkFabric, gbs: float, nic_per_device: bool = True, half_duplex: bool = False) -> LinkFabric:
    """Return the same host with NICs: one for each device, or one uplink that all share."""
    names = [f"nic{device}" if nic_per_device else "uplink" for device in range(fabric.size)]
    out = tuple((_uplink(name, True, half_duplex),) for name in names)
    into = tuple((_uplink(name, False, half_duplex),) for name in names)
    wires = {way[0]: gbs for way in (*out, *into)}
    return LinkFabric(fabric.size, fabric.ways, {**fabric.gbs, **wires}, out, into, fabric.burst_bytes)


def pcie_tree(ranks: int, port_gbs: float, uplink_gbs: float, half_duplex: bool = False) -> Interconnect:
    return of_one_host("PCIe tree", tree_fabric(ranks, port_gbs, uplink_gbs, half_duplex))


def two_node(
    ranks: int, link_gbs: float, uplink_gbs: float, inside: str = "full-mesh", nic_per_rank: bool = False
) -> Interconnect:
    """Half of the ranks in each of two nodes; inside: full-mesh or switch."""
    fabric = (switch_fabric if inside == "switch" else mesh_fabric)(ranks // 2, link_gbs)
    return of_hosts("two nodes", with_network(fabric, uplink_gbs, nic_per_rank), 2)


SHAPES: dict[str, Callable[[int], Interconnect]] = {
    "full mesh": lambda ranks: full_mesh(ranks, 1.0),
    "switch": lambda ranks: switch(ranks, 1.0),
    "ring": lambda ranks: ring(ranks, 1.0),
    "PCIe tree": lambda ranks: pcie_tree(ranks, 1.0, 1.0),
    "half-duplex tree": lambda ranks: pcie_tree(ranks, 1.0, 1.0, half_duplex=True),
    "two nodes": lambda ranks: two_node(ranks, 1.0, 0.25),
    "a NIC each": lambda ranks: two_node(ranks, 1.0, 0.25, nic_per_rank=True),
}


def clusters(hosts: int, local: int = 4, link_gbs: float = 1.0, nic_gbs: float = 0.25) -> Interconnect:
    """Equal hosts, each a mesh with a NIC a rank."""
    return of_hosts("cluster", with_network(mesh_fabric(local, link_gbs), nic_gbs), hosts)


def workload(
    ranks: int = 8, heads: tuple[int, int] = (8, 8), tokens: int = 256, dtype: torch.dtype = torch.bfloat16
) -> Workload:
    """So many tokens a rank; head_dim 64."""
    return Workload(1, ranks * tokens, ranks * tokens, *heads, 64, dtype)


def setting(
    net: Interconnect,
    size: Workload,
    passes: Sequence[Pass] = ("forward",),
    tflops: float = FREE,
    messages: Messages = IDEAL,
) -> Setting:
    return Setting(size, net, Machine(constant(tflops, "test"), messages), tuple(passes))


def call(asked: Setting, mask: Mask | None = None, layout: str = "zigzag", **changes: object) -> CallToPlan:
    whole = make_layout(layout, asked.interconnect.world_size, asked.workload.q_length)
    return CallToPlan(asked, whole, whole, Mask() if mask is None else mask, **changes)  # type: ignore[arg-type]


def named(name: str, ranks: int, length: int, mask: Mask | None = None, layout: str = "contiguous") -> Schedule:
    whole = make_layout(layout, ranks, length)
    return make_schedule(name, whole, whole, Mask() if mask is None else mask)
