"""nvbandwidth: copies between devices, by copy engines and by kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import MAX_DEVICES, Device, Facts, Measurement, Note, normal_bus_id
from tokenring.topology.sources.speeds import Speed, coverage_of, links_of, tables

DEVICE = re.compile(  # older versions name no bus
    r"^Device ([0-9]{1,3}): (.{1,80}?)(?: \(([0-9a-fA-F:.]{5,20})\))?[ \t\r]*$", re.MULTILINE | re.ASCII
)
RUNNING = re.compile(r"^Running (\w{1,80})\.", re.MULTILINE | re.ASCII)


def recognises(text: str) -> bool:
    """Return whether a text has nvbandwidth's version, or one of its tests; see SourceParser."""
    return "nvbandwidth Version" in text or re.search(r"^Running \w{1,80}_(?:ce|sm)\.", text, re.MULTILINE) is not None


def parse(text: str) -> Facts:
    """Parse the devices, their copies, and the links that follow from these. Raises TopologyError."""
    listed = {int(each[1]): each for each in DEVICE.finditer(text)}
    one_way: dict[tuple[int, int], float] = {}
    both: dict[tuple[int, int], float] = {}
    lost: list[Note] = []
    for found, source, target, gbs in _copies(text, lost):
        into = both if "bidirectional" in found else one_way
        into[source, target] = max(gbs, into.get((source, target), 0.0))
    ends = {end for pair in one_way for end in pair} or set(listed)
    if not ends and not RUNNING.search(text):
        raise TopologyError("no device and no test in it", 1, 1)
    devices = tuple(_device(index, listed.get(index)) for index in range(min(max(ends, default=-1) + 1, MAX_DEVICES)))
    names = [device.id for device in devices]
    measurements = tuple(
        Measurement(names[a], names[b], gbs, both.get((a, b)), what="device to device")
        for (a, b), gbs in sorted(one_way.items())
    )
    speeds = {
        (names[a], names[b]): Speed(max(gbs, one_way.get((b, a), 0.0))) for (a, b), gbs in one_way.items() if a < b
    }
    links, notes = links_of(devices, speeds)
    notes += lost
    if not one_way:
        notes.append(Note("no test between GPUs is in it: device_to_device_memcpy_write_ce is one"))
    return Facts(coverage_of(devices, speeds), devices, tuple(links), measurements, tuple(notes))


def _copies(text: str, lost: list[Note]) -> Iterator[tuple[str, int, int, float]]:
    """Yield test, from, to, GB/s of every copy between two devices; note each matrix that was cut."""
    for table in tables(text):
        test = RUNNING.match(table.before)
        arrow = re.search(r"GPU\(row\) (<-|->|<->) GPU\(column\)", table.title)
        if test is None or arrow is None or "GB/s" not in table.title or not test[1].startswith("device_to_device"):
            continue
        if arrow[1] == "<->" and "Total" not in table.title:
            continue  # one direction of two: which one, versions differ in
        if table.missing_rows:
            lost.append(Note(f"{test[1]}: {table.missing_rows} rows are missing", role="doubt"))
        for (row, column), value in table.values.items():
            if row != column and value:
                yield (test[1], *((row, column) if arrow[1] == "->" else (column, row)), value)


def _device(index: int, listed: re.Match[str] | None) -> Device:
    if listed is None:
        return Device(f"GPU{index}", "accelerator", index=index, vendor="nvidia")
    bus = normal_bus_id(listed[3]) if listed[3] else None
    return Device(f"GPU{index}", "accelerator", index, bus, model=listed[2], vendor="nvidia")
