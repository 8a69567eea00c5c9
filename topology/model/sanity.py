"""Facts as they can be kept: what a dump says that cannot be is left out, with a note, before anything follows.

The reader of saved topologies (`schema`) refuses what this leaves out: nobody could have written it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import isfinite
from typing import Any, TypeVar

from tokenring.topology.model.facts import LINK_KINDS, Device, Facts, Link, Measurement, Note

MOST = 1e12  # of anything that is measured
LARGEST = 1 << 53  # an integer that every reader of JSON takes for the same
MAX_NOTES = 20
UNITS = {"count": "links", "bandwidth_gbs": "GB/s", "gbs": "GB/s", "both_gbs": "GB/s both ways"}
T = TypeVar("T", Device, Link, Measurement)


def is_amount(number: float | None) -> bool:
    """Return whether a number of links, or of GB/s, is unknown or more than none."""
    return number is None or 0 < number < MOST


def storable(text: str) -> str:
    """Return a name that files of text can hold: a file's own may have bytes that are no characters."""
    return text.encode("utf-8", "backslashreplace").decode()


def sound(facts: Facts) -> Facts:
    """Return the facts without what cannot be: amounts of 0 and less, links of no device, devices of one name."""
    lost: list[str] = []
    devices = tuple(_amounts(device, ("gbs",), lost) for device in _once(facts.devices, lost))
    known = {device.id for device in devices}
    links, measurements = facts.links, facts.measurements
    if not _are_whole(links, known):
        links = tuple(_amounts(link, ("count", "bandwidth_gbs"), lost) for link in links if _joins(link, known, lost))
    measurements = tuple(
        _amounts(each, ("gbs", "both_gbs"), lost) for each in measurements if _joins(each, known, lost)
    )
    notes = (*facts.notes, *(Note(text) for text in dict.fromkeys(lost[:MAX_NOTES])))
    if len(lost) > MAX_NOTES:
        notes = (*notes, Note(f"and {len(lost) - MAX_NOTES} more that cannot be"))
    return replace(facts, devices=devices, links=links, measurements=measurements, notes=notes)


def _are_whole(links: tuple[Link, ...], known: set[str]) -> bool:
    """Return whether nothing is wrong with any of the links: there may be half a million."""
    ends = {link.a for link in links} | {link.b for link in links}
    amounts = {link.count for link in links} | {link.bandwidth_gbs for link in links}
    apart = all(link.a != link.b for link in links)
    return apart and ends <= known and all(map(is_amount, amounts)) and {link.kind for link in links} <= {*LINK_KINDS}


def _once(devices: Iterable[Device], lost: list[str]) -> list[Device]:
    found: dict[str, Device] = {}
    for device in devices:
        if found.setdefault(device.id, device) is not device:
            lost.append(f"{device.id} is there twice: the first is taken")
    return list(found.values())


def _joins(each: Link | Measurement, known: set[str], lost: list[str]) -> bool:
    """Return whether a link is between two known devices, and of a known kind; note why it is not."""
    strange = next((end for end in (each.a, each.b) if end not in known), None)
    if strange is not None:
        lost.append(f"a link leads to {strange[:40]}, a device that is not named: not used")
    elif each.a == each.b:
        lost.append(f"a link leads from {each.a[:40]} to itself: not used")
    elif isinstance(each, Link) and each.kind not in LINK_KINDS:
        lost.append(f"{each.a[:40]} to {each.b[:40]} is of kind {each.kind[:40]}, which there is not: not used")
    else:
        return True
    return False


def _amounts(each: T, names: tuple[str, ...], lost: list[str]) -> T:
    """Return a part of facts in which figures that cannot be are unknown."""
    wrong: dict[str, Any] = {}
    for name, value in vars(each).items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        fits = abs(value) < LARGEST if isinstance(value, int) else isfinite(value) and abs(value) < MOST
        if fits and (name not in names or is_amount(value)):
            continue
        wrong[name] = None
        what = each.id if isinstance(each, Device) else f"{each.a} to {each.b}"
        lost.append(f"{what[:80]}: {value:g} {UNITS.get(name, f'for {name}')} is taken for unknown")
    return replace(each, **wrong) if wrong else each
