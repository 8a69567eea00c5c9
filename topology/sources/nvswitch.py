"""The parts of NVSwitches that sources leave out: which there are, and the trunk between two baseboards."""

from __future__ import annotations

from collections.abc import Mapping

from tokenring.topology.model.facts import ASSUMED, Link, Note

HIDDEN = "nvswitch"  # ffffffff:ff:ff.0: a virtual machine is not shown which


def trunk(attached: Mapping[str, set[str]]) -> tuple[list[Link], list[Note]]:
    """Return links between groups of switches, given the GPUs of each switch; and a note on them.

    No source lists links from switch to switch. Two baseboards in one machine have them (DGX-2): without,
    half of the GPUs would not reach the other half.
    """
    first: dict[frozenset[str], str] = {}
    for switch, gpus in attached.items():
        if gpus and not any(gpus & group for group in first):
            first[frozenset(gpus)] = switch
    start, *others = first.values() or [""]
    links = [Link(start, other, "nvlink", switched=True, label=ASSUMED) for other in others]
    text = f"{len(first)} groups of NVSwitches: the trunk between them is in no source, and taken to be there"
    return links, [Note(text)] if links else []
