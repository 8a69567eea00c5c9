"""The places of a picture's nodes: on circles, one for each island, with what they share in the middle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tokenring.topology.model.facts import PCIE_KINDS, Device
from tokenring.topology.model.graph import Edge, Graph
from tokenring.topology.model.verdict import Verdict

BOXES_UP_TO = 20  # nodes of a circle that are boxes with their names inside; more are dots with names around them
BOX, BOX_HEIGHT, DOT = 64.0, 24.0, 6.0
GAP, DOT_GAP, LEAST_RADIUS, PAIR_RADIUS = 36.0, 24.0, 104.0, 90.0
RIM, NAME_RIM = 18.0, 84.0  # around a circle: of boxes, and of names
HUB = 26.0


@dataclass(frozen=True)
class DrawnNode:
    """A node of a picture, with its place in SVG units.

    `device` is None for a switch that no source names. `turn`: of a dot, the direction of its name, in degrees.
    """

    key: str
    x: float
    y: float
    kind: str
    device: Device | None = None
    turn: float | None = None


@dataclass(frozen=True)
class DrawnLine:
    """A link between two nodes. `all_peers`: it stands for the links to every other node of its circle."""

    a: str
    b: str
    edge: Edge
    all_peers: int | None = None


@dataclass
class Wheel:
    """Nodes and lines that are drawn together, and the room that they take, in SVG units."""

    nodes: list[DrawnNode] = field(default_factory=list)
    lines: list[DrawnLine] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0


def wheels(graph: Graph, verdict: Verdict, width: float) -> Wheel:
    """Lay out the fast links of one host, in rows of at most `width` SVG units; return nothing where there are none."""
    shown = [edge for edge in graph.edges if edge.kind not in PCIE_KINDS and edge.kind != "network"]
    shown = shown or [edge for edge in graph.edges if edge.source == "measured"]
    linked = {end for edge in shown for end in (edge.a, edge.b)}
    if not linked:
        return Wheel()
    islands = [island.members for island in verdict.islands]
    placed = {name for members in islands for name in members}
    names = [device.id for device in graph.accelerators if device.id not in placed]
    alone = [name for name in names if name not in linked]
    rest = tuple(name for name in names if name in linked)
    groups = [*islands, *([rest] if rest else []), *((name,) for name in alone)]
    by_id = {device.id: device for device in graph.devices}
    made = [_circle(members, by_id, BOX) for members in groups]
    _add_middles(made, shown, by_id)
    whole = _row_by_row(made, width)
    _add_lines(whole, groups, shown, verdict)
    return whole


def hosts_around(hosts: Sequence[str], hub: str | None, box: float) -> Wheel:
    """Lay out hosts on one circle, and what joins them in the middle."""
    made = _circle(hosts, {}, box)
    made.nodes = [replace(node, kind="host") for node in made.nodes]
    if hub is not None:
        made.nodes.append(DrawnNode(hub, made.width / 2, made.height / 2, "switch"))
    return made


def _circle(members: Sequence[str], by_id: dict[str, Device], box: float) -> Wheel:
    count = len(members)
    dots = count > BOXES_UP_TO
    least = LEAST_RADIUS if count > 2 else PAIR_RADIUS
    radius = 0.0 if count == 1 else max(least, count * (DOT_GAP if dots else box + GAP) / (2 * math.pi))
    rim = NAME_RIM if dots else RIM
    size_x = 2 * radius + (2 * rim if dots else box + 2 * RIM)
    size_y = 2 * (BOX_HEIGHT if count <= 2 else radius + rim)
    nodes = []
    for number, name in enumerate(members):
        # A flat top for even counts, and left to right for two.
        angle = math.pi if count == 2 and number == 0 else 0.0
        if count > 2:
            angle = -math.pi / 2 + (2 * number - 1) * math.pi / count
        x, y = size_x / 2 + radius * math.cos(angle), size_y / 2 + radius * math.sin(angle)
        nodes.append(DrawnNode(name, x, y, "accelerator", by_id.get(name), math.degrees(angle) if dots else None))
    return Wheel(nodes, [], size_x, size_y)


def _add_middles(made: list[Wheel], shown: Sequence[Edge], by_id: dict[str, Device]) -> None:
    """Add switches and CPUs in the middle of what they are linked to; several share the middle."""
    middles: dict[str, list[str]] = {}
    for edge in shown:
        for end, other in ((edge.a, edge.b), (edge.b, edge.a)):
            if by_id[end].kind not in ("accelerator", "nic"):
                middles.setdefault(end, []).append(other)
    inside: dict[int, list[str]] = {}
    for name, around in middles.items():
        home = next((i for i, wheel in enumerate(made) if any(node.key in around for node in wheel.nodes)), None)
        if home is not None:
            inside.setdefault(home, []).append(name)
    for home, names in inside.items():
        wheel = made[home]
        if wheel.height < 4 * HUB:  # one or two accelerators in a row: room below
            wheel.height += 3 * HUB
            spread, middle = 0.0, wheel.height - 1.5 * HUB
        else:
            spread, middle = min(HUB * 2.4 * (len(names) - 1), wheel.width * 0.6), wheel.height / 2
        for number, name in enumerate(names):
            at = number / (len(names) - 1) - 0.5 if len(names) > 1 else 0.0
            x = wheel.width / 2 + at * (spread or 2.4 * HUB * (len(names) - 1))
            wheel.nodes.append(DrawnNode(name, x, middle, by_id[name].kind, by_id[name]))


def _row_by_row(made: Sequence[Wheel], width: float) -> Wheel:
    """Put circles beside each other as far as there is room."""
    whole = Wheel()
    x = y = row = 0.0
    for wheel in made:
        if x and x + wheel.width > width:
            x, y, row = 0.0, y + row, 0.0
        whole.nodes += [replace(node, x=node.x + x, y=node.y + y) for node in wheel.nodes]
        x, row = x + wheel.width, max(row, wheel.height)
        whole.width = max(whole.width, x)
    whole.height = y + row
    return whole


def _add_lines(whole: Wheel, groups: Sequence[Sequence[str]], shown: Sequence[Edge], verdict: Verdict) -> None:
    """Add links as lines; those through a switch that no source names meet in a hub."""
    at = {node.key: node for node in whole.nodes}
    home = {name: number for number, members in enumerate(groups) for name in members}
    hidden = _hidden_switches(groups, shown, verdict)
    spokes: dict[tuple[int, str], list[Edge]] = {}
    for edge in shown:
        number = home.get(edge.a, -1)
        passes = number in hidden and home.get(edge.b) == number and (edge.switched or not hidden[number])
        if passes:
            for end in (edge.a, edge.b):
                spokes.setdefault((number, end), []).append(edge)
        elif edge.a in at and edge.b in at:
            whole.lines.append(DrawnLine(edge.a, edge.b, edge))
    for number in hidden:
        members = [at[name] for name in groups[number]]
        x = sum(node.x for node in members) / len(members)
        y = sum(node.y for node in members) / len(members)
        whole.nodes.append(DrawnNode(_hub(number), x, y, "switch"))
    for (number, end), edges in spokes.items():
        whole.lines.append(DrawnLine(end, _hub(number), edges[0], len(edges)))


def _hub(number: int) -> str:
    return f"\0hub{number}"  # no name of a device: those are printable in every source that we read


def _hidden_switches(groups: Sequence[Sequence[str]], shown: Sequence[Edge], verdict: Verdict) -> dict[int, bool]:
    """Find the groups with a switch that no source names, by number.

    The value is True if only those links pass the switch that say so, False if all do.
    """
    found: dict[int, bool] = {}
    shapes = {island.members: island.shape for island in verdict.islands}
    for number, members in enumerate(groups):
        inside = [edge for edge in shown if edge.a in members and edge.b in members]
        if shapes.get(tuple(members)) == "switch" and inside:
            found[number] = any(edge.switched for edge in inside)
    return found
