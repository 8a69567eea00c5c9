"""p2pBandwidthLatencyTest of the CUDA samples: each pair one way, both ways, with peer access and without it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import MAX_DEVICES, Device, Facts, Measurement, Note, normal_bus_id
from tokenring.topology.sources.speeds import Speed, SpeedTable, coverage_of, links_of, tables

DEVICE = re.compile(
    r"^Device: ([0-9]{1,3}), (.{1,80}?), pciBusID: ([0-9a-f]{1,4}), pciDeviceID: ([0-9a-f]{1,4}), "
    r"pciDomainID: ?([0-9a-f]{1,8})",
    re.MULTILINE | re.ASCII,
)
KINDS = {
    "access": r"P2P Connectivity Matrix",
    "host": r"Unidirectional P2P=Disabled Bandwidth",
    "peer": r"Unidirectional P2P=Enabled Bandwidth",
    "host both": r"Bidirectional P2P=Disabled Bandwidth",
    "both": r"Bidirectional P2P=Enabled Bandwidth",
    "latency": r"P2P=Enabled Latency",
}
Cells = Mapping[tuple[int, int], float]


def recognises(text: str) -> bool:
    """Return whether a text has the title of one of the test's matrices; see SourceParser."""
    return (
        re.search(r"P2P=(?:En|Dis)abled (?:Bandwidth|Latency|.*Matrix)|\[P2P \(Peer-to-Peer\) GPU Bandwidth", text)
        is not None
    )


def parse(text: str) -> Facts:
    """Parse the devices, what was measured of pairs, and the links that follow. Raises TopologyError."""
    found: dict[str, Cells] = {kind: {} for kind in KINDS}
    matrices = [(kind, table) for table in tables(text) if (kind := _kind(table))]
    found |= {kind: _cells(table) for kind, table in matrices}
    devices = _devices(text, found)
    if not devices:
        raise TopologyError("no device and no matrix in it", 1, 1)
    measurements, speeds = [], {}
    for a in range(len(devices)):
        for b in range(len(devices)):
            if a == b:
                continue
            gbs, both = found["peer"].get((a, b)), found["both"].get((a, b))
            pair = devices[a].id, devices[b].id
            if gbs is not None or both is not None:
                measurements.append(Measurement(*pair, gbs, both, found["latency"].get((a, b)), "peer access on"))
            if a < b and (speed := _speed(found, (a, b))) is not None:
                speeds[pair] = speed
    links, notes = links_of(devices, speeds)
    if not speeds and len(devices) > 1:
        notes.append(Note("no pair has a bandwidth with peer access on"))
    if cut := [table for _, table in matrices if table.missing_rows]:
        text = f"{cut[0].title[:80]}: {cut[0].missing_rows} rows are missing"
        notes.append(Note(text, role="doubt"))
    elif not matrices:
        notes.append(Note("no matrix follows the devices: some of these may be missing too", role="doubt"))
    return Facts(coverage_of(devices, speeds), devices, tuple(links), tuple(measurements), tuple(notes))


def _kind(table: SpeedTable) -> str | None:
    """Return the kind of a matrix; None for another one, and for latencies as the processor sees them.

    Latencies come twice: as the device and as the processor sees them.
    """
    if table.corner == "CPU":
        return None
    return next((kind for kind, title in KINDS.items() if re.match(title, table.title)), None)


def _cells(table: SpeedTable) -> Cells:
    return {place: value for place, value in table.values.items() if value is not None}


def _devices(text: str, found: Mapping[str, Cells]) -> tuple[Device, ...]:
    """Return the devices that are listed; else as many as the matrices have."""
    listed = {int(each[1]): each for each in DEVICE.finditer(text)}
    known = {end for cells in found.values() for place in cells for end in place} or set(listed)
    devices = []
    for index in range(min(max(known, default=-1) + 1, MAX_DEVICES)):
        device = Device(f"GPU{index}", "accelerator", index=index, vendor="nvidia")
        if (each := listed.get(index)) is not None:
            bus = normal_bus_id(f"{each[5]}:{each[3]}:{each[4]}")
            device = Device(device.id, "accelerator", index, bus, model=each[2], vendor="nvidia")
        devices.append(device)
    return tuple(devices)


def _speed(found: Mapping[str, Cells], pair: tuple[int, int]) -> Speed | None:
    """Return the mean of both directions, one way; from both ways at once where nothing else is there."""
    peer = found["access"].get(pair, 1.0) != 0
    for on, off, ways in (("peer", "host", 1), ("both", "host both", 2)):
        if (gbs := _mean(found[on], pair)) is not None:
            host = _mean(found[off], pair)
            return Speed(gbs / ways, None if host is None else host / ways, peer and _differs(found, pair))
    return None


def _differs(found: Mapping[str, Cells], pair: tuple[int, int]) -> bool:
    """Return whether peer access changes anything.

    Where a driver refuses it, both matrices are of copies through the host.
    """
    for on, off in (("peer", "host"), ("both", "host both")):
        enabled, disabled = _mean(found[on], pair), _mean(found[off], pair)
        if enabled is not None and disabled is not None and abs(enabled - disabled) > 0.1 * disabled:
            return True
    return not (found["host"] or found["host both"])


def _mean(cells: Cells, pair: tuple[int, int]) -> float | None:
    values = [cells[each] for each in (pair, pair[::-1]) if each in cells]
    return sum(values) / len(values) if values else None
