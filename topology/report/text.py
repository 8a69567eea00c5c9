"""A topology as text: the verdict in a sentence, the matrix, islands, places, what is unknown, what it favours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tokenring.display.safe_text import plain, plain_lines
from tokenring.topology.model.facts import PCIE_KINDS, Device, unordered
from tokenring.topology.model.graph import Edge, Graph, SwitchFabric, total_gbs
from tokenring.topology.model.verdict import Verdict

MAX_MATRIX = 32
MAX_WITH_NICS = 13
MAX_CELL, MAX_MODEL = 200, 60  # characters
MEASURE = "tokenring topology --measure"
MODEL_FROM = {"nvlink": "nvidia-smi -q", "hccs": "npu-smi info", "xgmi": "RCCL's topology XML"}
SPEED_FROM = {"nvidia": "nvbandwidth", "huawei": "ascend-dmi"}
LINKS_FROM = {"nvidia": "nvidia-smi topo -m", "huawei": "npu-smi info -t topo", "amd": "rocm-smi --showtopo"}
SENTENCES = {
    "single": "one accelerator, nothing to link",
    "full-mesh": "full mesh: every pair has links of its own",
    "cube-mesh": "cube mesh: two fully linked quads, and one partner across for each device",
    "switch": "switch: every pair can use all links of a device, but a device has them once",
    "islands": "islands: groups with links of their own, joined by something slower",
    "ring": "ring: each device is linked to two neighbours",
    "partial-mesh": "partial mesh: some pairs have links of their own, others must pass through peers",
    "pcie-bridge": "PCIe only, below one host bridge",
    "pcie-host": "PCIe only, through host bridges of one NUMA node",
    "pcie-numa": "PCIe only, and some pairs pass between NUMA nodes",
    "pcie": "PCIe only; how far pairs are apart is not said",
    "multi-node": "several hosts",
    "unknown": "this does not show how they are linked",
}
FAVOURS = {
    "single": "no communication: any schedule",
    "full-mesh": "direct-kv and direct-q, which use all links at once; a single ring leaves most of them idle",
    "cube-mesh": "rings along the links; direct schedules would pass through devices between",
    "switch": "every schedule has the port's bandwidth: the fewest bytes per rank decide, which auto counts",
    "islands": "direct schedules inside an island, a ring between islands, in few and large messages",
    "ring": "ring and bidirectional along the ring; both directions double the bandwidth",
    "partial-mesh": "rings along the links",
    "pcie-bridge": "ring and bidirectional: each device sends to one neighbour at a time",
    "pcie-host": "ring and bidirectional: each device sends to one neighbour at a time",
    "pcie-numa": "a ring that crosses between NUMA nodes once each way",
    "pcie": "ring and bidirectional: each device sends to one neighbour at a time",
    "multi-node": "one level inside the hosts, a ring between them",
    "unknown": "measure before choosing; ring is never far off",
}


@dataclass(frozen=True)
class Table:
    """A table of a report. The first row and the first column are headings; `kinds` are those of links, by cell."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    kinds: tuple[tuple[str, ...], ...] = ()

    def lines(self) -> list[str]:
        """Return the table as text, its columns aligned."""
        rows = [[plain(cell, MAX_CELL) for cell in row] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return [self.title, *lines] if self.title else lines


Block = list[str] | Table


def report(graph: Graph, verdict: Verdict) -> str:
    """Return the whole report, ending in a newline."""
    texts = [each.lines() if isinstance(each, Table) else each for each in blocks(graph, verdict)]
    return plain_lines("\n\n".join(map("\n".join, texts))) + "\n"


def blocks(graph: Graph, verdict: Verdict) -> list[Block]:
    """Return the parts of the report: paragraphs of lines, and tables."""
    found: list[Block] = [[sentence(graph, verdict)], _why(verdict)]
    for host, inside in verdict.inside:
        found.append([f"{host or 'a host'}: {sentence(graph.on_host(host), inside)}"])
    found += [_matrix(graph), _islands(verdict), _places(graph), _unknown(graph, verdict)]
    if graph.accelerators:
        found.append([f"favours   {FAVOURS[verdict.name]}"])
    return [each for each in found if each != []]


def sentence(graph: Graph, verdict: Verdict) -> str:
    """Return the verdict in one sentence."""
    accelerators = graph.accelerators
    if not accelerators:
        return "no accelerators found"
    text = f"{_what(accelerators)}, {SENTENCES[verdict.name]}"
    return text + _widths(graph, verdict)


def _what(accelerators: tuple[Device, ...]) -> str:
    names = Counter(_model(device) for device in accelerators)
    return " + ".join(f"{number} × {name}" for name, number in names.items())


def _model(device: Device) -> str:
    vendor = {"nvidia": "NVIDIA", "amd": "AMD", "huawei": "Ascend"}.get(device.vendor or "", device.vendor)
    words = [word for word in (vendor, device.model or device.arch) if word]
    if len(words) == 2 and words[1].lower().startswith(words[0].lower()):
        words = words[1:]
    return plain(" ".join(words), MAX_MODEL) if words else "accelerator"


def _widths(graph: Graph, verdict: Verdict) -> str:
    peers = [edge for edge in graph.edges if edge.is_peer]
    if verdict.name not in ("full-mesh", "switch") or not peers:
        return ""
    if verdict.name == "switch":
        ports = _port_widths(graph, peers)
        return f": {ports} GB/s one way" if ports else ""
    widths = {edge.bandwidth_gbs for edge in peers}
    known = _widest(widths)
    text = f" ({known} GB/s one way)" if known else ""
    return text + _ring_in(len(graph.accelerators))


def _ring_in(mesh: int) -> str:
    """Say how many of its links a ring would use in a full mesh of so many."""
    return f"; a ring uses 1 of the {mesh - 1} links of each" if mesh > 2 else ""


def _port_widths(graph: Graph, peers: list[Edge]) -> str | None:
    """Return the GB/s that lead to the switches; where none is named, those of most pairs' kind of link."""
    ports = graph.fabric().ports
    if attached := [ports[device.id].values() for device in graph.accelerators if device.id in ports]:
        return _widest({total_gbs(edges) for edges in attached})
    ((kind, _),) = Counter(edge.kind for edge in peers).most_common(1)
    return _widest({edge.bandwidth_gbs for edge in peers if edge.kind == kind})


def _widest(widths: set[float | None]) -> str | None:
    known = sorted(width for width in widths if width is not None)
    if not known or len(known) < len(widths):
        return None
    return " to ".join(dict.fromkeys(map(_number, (known[0], known[-1]))))  # once where they are written alike


def _why(verdict: Verdict) -> list[str]:
    lines = [f"class     {verdict.name}, confidence {verdict.confidence}"]
    lines += [f"because   {verdict.evidence[0]}"] if verdict.evidence else []
    lines += [f"          {line}" for line in verdict.evidence[1:]]
    return lines + [f"warning   {line}" for line in verdict.warnings]


def _matrix(graph: Graph) -> Block:
    """Lay out link and GB/s one way of each pair; a source's PCIe word where there is nothing better."""
    ends = [device.id for device in graph.accelerators]
    if not 1 < len(ends) <= MAX_MATRIX:
        return [f"links     {len(ends)} accelerators: too many for a matrix; --json has all"] if len(ends) > 1 else []
    named = set(ends)
    linked = {end for pair in graph.between() for end in pair if not named.isdisjoint(pair)}
    nics = [device.id for device in graph.of_kind("nic") if device.id in linked]
    if len(ends) + len(nics) <= MAX_WITH_NICS:  # the nearest are listed below in any case
        ends += nics
    best = graph.between()
    fabric = graph.fabric()
    found = [[_between(a, b, best.get(unordered(a, b)), fabric) for b in ends] for a in ends]
    texts = [[_cell(a, b, edge) for b, edge in zip(ends, row, strict=True)] for a, row in zip(ends, found, strict=True)]
    kinds = tuple(tuple("" if edge is None else edge.kind for edge in row) for row in found)
    rows = (("", *ends), *((a, *row) for a, row in zip(ends, texts, strict=True)))
    return Table("links, GB/s one way", rows, kinds)


def _between(a: str, b: str, edge: Edge | None, fabric: SwitchFabric) -> Edge | None:
    """Return what the matrix shows of a pair: a link of its own, else a way through switches, else what there is."""
    if a == b or (edge is not None and edge.is_peer):
        return edge
    return fabric.between(a, b) or edge


def _cell(a: str, b: str, edge: Edge | None) -> str:
    if a == b:
        return "·"
    return "?" if edge is None else _named(_word(edge), edge.bandwidth_gbs)


def _word(edge: Edge) -> str:
    count = f"×{edge.count}" if edge.count is not None else ""
    return edge.kind + count + ("→switch" if edge.switched else "")


def _named(word: str, gbs: float | None) -> str:
    return word if gbs is None else f"{word} {_number(gbs)}"


def _number(value: float) -> str:
    if value < 1:
        return f"{value:.3g}"  # slow links are measured too
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _islands(verdict: Verdict) -> list[str]:
    if verdict.name != "islands":
        return []
    lines = ["islands"]
    for island in verdict.islands:
        links = _ring_in(len(island.members)) if island.shape == "full-mesh" else ""
        lines.append(f"  {island.shape}: {', '.join(island.members)}{links}")
    return lines


def _places(graph: Graph) -> Block:
    rows = [["place", "host", "NUMA", "CPUs", "nearest NIC"]]
    near = _nearest_nics(graph)
    for device in graph.accelerators or graph.of_kind("nic"):
        numa = device.numa_affinity if device.numa_node is None else str(device.numa_node)
        name = f"{device.id} {device.name}" if device.kind == "nic" and device.name else device.id
        rows.append([name, device.host or "", numa or "?", device.cpu_affinity or "?", near.get(device.id, "?")])
    keep = [i for i in range(len(rows[0])) if i == 0 or any(row[i] not in ("", "?") for row in rows[1:])]
    return Table("", tuple(tuple(row[i] for i in keep) for row in rows)) if len(keep) > 1 else []


def _nearest_nics(graph: Graph) -> dict[str, str]:
    """Return the NICs with the shortest way from each accelerator, and that way."""
    order = ("pix", "pxb", "phb", "node", "sys")
    nics = {device.id: device.name or device.id for device in graph.of_kind("nic")}
    ways: dict[str, list[tuple[int, str]]] = {}
    for edge in graph.edges if nics else ():
        for end, other in ((edge.a, edge.b), (edge.b, edge.a)):
            if other in nics and edge.kind in order:
                ways.setdefault(end, []).append((order.index(edge.kind), nics[other]))
    return {end: _shortest(found, order) for end, found in ways.items()}


def _shortest(found: list[tuple[int, str]], order: tuple[str, ...]) -> str:
    least = min(rank for rank, _ in found)
    names = [name for rank, name in found if rank == least]
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{listed} ({order[least]})"


def _unknown(graph: Graph, verdict: Verdict) -> list[str]:
    lines = [f"  {note}" for note in _shown(graph, verdict)]
    lines += [f"  {line}" for line in _how_to_know(graph, verdict)]
    return ["unknown", *lines] if lines else []


def _how_to_know(graph: Graph, verdict: Verdict) -> Iterable[str]:
    """Yield, for each thing that is not known, the tool that would show it."""
    named = {device.id: device for device in graph.accelerators}
    vendors = {device.vendor or "" for device in named.values()}
    vendor = vendors.pop() if len(vendors) == 1 else ""
    speeds = " or ".join(name for name in (SPEED_FROM.get(vendor), MEASURE) if name)
    for kind in dict.fromkeys(edge.kind for edge in graph.edges if edge.bandwidth_gbs is None and edge.is_peer):
        source = None if any(device.model or device.arch for device in named.values()) else MODEL_FROM.get(kind)
        how = f"name the model with one more source, as {source}" if source else f"measure it with {speeds}"
        yield f"bandwidth of {kind} links: {how}"
    classes = {inside.name for _, inside in verdict.inside} or {verdict.name}
    if "unknown" in classes and len(named) > 1:
        links = " or ".join(name for name in (LINKS_FROM.get(vendor), MEASURE) if name)
        yield f"what links them: {links} tells"
    ways = [edge for edge in graph.edges if edge.kind in PCIE_KINDS and {edge.a, edge.b} <= named.keys()]
    if any(name.startswith("pcie") for name in classes) and any(edge.bandwidth_gbs is None for edge in ways):
        yield f"bandwidth through PCIe: measure it with {speeds}"


def _shown(graph: Graph, verdict: Verdict) -> Iterable[str]:
    return (str(note) for note in graph.notes if str(note) not in verdict.evidence)
