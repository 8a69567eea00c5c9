"""NCCL's graphs (NCCL_GRAPH_DUMP_FILE): the rings and trees that it planned, and at what GB/s.

They show the links in use, not all there are. What follows: a graph that reduces in the switch needs one, and
a GPU planned with more than any PCIe slot carries has links of its own to the neighbours planned with most.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import MAX_DEVICES, Device, Facts, Link, Note, unordered
from tokenring.topology.sources.nvswitch import HIDDEN
from tokenring.topology.sources.xmltext import Element, parse_xml

RING, IN_SWITCH = "4", "5"  # pattern; 5 is NVLS
PCIE = ("PIX", "PXB", "PXN", "PHB", "SYS")
SLOT_GBS = 48.0  # the most that NCCL plans for a slot: Gen5 x16


def recognises(text: str) -> bool:
    """Return whether a text has the root element of NCCL's graphs; see SourceParser."""
    return re.search(r"<graphs[\s/>]", text[:20_000]) is not None


def parse(text: str) -> Facts:
    """Parse the GPUs, and what follows of their links. Raises TopologyError."""
    root = parse_xml(text)
    names: dict[str, None] = {}
    best: dict[tuple[str, str], float] = defaultdict(float)
    types: set[str] = set()
    switch = False
    for graph in root.children:
        gbs = _number(graph.get("speedintra") or graph.get("bwintra"))
        planned: dict[tuple[str, str], float] = defaultdict(float)
        for channel in graph.children:
            gpus = [f"GPU{(gpu.get('dev') or '?')[:20]}" for gpu in channel.children if gpu.tag == "gpu"]
            names |= dict.fromkeys(gpus)
            if len(names) > MAX_DEVICES:
                raise TopologyError(f"more than {MAX_DEVICES} devices", channel.line, channel.column)
            for pair in _hops(gpus, graph.get("pattern") == RING and not _has_net(channel)):
                planned[pair] += gbs
        if graph.children and graph.get("typeintra"):
            types.add(graph.get("typeintra") or "")
        switch |= graph.get("pattern") == IN_SWITCH and bool(graph.children)
        for pair, sum_gbs in planned.items():
            best[pair] = max(best[pair], sum_gbs)
    if not names:
        raise TopologyError("no channel with GPUs in it", root.line, root.column)
    devices = [_device(name) for name in sorted(names, key=lambda name: (len(name), name))]
    notes = [Note(f"the links in use, not all there are; the longest way in use is {', '.join(sorted(types)) or '?'}")]
    if switch:
        links = [Link(device.id, HIDDEN, "nvlink", switched=True) for device in devices]
        return Facts("links", (*devices, Device(HIDDEN, "switch")), tuple(links), notes=tuple(notes))
    return Facts("devices", tuple(devices), tuple(_links(best, types)), notes=tuple(notes))


def _number(text: str | None) -> float:
    return float(text) if text and re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text, re.ASCII) else 0.0


def _has_net(channel: Element) -> bool:
    return any(each.tag == "net" for each in channel.children)


def _hops(gpus: list[str], closed: bool) -> list[tuple[str, str]]:
    ways = list(zip(gpus, [*gpus[1:], *(gpus[:1] if closed and len(gpus) > 2 else [])], strict=False))
    return [unordered(a, b) for a, b in ways if a != b]


def _device(name: str) -> Device:
    number = name[3:]
    index = int(number) if re.fullmatch(r"[0-9]{1,5}", number, re.ASCII) else None
    return Device(name, "accelerator", index)


def _links(planned: Mapping[tuple[str, str], float], types: set[str]) -> list[Link]:
    """Return ways through PCIe, and NVLink where PCIe could not carry what is planned."""
    if not types or not types <= {*PCIE}:
        return []  # NVL: all pairs in use have NVLinks, and the others may
    own: set[tuple[str, str]] = set()
    around: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
    for pair, gbs in planned.items():
        for end in pair:
            around[end][pair] = gbs
    for at in around.values():
        if sum(at.values()) > SLOT_GBS and len(set(at.values())) > 1:
            own |= {pair for pair, gbs in at.items() if gbs == max(at.values())}
    return [Link(a, b, "nvlink" if (a, b) in own else "pcie") for a, b in sorted(planned)]
