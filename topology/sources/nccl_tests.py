"""nccl-tests (all_reduce_perf and others): which devices took part, and the bandwidth that each reached.

No pair is measured: what follows is no more than that a mesh of the device's links could, or could not, do it.
"""

from __future__ import annotations

import re

from tokenring.errors import TopologyError
from tokenring.topology.model.bandwidth import PCIE_GBS, published
from tokenring.topology.model.facts import MAX_DEVICES, Device, Facts, Link, Note, pairs

RANK = re.compile(
    r"^#\s+Rank\s+([0-9]{1,5})\s+(?:Group\s+[0-9]+\s+)?Pid\s+[0-9]+ on\s+(\S{1,80})\s+device\s+([0-9]{1,5})\s+"
    r"\[([0-9a-fA-Fx:.]{1,20})\]\s+(\S.{0,80}?)\s*$",
    re.MULTILINE | re.ASCII,
)
HEADER = re.compile(r"^#\s+size\s+count\s.*busbw", re.MULTILINE)
ROW = re.compile(r"^ *[0-9]{1,15} +[0-9]{1,15} +[a-z][a-z0-9_]* .*$", re.MULTILINE | re.ASCII)
PAIRS_OF_A_RANK = 32  # more ranks on one host are more than any host has


def recognises(text: str) -> bool:
    """Return whether a text has nccl-tests' list of ranks, or its header; see SourceParser."""
    return RANK.search(text) is not None or HEADER.search(text) is not None


def parse(text: str) -> Facts:
    """Parse the devices, and what their bandwidth says of the links. Raises TopologyError."""
    ranks = list(RANK.finditer(text))
    if not ranks:
        raise TopologyError("no list of ranks in it: '# Rank 0 ... device 0'", 1, 1)
    if len(ranks) > MAX_DEVICES:
        raise TopologyError(f"{len(ranks)} ranks; at most {MAX_DEVICES}", 1, 1)
    hosts = {each[2] for each in ranks}
    devices = tuple(
        Device(f"rank{each[1]}", "accelerator", index=int(each[3]), model=each[5], vendor="nvidia",
               host=each[2] if len(hosts) > 1 else None)
        for each in ranks
    )  # fmt: skip
    if len({device.id for device in devices}) < len(devices):
        raise TopologyError("two outputs in one file: a rank comes twice", 1, 1)
    notes = [Note("bandwidth of pairs: a collective does not tell")]
    if HEADER.search(text) is None:
        notes.append(Note("no results follow the ranks: some of these may be missing too", role="doubt"))
    best = max((_bus_bandwidth(each[0]) for each in ROW.finditer(text)), default=0.0)
    if len(hosts) > 1 or len(devices) < 2 or len(devices) > PAIRS_OF_A_RANK or best == 0:
        return Facts("links", devices, notes=tuple(notes))
    kind, switched, why = _decide(devices, best)
    notes.append(why)
    names = [device.id for device in devices]
    links = [Link(a, b, kind, switched=switched) for a, b in pairs(names)] if kind else []
    return Facts("links", devices, tuple(links), notes=tuple(notes))


def _decide(devices: tuple[Device, ...], best: float) -> tuple[str | None, bool, Note]:
    """Return the links' kind, whether they are switched, and why; None if the kind cannot be known."""
    reached = f"each rank reached {best:.1f} GB/s"
    entry, others = published("nvlink", devices[0]), len(devices) - 1
    if entry is None and best <= PCIE_GBS[32.0]:
        return "pcie", False, Note(f"{reached}, and no links of this model are known", role="evidence")
    if entry is None:
        return None, False, Note(f"{reached}, more than PCIe has; links of this model are not known")
    mesh = entry.links // others * others * entry.link_gbs
    if best > mesh:
        text = f"{reached}; links to all {others} others would give {mesh:g} at most: a switch"
        return "nvlink", True, Note(text, role="evidence")
    return None, False, Note(f"{reached}: a mesh, a switch or, below {PCIE_GBS[32.0]:g}, PCIe could do that")


def _bus_bandwidth(line: str) -> float:
    """Return the better bus bandwidth of a row, out of place or in place, GB/s.

    A row has time, algbw, busbw and errors, twice.
    """
    words = line.split()
    found = [words[-2]] if len(words) >= 8 else []
    found += [words[-6]] if len(words) >= 11 else []
    return max((float(word) for word in found if re.fullmatch(r"[0-9]{1,6}\.[0-9]{1,4}", word, re.ASCII)), default=0.0)
