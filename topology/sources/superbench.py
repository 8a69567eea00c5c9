"""superbench gpu_copy: lines such as `gpu0_to_gpu1_write_by_dma 279.287`."""

from __future__ import annotations

import re

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import MAX_DEVICES, Device, Facts, Measurement, Note
from tokenring.topology.sources.speeds import Speed, coverage_of, links_of

COPY = re.compile(
    r"^gpu([0-9]{1,3})_(to|and)_gpu([0-9]{1,3})(?:_(?:write|read))?_by_(?:sm|dma) ([0-9.]{1,16})\s*$",
    re.MULTILINE | re.ASCII,
)


def recognises(text: str) -> bool:
    """Return whether a text has a line of a copy; see SourceParser."""
    return COPY.search(text) is not None


def parse(text: str) -> Facts:
    """Parse the GPUs, their copies, and the links that follow from these. Raises TopologyError."""
    best: dict[tuple[str, int, int], float] = {}
    for each in COPY.finditer(text):
        try:
            key, gbs = (each[2], int(each[1]), int(each[3])), float(each[4])
        except ValueError:
            line = text.count("\n", 0, each.start(4)) + 1
            raise TopologyError(f"{each[4]!r} is no number", line, each.start(4) - each.start() + 1) from None
        best[key] = max(gbs, best.get(key, 0.0))
    count = min(max(end for _, a, b in best for end in (a, b)) + 1, MAX_DEVICES)
    devices = tuple(Device(f"GPU{index}", "accelerator", index=index) for index in range(count))
    names = [device.id for device in devices]
    measurements = []
    speeds = {}
    for (way, a, b), gbs in sorted(best.items()):
        if way == "to" and a != b:
            both = best.get(("and", a, b))
            measurements.append(Measurement(names[a], names[b], gbs, both, what="the best of kernel and copy engine"))
            if a < b:
                speeds[names[a], names[b]] = Speed(gbs)
    links, notes = links_of(devices, speeds)
    missing = count * (count - 1) - len(measurements)
    if missing or count < 2:  # copies are made from each GPU to each, itself among them
        text = f"{missing} copies from GPU to GPU are missing" if missing else "copies of one GPU alone"
        notes.append(Note(text, role="doubt"))
    return Facts(coverage_of(devices, speeds), devices, tuple(links), tuple(measurements), tuple(notes))
