"""`rocm-smi --showtopo` and `--showtopotype`, `amd-smi topology` and `amd-smi xgmi`: tables by GPU or by bus id."""

from __future__ import annotations

import re
from dataclasses import replace

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import MAX_DEVICES, Coverage, Device, Facts, Link, Note, normal_bus_id, pairs
from tokenring.topology.model.labels import meaning
from tokenring.topology.model.schema import load_json
from tokenring.topology.sources.matrix import ESCAPE, Matrix, coverage_of, links_of, words_in
from tokenring.topology.sources.tables import lost, read_tables, without_shifted

BUS_ID = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
NAME = re.compile(rf"GPU[0-9]{{1,4}}|{BUS_ID}", re.ASCII | re.IGNORECASE)
TITLES = re.compile(
    r"ROCm System Management Interface|(?:Link Type|Hops|Weight) between two GPUs|between DRM devices [0-9]"
    r"|LINK (?:TYPE|METRIC) TABLE"
)
SELF = ("0", "SELF", "X", "N/A")
TYPES = {"XGMI", "PCIE", "XXXX", "UNKNOWN"}
REACHED = {2: "node", 3: "sys"}  # hops of PCIe: GPU, CPU, GPU; a second CPU is the third
NUMA = re.compile(r"\s*GPU ?\[?([0-9]{1,4})\]?.*Numa (Node|Affinity): ?([0-9]{1,4})\s*", re.ASCII)
TROUBLE = re.compile(r"\s*(?:WARNING|ERROR)|.*\bNot supported", re.IGNORECASE)
MAX_NOTES = 20
# The driver reports x16 lanes of 25 Gbit/s for each xGMI link, whatever the links do: it counts them, no more.
DRIVER_MBS = 50_000
PAIR = re.compile(r"\(Topology\) (Link type|Hops) between DRM devices ([0-9]{1,4}) and ([0-9]{1,4})", re.ASCII)
HOPS = ("1", "2", "3", "4")
PORT = re.compile(rf"(GPU[0-9]{{1,4}})\s+({BUS_ID})\s+(?:\S+ Gb/s|N/A)\s+(?:([0-9]{{1,6}}) Gb/s|N/A)", re.ASCII)


def recognises(text: str) -> bool:
    """Return whether a text has a title of these tools, or the label XGMI in a row; see SourceParser."""
    return TITLES.search(text[:20_000]) is not None or "XGMI" in words_in(text)


def parse(text: str) -> Facts:
    """Parse the GPUs and their links. Raises TopologyError."""
    if '"system"' in text[:20_000]:
        return _json(text)
    lines = [ESCAPE.sub("", line) for line in text.splitlines()]
    if any("LINK METRIC TABLE" in line for line in lines) and not any("LINK TYPE TABLE" in line for line in lines):
        return _xgmi(lines)
    tables = read_tables(text, NAME)
    notes = [Note(line.strip()[:200], n) for n, line in enumerate(lines, 1) if TROUBLE.match(line)][:MAX_NOTES]
    if not tables and notes:
        return Facts("devices", notes=tuple(notes))
    if not tables:
        raise TopologyError("no table of GPUs in it", len(lines) + 1, 1)
    names = list(dict.fromkeys(name for _, table in tables for name in table.columns))
    devices = [_device(name, order) for order, name in enumerate(names)]
    if len({device.id for device in devices}) < len(devices):
        raise TopologyError("two of the names in it are one GPU", 1, 1)
    devices = _on_numa_nodes(devices, lines)
    titled = [table for title, table in tables if re.match("(?i)link type", title)]
    types = next((table for table in [*titled, *(table for _, table in tables)] if _is(table, TYPES)), None)
    if types is None:
        notes.append(Note("no table of link types in it"))
        return Facts("devices", tuple(devices), notes=tuple(notes))
    links, differing = _links(without_shifted(types, SELF), tables, dict(zip(names, devices, strict=True)))
    coverage = coverage_of(types, names, links)
    unread = sum(row.labels.count("XXXX") for row in types.rows)
    if unread:  # partitions of one package, or a driver that is too old
        coverage = "devices"
        notes.append(Note(f"{unread} cells are XXXX: not supported, so the links of these GPUs are not known"))
    others = [table for _, table in tables if table is not types and lost(table)]
    if others:
        notes.append(Note(f"{len(others)} of {len(tables)} tables have rows or cells missing", role="doubt"))
    return Facts(coverage, tuple(devices), tuple(links), notes=(*notes, *types.notes, *differing))


def _is(table: Matrix, words: set[str]) -> bool:
    return any(label.upper() in words for row in table.rows for label in row.labels)


def _device(name: str, order: int) -> Device:
    """Make a device: amd-smi names devices by bus id, in the order of their numbers."""
    bus_id = normal_bus_id(name)
    index = order if bus_id else int(name[3:])
    return Device(f"GPU{index}", "accelerator", index, bus_id=bus_id, vendor="amd")


def _on_numa_nodes(devices: list[Device], lines: list[str]) -> list[Device]:
    nodes: dict[int, int] = {}
    affinities: dict[int, str] = {}
    for line in lines:
        if match := NUMA.fullmatch(line):
            if match[2] == "Node":
                nodes[int(match[1])] = int(match[3])
            else:
                affinities[int(match[1])] = match[3]
    return [
        replace(each, numa_node=nodes.get(each.index), numa_affinity=affinities.get(each.index))
        for each in devices
        if each.index is not None
    ]


def _links(
    types: Matrix, tables: list[tuple[str, Matrix]], devices: dict[str, Device]
) -> tuple[list[Link], list[Note]]:
    """Return the links of the table of types; ways through PCIe by the hops, and how many xGMI links there are."""
    named = [replace(device, id=name) for name, device in devices.items()]
    links, notes = links_of(types, named)
    hops = _cells(tables, r"(?i).*\bhops\b", r"([0-9]{1,2})")
    driver = _cells(tables, r"NUMA BW TABLE", r"[0-9]{1,8}-([0-9]{1,8})")
    found = []
    for link in links:
        far = hops.get((link.a, link.b))
        rate = driver.get((link.a, link.b), 0)
        if link.kind == "pcie" and far is not None and far > 1:
            link = replace(link, kind=REACHED[min(far, 3)])
        elif link.kind == "xgmi" and rate and rate % DRIVER_MBS == 0:
            link = replace(link, count=rate // DRIVER_MBS)
        found.append(replace(link, a=devices[link.a].id, b=devices[link.b].id))
    return found, notes


def _cells(tables: list[tuple[str, Matrix]], title: str, cell: str) -> dict[tuple[str, str], int]:
    """Return the numbers in the table of a title, by row and column."""
    table = next((table for words, table in tables if re.match(title, words)), None)
    found: dict[tuple[str, str], int] = {}
    for row in table.rows if table else ():
        for column, label in zip(table.columns if table else (), row.labels, strict=False):
            if match := re.fullmatch(cell, label, re.ASCII):
                found[row.name, column] = int(match[1])
    return found


def _json(text: str) -> Facts:
    """Read `--showtopo --json`: a line for each pair."""
    document = load_json(text)
    system = document.get("system") if isinstance(document, dict) else None
    said: dict[str, dict[tuple[str, str], str]] = {"Link type": {}, "Hops": {}}
    for key, value in system.items() if isinstance(system, dict) else ():
        if (match := PAIR.fullmatch(key)) and isinstance(value, str) and int(match[2]) != int(match[3]):
            said[match[1]][f"GPU{int(match[2])}", f"GPU{int(match[3])}"] = value
    names = dict.fromkeys(name for pair in said["Link type"] for name in pair)
    if not names or len(names) > MAX_DEVICES:
        raise TopologyError("no pair of GPUs with a link type in it, or too many", 1, 1)
    links = []
    for (a, b), label in said["Link type"].items():
        found, far = meaning(label), said["Hops"].get((a, b))
        if found:
            kind = REACHED.get(min(int(far), 3), "pcie") if found.kind == "pcie" and far in HOPS else found.kind
            links.append(Link(a, b, kind, found.count, label=label))
    devices = tuple(_device(name, 0) for name in names)
    coverage: Coverage = "links" if len(links) == len(said["Link type"]) else "devices"
    return Facts(coverage, devices, tuple(links))


def _xgmi(lines: list[str]) -> Facts:
    """Read `amd-smi xgmi`: counters for each peer that there is a link to, and the rate of a link."""
    columns: list[str] = []
    devices: dict[str, Device] = {}
    linked: dict[tuple[str, str], None] = {}
    bus_id = None
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not columns and "bdf" in words:
            columns = [word.lower() for word in words if re.fullmatch(BUS_ID, word, re.IGNORECASE)]
        elif match := PORT.match(line.strip()):
            bus_id = match[2].lower()
            if bus_id in devices or len(devices) >= MAX_DEVICES:
                raise TopologyError(f"{match[1]} is there twice, or there are too many", number, 1)
            gbs = int(match[3]) / 8 if match[3] and match[3] != "0" else None
            index = int(match[1][3:])
            devices[bus_id] = Device(
                f"GPU{len(devices)}", "accelerator", index, bus_id=normal_bus_id(bus_id), vendor="amd", gbs=gbs
            )
        elif bus_id and words[:1] in (["Read"], ["Write"]):
            cells = re.findall(r"N/A|[0-9]+ [KMGT]?B", line)
            linked |= {(bus_id, c): None for c, cell in zip(columns, cells, strict=False) if cell != "N/A"}
    if not devices:
        raise TopologyError("no row of a GPU in it", len(lines) + 1, 1)
    notes = []
    if missing := [column for column in columns if column not in devices]:
        notes.append(Note(f"no row for {', '.join(missing)}", role="doubt"))
        for column in missing[: MAX_DEVICES - len(devices)]:
            bus = normal_bus_id(column)
            devices[column] = Device(f"GPU{len(devices)}", "accelerator", bus_id=bus, vendor="amd")
    links = [
        Link(devices[a].id, devices[b].id, "xgmi", label="XGMI")
        for a, b in pairs(devices)
        if (a, b) in linked or (b, a) in linked
    ]
    coverage: Coverage = "devices" if missing else "links"
    return Facts(coverage, tuple(devices.values()), tuple(links), notes=tuple(notes))
