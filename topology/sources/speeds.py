"""Links from speeds that somebody measured: a pair faster than any way through the host has a link of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tokenring.topology.model.bandwidth import PCIE_GBS, PUBLISHED, published
from tokenring.topology.model.facts import Coverage, Device, Link, Note, pairs
from tokenring.topology.model.shapes import Neighbours, is_clique, neighbours, parts

TIMES_HOST = 2.0  # a link is so much faster than the same pair through the host
PCIE_MOST = PCIE_GBS[32.0]
TOTALS = sorted({each.link_gbs * each.links for each in PUBLISHED if each.kind == "nvlink"})
WHOLE = [total for total in TOTALS if total >= 300]
NEARLY = 0.8  # of what is published: what tools reach
GAP = 1.05  # between pairs of one socket and pairs of two

Pair = tuple[str, str]


@dataclass(frozen=True)
class Speed:
    """The speed of a pair: GB/s one way; through the host's memory; whether the devices reach each other at all."""

    gbs: float
    host_gbs: float | None = None
    peer: bool = True

    @property
    def is_link(self) -> bool:
        """True if the devices reach each other, and the pair is faster than any way through the host."""
        if not self.peer:
            return False
        return self.gbs > PCIE_MOST if self.host_gbs is None else self.gbs >= TIMES_HOST * self.host_gbs


def links_of(devices: Sequence[Device], speeds: Mapping[Pair, Speed]) -> tuple[list[Link], list[Note]]:
    """Return a link for each pair whose speed is known, and notes on how that was decided."""
    linked = [pair for pair, speed in speeds.items() if speed.is_link]
    around = neighbours([device.id for device in devices], linked)
    switched: set[Pair] = set()
    notes = []
    for part in parts(around):
        if len(part) > 1 and (why := _why_switch(part, around, devices, speeds)):
            switched |= {pair for pair in linked if set(pair) <= set(part)}
            notes.append(why)
    links = [Link(*pair, "link", switched=pair in switched) for pair in linked]
    slow = {pair: speed for pair, speed in speeds.items() if not speed.is_link}
    ways, why_ways = _pcie_ways(devices, slow, any_links=bool(linked))
    return links + [Link(*pair, kind) for pair, kind in ways.items()], notes + why_ways


def coverage_of(devices: Sequence[Device], speeds: Mapping[Pair, Speed]) -> Coverage:
    """Return the coverage of speeds: where only some pairs were measured, the others may have links or not."""
    some = any(speed.is_link for speed in speeds.values())
    return "devices" if some and len(speeds) < len(pairs(device.id for device in devices)) else "links"


def _why_switch(
    part: Sequence[str], around: Neighbours, devices: Sequence[Device], speeds: Mapping[Pair, Speed]
) -> Note | None:
    """Return why these devices have a switch; None if nothing says so.

    Links of their own to all others would be more than a device has.
    """
    measured = [speed for pair, speed in speeds.items() if set(pair) <= set(part)]
    if not all(speed.is_link for speed in measured):
        return None
    each, others = min(speed.gbs for speed in measured), max(len(around[name]) for name in part)
    device = next(device for device in devices if device.id == part[0])
    entry = published("nvlink", device)
    most = entry.link_gbs * entry.links if entry else TOTALS[-1]
    if each * others > most:
        text = f"{each:.0f} GB/s to each of {others} others would be {each * others:.0f}; "
        text += f"{'it' if entry else 'no device'} has links for more than {most:.0f}: a switch"
        return Note(text, role="evidence")
    sockets = "SXM" in (device.model or "SXM")  # cards have bridges: two of them have all links for each other
    whole = [total for total in ([most] if entry else WHOLE) if NEARLY * total <= each <= total]
    if whole and (others > 1 or sockets):
        text = f"{each:.0f} GB/s for one pair is all that a device with {whole[0]:.0f} has: a switch, if nothing else"
        return Note(text, role="evidence" if others > 1 else "doubt")
    return None


def _pcie_ways(
    devices: Sequence[Device], slow: Mapping[Pair, Speed], any_links: bool
) -> tuple[dict[Pair, str], list[Note]]:
    """Return the ways of pairs through the host.

    They lead between two sockets where groups of devices are slower from one to the other.
    """
    ways = dict.fromkeys(slow, "pcie")
    notes = []
    groups = [] if any_links else _groups([device.id for device in devices], slow)
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    for a, b in slow if groups else ():
        if group_of[a] != group_of[b]:
            ways[a, b] = "sys"
    if groups:
        listed = "; ".join(", ".join(group) for group in groups)
        notes.append(Note(f"slower from group to group than inside ({listed}): NUMA nodes", role="doubt"))
    buses = {device.id: device.bus_id for device in devices}
    near = [pair for pair in slow if ways[pair] == "pcie" and slow[pair].peer and _side_by_side(buses, *pair)]
    ways |= dict.fromkeys(near, "phb")
    if near:
        text = f"{len(near)} pairs have buses side by side and reach each other: one host bridge"
        notes.append(Note(text, role="doubt"))
    return ways, notes


def _groups(names: Sequence[str], speeds: Mapping[Pair, Speed]) -> list[tuple[str, ...]]:
    """Return two or more groups, every pair inside one faster than any pair across; none: no such groups."""
    if len(names) < 3 or len(speeds) < len(pairs(names)):
        return []
    found = sorted({speed.gbs for speed in speeds.values()})
    gaps = sorted(((low / high, high) for low, high in pairwise(found) if high > GAP * low))
    for _, high in gaps:
        around = neighbours(names, [pair for pair, speed in speeds.items() if speed.gbs >= high])
        groups = parts(around)
        if len(groups) > 1 and all(len(group) > 1 and is_clique(group, around) for group in groups):
            return groups
    return []


def _side_by_side(buses: Mapping[str, str | None], a: str, b: str) -> bool:
    one, other = buses[a], buses[b]
    if one is None or other is None:
        return False
    (domain, bus, _), (other_domain, other_bus, _) = one.split(":"), other.split(":")
    return domain == other_domain and abs(int(bus, 16) - int(other_bus, 16)) == 1


# ---------- matrices of numbers


@dataclass(frozen=True)
class SpeedTable:
    """A matrix of numbers below a header of numbers; None where a cell is no number.

    `title` and `before`: the last two lines above it that are of no matrix; `corner`: the word beside the
    header; `missing_rows`: so many fewer than columns.
    """

    title: str
    before: str
    corner: str
    values: Mapping[tuple[int, int], float | None]

    @property
    def missing_rows(self) -> int:
        """The number of rows that are missing."""
        return len({column for _, column in self.values}) - len({row for row, _ in self.values})


def tables(text: str) -> Iterable[SpeedTable]:
    """Yield all matrices of a text. What a cut row leaves of its matrix is kept; what follows it is not."""
    title, before, corner, columns = "", "", "", list[int]()
    values: dict[tuple[int, int], float | None] = {}
    for line in text.splitlines():
        words = line.split()
        header = [int(word) for word in words if re.fullmatch(r"[0-9]{1,3}", word, re.ASCII)]
        counted = bool(header) and header == list(range(len(header))) and len(words) - len(header) <= 1
        if counted and not _is_row(words, columns):
            if values:
                yield SpeedTable(title, before, corner, values)
            corner = words[0] if len(words) > len(header) else ""
            columns, values = header, {}
        elif columns and _is_row(words, columns):
            row = int(words[0])
            values |= {(row, column): _number(word) for column, word in zip(columns, words[1:], strict=True)}
        elif words:
            if values:
                yield SpeedTable(title, before, corner, values)
            before, title, columns, values = title, line.strip(), [], {}
    if values:
        yield SpeedTable(title, before, corner, values)


def _is_row(words: Sequence[str], columns: Sequence[int]) -> bool:
    """Return whether words are a row: a device's number, and a cell for each column.

    A header below its title has as many words at most.
    """
    if len(words) != len(columns) + 1 or not re.fullmatch(r"[0-9]{1,3}", words[0], re.ASCII):
        return False
    return all(_number(word) is not None or word == "N/A" for word in words[1:])


def _number(word: str) -> float | None:
    return float(word) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", word, re.ASCII) else None
