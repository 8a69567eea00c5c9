"""Shapes of interconnects, and the fabric of each: plain data, before anything is created."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenring.errors import ConfigurationError

FEWEST_RANKS, MOST_RANKS = 2, 16
LEAST_GBIT, MOST_GBIT = 0.001, 100.0
FULL_MESH, SWITCH, RING, PCIE_TREE, TWO_NODE = "full-mesh", "switch", "ring", "pcie-tree", "two-node"
FABRICS = (FULL_MESH, SWITCH)  # inside a node
LEAF_RANKS = 2


@dataclass(frozen=True)
class Shape:
    """The request for a shape. Rates are Gbit/s in each direction, of payload.

    uplink_gbit: of pcie-tree's leaves, of two-node's shared uplink, or with nic_per_rank of each rank's port to
    the network; None: as link_gbit. half_duplex_uplink: both directions share that rate. node_fabric: inside
    each of two nodes; None: full-mesh. Raises ConfigurationError for what does not fit together.
    """

    kind: str
    ranks: int
    link_gbit: float
    uplink_gbit: float | None = None
    half_duplex_uplink: bool = False
    node_fabric: str | None = None
    nic_per_rank: bool = False

    def __post_init__(self) -> None:
        if self.kind not in SHAPES:
            raise ConfigurationError(f"unknown shape {self.kind!r}; choose one of {', '.join(SHAPES)}")
        if self.ranks not in range(FEWEST_RANKS, MOST_RANKS + 1, 2):
            raise ConfigurationError(
                f"{self.ranks} ranks cannot be emulated: use an even number from {FEWEST_RANKS} to {MOST_RANKS}"
            )
        for name, gbit in (("link", self.link_gbit), ("uplink", self.uplink_gbit)):
            if gbit is not None and not LEAST_GBIT <= gbit <= MOST_GBIT:
                raise ConfigurationError(f"{name} of {gbit:g} Gbit/s: use {LEAST_GBIT:g} to {MOST_GBIT:g}")
        self._check_parts()

    def _check_parts(self) -> None:
        """Refuse parts that the shape does not have, rather than ignore them. Raises ConfigurationError."""
        if not self.has_uplink and (self.uplink_gbit is not None or self.half_duplex_uplink):
            raise ConfigurationError(f"{self.kind} has no uplink: leave it out, or use {PCIE_TREE} or {TWO_NODE}")
        if self.kind != TWO_NODE and (self.node_fabric is not None or self.nic_per_rank):
            raise ConfigurationError(f"{self.kind} has no nodes: leave their fabric and NICs out, or use {TWO_NODE}")
        if self.node_fabric is not None and self.node_fabric not in FABRICS:
            raise ConfigurationError(f"unknown node fabric {self.node_fabric!r}; choose one of {', '.join(FABRICS)}")
        if self.nic_per_rank and self.half_duplex_uplink:
            raise ConfigurationError("with a NIC for each rank there is no shared uplink to be half duplex: choose one")

    @property
    def has_uplink(self) -> bool:
        """True for the shapes that have an uplink."""
        return self.kind in (PCIE_TREE, TWO_NODE)

    @property
    def uplink(self) -> float:
        """The rate of an uplink, Gbit/s."""
        return self.link_gbit if self.uplink_gbit is None else self.uplink_gbit

    @property
    def fabric(self) -> EmulatedFabric:
        """The nodes, links and routes that make up the shape."""
        return SHAPES[self.kind](self)

    def __str__(self) -> str:
        """Return text such as "two-node, full-mesh inside, links of 0.1 Gbit/s, one uplink of 0.05 Gbit/s"."""
        each = "ports" if self.kind == SWITCH else "links"
        words = [self.kind]
        words += [f"{self.node_fabric or FULL_MESH} inside"] if self.kind == TWO_NODE else []
        words += [f"{each} of {self.link_gbit:g} Gbit/s"]
        if self.nic_per_rank:
            words += [f"a NIC of {self.uplink:g} Gbit/s for each rank"]
        elif self.has_uplink:
            words += [f"{'one uplink' if self.kind == TWO_NODE else 'uplinks'} of {self.uplink:g} Gbit/s"]
        words += ["half duplex"] if self.half_duplex_uplink else []
        return ", ".join(words)


# ---------- what a shape is made of


@dataclass(frozen=True)
class EmulatedLink:
    """A link: two devices, each (node, name there), and the names of both directions, equal if they share a rate."""

    a: tuple[str, str]
    b: tuple[str, str]
    gbit: float
    a_to_b: str
    b_to_a: str

    @property
    def half_duplex(self) -> bool:
        """True if both directions share the rate."""
        return self.a_to_b == self.b_to_a


@dataclass(frozen=True)
class Route:
    """A rank's route to another: out through `device`, to `via`, the neighbour that forwards, if there is one."""

    rank: int
    to: int
    device: str
    via: int | None = None


@dataclass
class EmulatedFabric:
    """A fabric of nodes, links and routes. Switches forward by address; ranks only where `ranks_forward`."""

    ranks: int
    switches: list[str] = field(default_factory=list)
    links: list[EmulatedLink] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
    ranks_forward: bool = False

    @property
    def nodes(self) -> list[str]:
        """The names of all nodes: the ranks', then the switches'."""
        return [*map(rank_node, range(self.ranks)), *self.switches]

    def pair(self, i: int, j: int, gbit: float) -> None:
        """Add a link that only these two ranks use; gbit is its rate in Gbit/s."""
        ends = (rank_node(i), f"to{j}"), (rank_node(j), f"to{i}")
        self.links.append(EmulatedLink(*ends, gbit, f"{i}>{j}", f"{j}>{i}"))

    def mesh(self, members: Sequence[int], gbit: float) -> None:
        """Add a link and both routes for every two of these ranks; gbit is each link's rate in Gbit/s."""
        for i in members:
            for j in members:
                if i < j:
                    self.pair(i, j, gbit)
                if i != j:
                    self.routes.append(Route(i, j, f"to{j}"))

    def plug(self, rank: int, switch: str, gbit: float, reaches: Sequence[int], device: str = "port") -> None:
        """Add a port of a rank on a switch, of gbit Gbit/s, and the rank's routes through it to those it reaches."""
        ends = (rank_node(rank), device), (switch, f"port{rank}")
        self.links.append(EmulatedLink(*ends, gbit, f"{rank} {device} out", f"{rank} {device} in"))
        self.routes += [Route(rank, other, device) for other in reaches if other != rank]

    def join(self, lower: str, upper: str, gbit: float, half: bool) -> None:
        """Add an uplink of gbit Gbit/s between two switches; with `half`, both directions share the rate."""
        ways = (f"{lower}-{upper}",) * 2 if half else (f"{lower}>{upper}", f"{upper}>{lower}")
        self.links.append(EmulatedLink((lower, f"up-{upper}"), (upper, f"down-{lower}"), gbit, *ways))


def rank_node(rank: int) -> str:
    """Return the name of a rank's node."""
    return f"r{rank}"


def _full_mesh(shape: Shape) -> EmulatedFabric:
    fabric = EmulatedFabric(shape.ranks)
    fabric.mesh(range(shape.ranks), shape.link_gbit)
    return fabric


def _switch(shape: Shape) -> EmulatedFabric:
    fabric = EmulatedFabric(shape.ranks, ["switch"])
    for rank in range(shape.ranks):
        fabric.plug(rank, "switch", shape.link_gbit, range(shape.ranks))
    return fabric


def _ring(shape: Shape) -> EmulatedFabric:
    """Join neighbours only; the ranks in between forward in the shorter direction."""
    count = shape.ranks
    if count == 2:
        return _full_mesh(shape)
    fabric = EmulatedFabric(count, ranks_forward=True)
    for rank in range(count):
        fabric.pair(rank, (rank + 1) % count, shape.link_gbit)
        for to in range(count):
            if to != rank:
                hop = _next_hop(rank, to, count)
                fabric.routes.append(Route(rank, to, f"to{hop}", None if hop == to else hop))
    return fabric


def _next_hop(rank: int, to: int, count: int) -> int:
    """Return the first neighbour on the shorter route to a rank.

    To the opposite rank, even ranks send forwards and odd ranks backwards, so that both directions carry equally
    much. For every rank in between one direction is shorter, so all agree.
    """
    ahead = (to - rank) % count
    onwards = 2 * ahead < count or (2 * ahead == count and rank % 2 == 0)
    return (rank + (1 if onwards else -1)) % count


def _pcie_tree(shape: Shape) -> EmulatedFabric:
    """Put two ranks on each leaf; the leaves' uplinks lead to a root switch."""
    leaves = [f"leaf{index}" for index in range(shape.ranks // LEAF_RANKS)]
    fabric = EmulatedFabric(shape.ranks, [*leaves, "root"])
    for rank in range(shape.ranks):
        fabric.plug(rank, leaves[rank // LEAF_RANKS], shape.link_gbit, range(shape.ranks))
    for leaf in leaves:
        fabric.join(leaf, "root", shape.uplink, shape.half_duplex_uplink)
    return fabric


def _two_node(shape: Shape) -> EmulatedFabric:
    """Make two halves, joined by one uplink that all ranks share, or by a switch on which each rank has a port."""
    half, inside = shape.ranks // 2, shape.node_fabric or FULL_MESH
    nodes = [range(half), range(half, shape.ranks)]
    fabric = EmulatedFabric(shape.ranks, ["node0", "node1"])
    if not shape.nic_per_rank:
        fabric.join("node0", "node1", shape.uplink, shape.half_duplex_uplink)
    elif inside == FULL_MESH:
        fabric.switches = ["network"]
    else:
        fabric.switches.append("network")
    for number, (members, others) in enumerate((nodes, nodes[::-1])):
        if inside == FULL_MESH:
            fabric.mesh(members, shape.link_gbit)
        for rank in members:
            near = [other for other in members if other != rank and inside == SWITCH]
            if through := [*near, *(() if shape.nic_per_rank else others)]:
                fabric.plug(rank, f"node{number}", shape.link_gbit, through)
            if shape.nic_per_rank:
                fabric.plug(rank, "network", shape.uplink, others, "nic")
    return fabric


SHAPES: dict[str, Callable[[Shape], EmulatedFabric]] = {
    FULL_MESH: _full_mesh,
    SWITCH: _switch,
    RING: _ring,
    PCIE_TREE: _pcie_tree,
    TWO_NODE: _two_node,
}
