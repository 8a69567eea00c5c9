"""The commands that create an emulation: all of them as text, in batches for the tools.

docs/emulate.md gives the reasons for these figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tokenring.emulate.shapes import EmulatedFabric, EmulatedLink, rank_node
from tokenring.emulate.ways import wires

BITS_PER_GBIT = 1e9
LEAST_PACKET_BYTES, MOST_PACKET_BYTES = 1500, 64000  # the stack's limit for an offloaded packet is 64 KiB
MOST_MTU = 9000  # larger packets are offloaded: several segments that pass in one piece
PACKETS_PER_S = 20_000  # of all wires together, when all are busy: half of what two cores can move in time
LATE_SECONDS = 0.001  # a bucket holds this beside one packet: the lateness of timers for which a link compensates
QUEUE_BYTES = 64 << 20  # never drops packets: the emulated links lose nothing
WINDOW_SECONDS = 0.008  # of the fastest link: the data that one connection may have in flight
LEAST_WINDOW_BYTES = 1 << 17
HEADER_BYTES = 54  # Ethernet, IPv4 and TCP without options
PATIENCE = "rto_min 2s"  # without loss a late packet only waits in a queue, and must not be sent again
SETTINGS = {
    "net/ipv4/tcp_congestion_control": "reno",  # needs no module and does no pacing; there are no losses
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_timestamps": "0",
    "net/ipv4/tcp_early_retrans": "0",
    "net/ipv4/tcp_no_metrics_save": "1",
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv6/conf/default/disable_ipv6": "1",
}
OPTIONAL = "net/ipv6/"  # a kernel without IPv6 has none of these


class Batch(NamedTuple):
    """Lines for `ip -batch` or `tc -batch`, in a namespace or, without one, where this process is."""

    tool: str
    namespace: str | None
    lines: tuple[str, ...]


@dataclass(frozen=True)
class EmulationPlan:
    """A plan: first the namespaces; then `settings`, written in each as files below /proc/sys; then the batches."""

    namespaces: Batch
    settings: dict[str, str]
    batches: tuple[Batch, ...]


def address(rank: int) -> str:
    """Return the IPv4 address of a rank."""
    return f"10.77.0.{rank + 1}"


def make_plan(fabric: EmulatedFabric, prefix: str) -> EmulationPlan:
    """Return the plan of an emulation whose namespaces are named `prefix` followed by the node."""
    nodes = fabric.nodes
    rates = [link.gbit for link in fabric.links]
    packet = packet_bytes(fabric)
    mtu = min(packet, MOST_MTU)
    links: dict[str, list[str]] = {node: [] for node in nodes}
    inside: dict[str, list[str]] = {node: ["link set lo up"] for node in nodes}
    shaping: dict[str, list[str]] = {node: [] for node in nodes}
    for rank in range(fabric.ranks):
        # Gloo tells its peers the first address of its interface: it must not be 127.0.0.1.
        inside[rank_node(rank)] += ["addr del 127.0.0.1/8 dev lo", f"addr add {address(rank)}/32 dev lo"]
    for switch in fabric.switches:
        links[switch] += ["link add bridge type bridge stp_state 0 mcast_snooping 0"]
        inside[switch] += [f"link set bridge mtu {mtu} up"]
    for link in fabric.links:
        (node, device), (other, peer) = link.a, link.b
        links[node].append(f"link add {device} type veth peer name {peer} netns {prefix}{other}")
        for end, name in (link.a, link.b):
            master = " master bridge" if end in fabric.switches else ""
            inside[end].append(f"link set {name} mtu {mtu} gso_max_size {packet}{master} up")
        _shape(link, packet, inside, shaping)
    for route in fabric.routes:
        via = "" if route.via is None else f" via {address(route.via)} onlink"
        inside[rank_node(route.rank)].append(
            f"route add {address(route.to)}/32{via} dev {route.device} src {address(route.rank)} {PATIENCE}"
        )
    batches = [("ip", links), ("ip", inside), ("tc", shaping)]
    return EmulationPlan(
        Batch("ip", None, tuple(f"netns add {prefix}{node}" for node in nodes)),
        {**SETTINGS, "net/ipv4/ip_forward": str(int(fabric.ranks_forward)), **_windows(max(rates))},
        tuple(
            Batch(tool, prefix + node, tuple(lines[node])) for tool, lines in batches for node in nodes if lines[node]
        ),
    )


def packet_bytes(fabric: EmulatedFabric) -> int:
    """Return the least packet that the processor allows, in bytes.

    Small packets share a wire more evenly, and the one packet that an idle wire lets pass at once costs less.
    """
    total = sum(wires(fabric).values()) * BITS_PER_GBIT / 8
    return max(LEAST_PACKET_BYTES, min(MOST_PACKET_BYTES, round(total / PACKETS_PER_S)))


def bucket(gbit: float, packet: int) -> str:
    """Return the token bucket of one direction: rates are of payload, so headers and acknowledgements come on top."""
    segment = min(packet, MOST_MTU) - 40
    # Each segment has headers; traffic of the other direction is acknowledged every other segment or packet.
    overhead = 1 + (HEADER_BYTES + HEADER_BYTES / 4) / segment
    rate = round(gbit * BITS_PER_GBIT * overhead)
    return f"root tbf rate {rate}bit burst {burst_bytes(gbit, packet)} limit {QUEUE_BYTES}"


def burst_bytes(gbit: float, packet: int) -> int:
    """Return the bytes that a bucket holds. They pass at once after the wire has been idle."""
    # tbf would split packets larger than the bucket.
    return round(1.02 * packet + HEADER_BYTES + gbit * BITS_PER_GBIT / 8 * LATE_SECONDS)


def _windows(gbit: float) -> dict[str, str]:
    window = max(LEAST_WINDOW_BYTES, round(gbit * BITS_PER_GBIT / 8 * WINDOW_SECONDS))
    return {f"net/ipv4/tcp_{way}mem": f"4096 {window} {window}" for way in "rw"}


def _shape(link: EmulatedLink, packet: int, inside: dict[str, list[str]], shaping: dict[str, list[str]]) -> None:
    """Add a bucket at each end; if both directions share the rate, one bucket for the packets of both."""
    bucket_text = bucket(link.gbit, packet)
    if not link.half_duplex:
        for node, device in (link.a, link.b):
            shaping[node].append(f"qdisc add dev {device} {bucket_text}")
        return
    node, device = link.a
    shared = "both"
    inside[node] += [f"link add {shared} type ifb", f"link set {shared} mtu {min(packet, MOST_MTU)} up"]
    shaping[node] += [f"qdisc add dev {shared} {bucket_text}", f"qdisc add dev {device} clsact"]
    for way in ("ingress", "egress"):
        shaping[node].append(
            f"filter add dev {device} {way} protocol all u32 match u32 0 0 action mirred egress redirect dev {shared}"
        )
