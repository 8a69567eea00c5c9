"""A topology as a self-contained SVG: fast links on circles; NUMA nodes, host bridges, switches, NICs as boxes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from tokenring.display.safe_text import cells_wide, plain
from tokenring.display.svg import opening, wrapped
from tokenring.topology.model.facts import Device
from tokenring.topology.model.graph import Edge, Graph
from tokenring.topology.model.nesting import Box, boxes, says_something
from tokenring.topology.model.verdict import Verdict
from tokenring.topology.report.circle_layout import (
    BOX,
    BOX_HEIGHT,
    DOT,
    HUB,
    DrawnLine,
    DrawnNode,
    Wheel,
    hosts_around,
    wheels,
)
from tokenring.topology.report.text import sentence

# Sizes in SVG units, which viewers show as pixels.
WIDTH, MARGIN, PAD, LINE = 1120, 28, 14, 18
CHARACTER, LEGEND_CHARACTER = 6.7, 7.0  # width of a character of 12 units: the mean; in the widest font
CHIP, CHIP_GAP, HEAD = 26, 8, 22
BESIDE = 560  # wider circles have their boxes below, not beside
MAX_NAME, MAX_INSIDE, MAX_HOST = 40, 8, 24
MAX_HOSTS, MAX_LEGEND, HOSTS_AROUND = 32, 10, 4
KIND_NAMES = {"nvlink": "NVLink", "xgmi": "xGMI", "hccs": "HCCS", "sio": "SIO", "ub": "UB", "c2c": "NVLink-C2C",
              "mxlink": "MetaXLink", "mtlink": "MTLink", "mlulink": "MLU-Link", "pcie": "PCIe"}  # fmt: skip
DEVICE_NAMES = {"accelerator": "accelerator", "nic": "NIC", "switch": "switch", "cpu": "CPU", "host": "host"}
COLOURS = {  # class: (light, dark)
    "ground": ("#ffffff", "#14181d"),
    "ink": ("#22282f", "#e8ecf0"),
    "grey": ("#66707b", "#9aa5b1"),
    "bad": ("#b3303f", "#f0808a"),
    "on": ("#ffffff", "#ffffff"),
}
FILLS = {  # of shapes: ((fill, stroke) in light, in dark)
    "panel": (("#f7f9fb", "#dfe4e9"), ("#191e25", "#2c333b")),
    "numa": (("#eef3fa", "#c3d2e6"), ("#1d2733", "#3a4d66")),
    "host-bridge": (("#e4ecf7", "#aebfd8"), ("#233143", "#486080")),
    "pcie-switch": (("#d8e4f4", "#94abcc"), ("#2b3c53", "#597599")),
    "package": (("#e4ecf7", "#aebfd8"), ("#233143", "#486080")),
    "accelerator": (("#2f6db5", "#24568f"), ("#3f7fcb", "#7fb2ee")),
    "nic": (("#fff7e6", "#d9a13b"), ("#3a2f18", "#d9a13b")),
    "switch": (("#f0edf7", "#8f6cc0"), ("#2c2638", "#a583d6")),
    "host": (("#eef1f4", "#66707b"), ("#272d35", "#9aa5b1")),
    "cpu": (("#eaf5ef", "#2f9e6b"), ("#1c2f26", "#3fb57f")),
}
LINKS = {  # by kind of link: (light, dark)
    "nvlink": ("#3f8f3a", "#6fc268"),
    "xgmi": ("#d2542f", "#f08a63"),
    "hccs": ("#c43d4b", "#f0808a"),
    "sio": ("#8f6cc0", "#b79be0"),
    "ub": ("#1f8a8a", "#4fc3c3"),
    "c2c": ("#2f9e6b", "#3fb57f"),
    "network": ("#d9942b", "#e8b04f"),
    "other": ("#5b6f86", "#93a7bf"),
}


def to_svg(graph: Graph, verdict: Verdict) -> str:
    """Return the picture."""
    return "\n".join(_Picture(graph, verdict).lines()) + "\n"


class _Picture:
    def __init__(self, graph: Graph, verdict: Verdict) -> None:
        self.graph, self.verdict = graph, verdict
        self.numbers: dict[str, int] = {}  # what ties the shapes of one device and its links together
        named = (each.host for each in graph.devices if each.host)  # also those without accelerators
        self.hosts = tuple(dict.fromkeys((*graph.hosts, *named))) or ("",)
        self.legend: dict[tuple[str, str], float] = {}
        self.kinds: dict[str, None] = {}
        self.y, self.widest = 0.0, 0.0
        widths = [_weight(edge) for edge in graph.edges]
        self.heaviest = max([each for each in widths if each is not None], default=1.0)

    def lines(self) -> Iterator[str]:
        body = [*self._heading(), *self._between_hosts(), *self._panels(), *self._legend()]
        height = round(self.y + MARGIN)
        title = plain(sentence(self.graph, self.verdict), 300)
        yield from opening(WIDTH, height, title)
        yield from _style()
        yield f'<rect class="ground" width="{WIDTH}" height="{height}"/>'
        yield from body
        yield "</svg>"

    def _heading(self) -> Iterator[str]:
        self.y = MARGIN
        for line in wrapped(plain(sentence(self.graph, self.verdict), 400), WIDTH - 2 * MARGIN, 18, bold=True):
            self.y += 25
            yield _text(MARGIN, self.y, line, 18, weight="bold")
        why = [f"{self.verdict.name}, confidence {self.verdict.confidence}", *self.verdict.evidence]
        self.y += 4
        for colour, texts in (("grey", why), ("bad", self.verdict.warnings)):
            for text in texts[:8]:
                for line in wrapped(plain(text, 400), WIDTH - 2 * MARGIN, 12.5):
                    self.y += LINE
                    yield _text(MARGIN, self.y, line, 12.5, colour)
        self.y += PAD

    # ---------- hosts

    def _between_hosts(self) -> Iterator[str]:
        """Draw the hosts and what is known of the network that joins them."""
        if len(self.hosts) < 2:
            return
        places = {device.id: device.host or "" for device in self.graph.devices}
        found: dict[tuple[str, str], list[Edge]] = {}
        for edge in self.graph.edges:
            ends = tuple(sorted((places[edge.a], places[edge.b])))
            if ends[0] != ends[1]:
                found.setdefault((ends[0], ends[1]), []).append(edge)
        if not found and len(self.hosts) > HOSTS_AROUND:
            yield from self._all_hosts()
            return
        hub = None if found else "\0network"
        box = max(BOX, CHARACTER * max(cells_wide(_cut(each, MAX_HOST)) for each in self.hosts) + 16)
        wheel = hosts_around(self.hosts, hub, box)
        known = [DrawnLine(a, b, edges[0]) for (a, b), edges in found.items()]
        unknown = [DrawnLine(each, hub, Edge(each, hub, "network")) for each in self.hosts] if hub else []
        wheel.lines = [line for line in [*known, *unknown] if line.a in self.hosts]
        left, top = (WIDTH - wheel.width) / 2, self.y
        yield from self._wheel(wheel, left, top, "", box)
        self.y += wheel.height + PAD

    def _all_hosts(self) -> Iterator[str]:
        """Draw many hosts, of whose network nothing is known."""
        room = WIDTH - 2 * MARGIN
        inside = [Box(each or "a host", "host") for each in self.hosts]
        laid = _flow([Box("network: not looked at", "panel", inside=inside)], room, "")
        yield from self._laid(laid, MARGIN, self.y, "")
        self.y += laid.height + PAD

    def _panels(self) -> Iterator[str]:
        inside = dict(self.verdict.inside)
        for host in self.hosts[:MAX_HOSTS]:
            part = self.graph.on_host(host) if len(self.hosts) > 1 else self.graph
            yield from self._panel(host, part, inside.get(host, self.verdict))
        if len(self.hosts) > MAX_HOSTS:
            self.y += LINE
            yield _text(MARGIN, self.y, f"and {len(self.hosts) - MAX_HOSTS} more hosts, not drawn", 13, "grey")

    def _panel(self, host: str, graph: Graph, verdict: Verdict) -> Iterator[str]:
        room = WIDTH - 2 * MARGIN - 2 * PAD
        wheel, nested = wheels(graph, verdict, room), boxes(graph)
        if not wheel.nodes and not nested:
            return
        show_boxes = not wheel.nodes or says_something(nested)
        beside = bool(wheel.nodes) and wheel.width <= BESIDE
        left = wheel.width + 3 * PAD if beside else 0.0
        flow = _flow(nested, room - left, host) if show_boxes else _Laid(0, 0, [])
        title = f"{plain(host, 60)}: {plain(sentence(graph, verdict), 200)}" if len(self.hosts) > 1 else ""
        head, gap = (30 if title else 0) + PAD, PAD if wheel.nodes and flow.parts else 0
        height = (max(wheel.height, flow.height) if beside else wheel.height + flow.height + gap) + head + PAD
        yield _box(MARGIN, self.y, WIDTH - 2 * MARGIN, height, "panel", 8)
        if title:
            yield _text(MARGIN + PAD, self.y + 24, _fit(title, room), 14, weight="bold")
        top = self.y + head
        shift = (room - left - flow.width) / 2 if beside else 0.0
        wheel_left = MARGIN + PAD + (shift if beside and show_boxes else (room - wheel.width) / 2)
        above = (flow.height - wheel.height) / 2
        below = max(0.0, -above) if beside else wheel.height + gap
        yield from self._wheel(wheel, wheel_left, top + (max(0.0, above) if beside else 0), host, BOX)
        yield from self._laid(flow, MARGIN + PAD + left + (shift or (room - flow.width) / 2), top + below, host)
        self.y += height + PAD

    # ---------- circles

    def _wheel(self, wheel: Wheel, left: float, top: float, host: str, box: float) -> Iterator[str]:
        at = {node.key: node for node in wheel.nodes}
        self.widest = 4.3 if len(wheel.lines) <= 30 else 1.6
        for line in wheel.lines:
            a, b = at[line.a], at[line.b]
            yield self._line(line, (a.x + left, a.y + top), (b.x + left, b.y + top), host)
        for node in wheel.nodes:
            yield from self._node(node, node.x + left, node.y + top, host, box)

    def _line(self, line: DrawnLine, start: tuple[float, float], end: tuple[float, float], host: str) -> str:
        edge = line.edge
        weight = _weight(edge)
        width = 1.6 if weight is None else 1.2 + self.widest * weight / self.heaviest
        kind = edge.kind if edge.kind in LINKS else "other"
        is_unknown = line.b == "\0network"
        words = "network: not looked at" if is_unknown else _words(edge)
        if line.all_peers is not None:
            words += f", to each of {line.all_peers} peers through a switch"
        if len(self.legend) < MAX_LEGEND:
            self.legend.setdefault((kind, words), width)
        ends = [plain(_short(each, host), MAX_NAME) for each in (line.a, line.b) if not each.startswith("\0")]
        tip = f"{' – '.join(ends)}: {words}"
        dashed = ' stroke-dasharray="5 5"' if is_unknown else ""
        return (
            f'<path class="link {kind}-link" data-a="{self._number(line.a)}" data-b="{self._number(line.b)}" '
            f'd="M{start[0]:.1f} {start[1]:.1f}L{end[0]:.1f} {end[1]:.1f}" stroke-width="{width:.1f}"{dashed}>'
            f"<title>{escape(tip)}</title></path>"
        )

    def _node(self, node: DrawnNode, x: float, y: float, host: str, box: float) -> Iterator[str]:
        kind = node.kind if node.kind in FILLS else "other"
        name = node.key if node.device is None else node.device.id
        self.kinds[kind] = None
        yield f'<g class="node" data-n="{self._number(node.key)}"><title>{escape(self._tip(node))}</title>'
        if node.turn is not None:
            yield f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{DOT}"/>'
            back = 90 < node.turn % 360 < 270
            turn, dx = (node.turn + 180, -DOT - 5) if back else (node.turn, DOT + 5)
            where = f'transform="translate({x:.1f} {y:.1f}) rotate({turn:.1f})"'
            yield f"<g {where}>{_text(dx, 4, _cut(_short(name, host), 12), 11, 'ink', 'end' if back else 'start')}</g>"
        elif node.kind in ("switch", "cpu"):
            shown = "network" if node.key == "\0network" else DEVICE_NAMES[node.kind]
            yield f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{HUB}"/>'
            yield _text(x, y + 4, shown, 11, "ink", "middle")
        else:
            most = MAX_HOST if kind == "host" else MAX_INSIDE
            yield _box(x - box / 2, y - BOX_HEIGHT / 2, box, BOX_HEIGHT, kind, 5)
            colour = "ink" if kind == "host" else "on"
            yield _text(x, y + 4, _cut(_short(name, host) or "a host", most), 12, colour, "middle")
        yield "</g>"

    def _tip(self, node: DrawnNode) -> str:
        if node.device is not None:
            return _about(node.device)
        if node.key == "\0network":
            return "a network that was not examined"
        return plain(node.key, MAX_NAME) if node.kind == "host" else "a switch that no source names"

    def _number(self, key: str) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    # ---------- boxes

    def _laid(self, laid: _Laid, left: float, top: float, host: str) -> Iterator[str]:
        for x, y, box, inner in laid.parts:
            yield from self._nested(box, inner, left + x, top + y, host)

    def _nested(self, box: Box, laid: _Laid, x: float, y: float, host: str) -> Iterator[str]:
        kind = box.kind if box.kind in FILLS else "panel"
        text = _chip_text(box, host)
        if not box.inside:
            self.kinds[kind] = None
            tip = text if box.device is None else _about(box.device)
            yield f'<g class="node" data-n="{self._number(box.label)}"><title>{escape(tip)}</title>'
            yield _box(x, y, laid.width, CHIP, kind, 5)
            yield _text(x + laid.width / 2, y + 17, text, 12, "on" if kind == "accelerator" else "ink", "middle")
            yield "</g>"
            return
        yield f"<g><title>{escape(text if box.device is None else _about(box.device))}</title>"
        yield _box(x, y, laid.width, laid.height, kind, 6) + "</g>"
        yield _text(x + 9, y + 16, text, 11, "grey")
        yield from self._laid(laid, x, y, host)

    # ---------- legend

    def _legend(self) -> Iterator[str]:
        x: float = MARGIN
        if not self.legend and not self.kinds:
            return
        self.y += 12
        for (kind, words), width in self.legend.items():
            room = 52 + LEGEND_CHARACTER * len(words)
            if x > MARGIN and x + room > WIDTH - MARGIN:
                x, self.y = MARGIN, self.y + LINE
            yield f'<path class="{kind}-link" d="M{x:.0f} {self.y - 4:.1f}h24" stroke-width="{width:.1f}"/>'
            yield _text(x + 30, self.y, words, 12)
            x += room
        for kind in self.kinds:
            if x > MARGIN and x + 120 > WIDTH - MARGIN:
                x, self.y = MARGIN, self.y + LINE
            yield _box(x, self.y - 10, 16, 12, kind, 3)
            yield _text(x + 22, self.y, DEVICE_NAMES.get(kind, kind), 12)
            x += 44 + CHARACTER * len(DEVICE_NAMES.get(kind, kind))


class _Laid:
    """Boxes in rows: the place of each, and what is in it."""

    def __init__(self, width: float, height: float, parts: list[tuple[float, float, Box, _Laid]]) -> None:
        self.width, self.height, self.parts = width, height, parts


def _flow(found: Sequence[Box], room: float, host: str) -> _Laid:
    """Put boxes beside each other as far as there is room."""
    parts: list[tuple[float, float, Box, _Laid]] = []
    x = y = row = width = 0.0
    for box in found:
        inner = _group(box, room, host) if box.inside else _chip(box, host)
        if x and x + inner.width > room:
            x, y, row = 0.0, y + row + CHIP_GAP, 0.0
        parts.append((x, y, box, inner))
        width, row = max(width, x + inner.width), max(row, inner.height)
        x += inner.width + CHIP_GAP
    return _Laid(width, y + row, parts)


def _chip(box: Box, host: str) -> _Laid:
    return _Laid(max(46.0, CHARACTER * cells_wide(_chip_text(box, host)) + 16), CHIP, [])


def _group(box: Box, room: float, host: str) -> _Laid:
    inside = _flow(box.inside, room - 2 * CHIP_GAP, host)
    parts = [(x + CHIP_GAP, y + HEAD, each, laid) for x, y, each, laid in inside.parts]
    label = CHARACTER * cells_wide(_chip_text(box, host)) + 18
    return _Laid(max(inside.width + 2 * CHIP_GAP, label), inside.height + HEAD + CHIP_GAP, parts)


def _chip_text(box: Box, host: str) -> str:
    name = box.label
    if box.kind == "nic" and box.device is not None and box.device.name:
        name = box.device.name
    return _cut(_short(name, host), MAX_NAME)


def _short(name: str, host: str) -> str:
    """Shorten a name: inside a host without the host's name; a bus id without domain 0."""
    name = name.removeprefix(f"{host}:") if host else name
    return name.removeprefix("0000:") if len(name) == 12 else name


def _cut(name: str, most: int) -> str:
    return plain(name, most)


def _fit(text: str, room: float) -> str:
    most = int(room / (CHARACTER * 1.1))
    return text if len(text) <= most else text[: most - 1] + "…"


def _weight(edge: Edge) -> float | None:
    """Return what makes a line wide: GB/s, else the count as so many times a link of usual width."""
    if edge.bandwidth_gbs is not None:
        return edge.bandwidth_gbs
    return None if edge.count is None else 25.0 * edge.count


def _words(edge: Edge) -> str:
    text = KIND_NAMES.get(edge.kind, plain(edge.kind, 12).upper() if edge.kind != "network" else "network")
    text += f" × {edge.count}" if edge.count is not None else ""
    return text + (f", {edge.bandwidth_gbs:g} GB/s one way ({edge.source})" if edge.bandwidth_gbs is not None else "")


def _about(device: Device) -> str:
    """Return the lines that hovering over a device shows."""
    told = [
        (None, device.id),
        (None, device.kind if device.kind != "nic" else "NIC"),
        (None, device.model or device.arch),
        (None, device.name),
        ("host", device.host),
        ("bus id", device.bus_id),
        ("physical id", device.phy_id),
        ("die", device.die),
        ("package", device.package),
        ("NUMA node", device.numa_affinity if device.numa_node is None else device.numa_node),
        ("CPUs", device.cpu_affinity),
        ("GB/s of the port", device.gbs),
    ]
    lines = [plain(f"{word} {value}" if word else str(value), 120) for word, value in told if value is not None]
    return "\n".join(dict.fromkeys(lines))


def _style() -> Iterator[str]:
    """Yield the style sheet: colours for light and for dark surroundings."""
    yield "<style>"
    for column, (before, after) in enumerate((("", ""), ("@media (prefers-color-scheme: dark) { ", " }"))):
        rules = [f".{name} {{ fill: {colours[column]} }}" for name, colours in COLOURS.items()]
        for name, shades in FILLS.items():
            rules.append(f".{name} {{ fill: {shades[column][0]}; stroke: {shades[column][1]} }}")
        rules += [f".{name}-link {{ stroke: {colours[column]} }}" for name, colours in LINKS.items()]
        yield before + " ".join(rules) + after
    yield ".link { opacity: 0.75; fill: none } .link:hover { opacity: 1; stroke-width: 7 } .node:hover { opacity: 0.8 }"
    yield "</style>"


def _box(x: float, y: float, width: float, height: float, kind: str, round_: float) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'rx="{round_:g}" stroke-width="1"/>'
    )


def _text(
    x: float, y: float, text: str, size: float, colour: str = "ink", anchor: str = "start", weight: str = ""
) -> str:
    style = f'class="{colour}" font-size="{size:g}"' + (f' font-weight="{weight}"' if weight else "")
    style += "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
