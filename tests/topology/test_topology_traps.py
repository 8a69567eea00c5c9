"""Trap 15 of an Ascend port: what npu-smi prints differs from machine to machine. Checks, and mutants of our parser.

Each check passes as the parser is, and fails for one (patched) that falls into the trap.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenring.topology.model import labels
from tokenring.topology.model.facts import Device, Facts, Link
from tokenring.topology.model.graph import merge
from tokenring.topology.model.verdict import classify
from tokenring.topology.ranks import Topology
from tokenring.topology.report.text import report
from tokenring.topology.sources import matrix, npu_topo, read

DATA = Path(__file__).resolve().parents[1] / "data" / "topology"
Spoil = Callable[[pytest.MonkeyPatch], None]


def text_of(name: str) -> str:
    return (DATA / name).read_text(encoding="utf-8")


def links_in(facts: Facts) -> set[tuple[str, str, str, bool]]:
    return {(link.a, link.b, link.kind, link.switched) for link in facts.links}


# ---------- checks


def check_labels() -> None:
    """A container shows dies 10 to 13 by Phy-ID: no indexes, and they need not begin at 0."""
    dies = read(text_of("npu-a3-xlink.txt")).accelerators
    assert [(each.id, each.phy_id, each.index, each.arch) for each in dies] == [
        (f"Phy-ID{number}", number, None, "A3") for number in (10, 11, 12, 13)
    ]


def check_xlink() -> None:
    """One driver prints XLink for HCCS."""
    text = text_of("npu-a3-xlink.txt")
    facts = read(text)
    assert links_in(facts) == links_in(read(text.replace("XLink", "HCCS")))
    assert {(kind, switched) for *_, kind, switched in links_in(facts)} == {("sio", False), ("hccs", True)}
    assert classify(merge([facts])).name == "switch"


def check_affinity() -> None:
    """Links are the same with and without its column, and nothing is missed where it is not."""
    text = text_of("npu-910a.txt")
    bare = "\n".join(line.removesuffix("CPU Affinity").removesuffix("0-23") for line in text.splitlines())
    assert links_in(read(bare)) == links_in(read(text))
    assert {each.cpu_affinity for each in read(bare).accelerators} == {None}
    assert {each.cpu_affinity for each in read(text).accelerators} == {"0-23"}
    assert read(bare).notes == read(text).notes == ()
    shifted = "\n".join(line.removeprefix("NPU7") for line in bare.splitlines())  # a label column that is cut
    assert links_in(read(shifted)) != links_in(read(text)) or read(shifted).notes


def check_nics() -> None:
    """950: NICs stand in the matrix and are no NPUs."""
    facts = read(text_of("npu-950-mesh-nics.txt"))
    graph = merge([facts])
    assert [each.id for each in facts.accelerators] == [f"NPU{i}" for i in range(8)]
    assert [(each.id, each.name) for each in facts.devices if each.kind == "nic"] == [
        ("NIC0", "hrn5_0"),
        ("NIC1", "hrn5_1"),
    ]
    assert classify(graph).name == "full-mesh"
    assert report(graph, classify(graph)).splitlines()[0].endswith("; a ring uses 1 of the 7 links of each")


def check_dies() -> None:
    """A3: sixteen ranks on eight packages, which is what the topology gives to the planner."""
    graph = merge([read(text_of("npu-a3.txt"))])
    assert Topology.of(graph).world_size == 16
    packages = Counter(each.package for each in graph.accelerators)
    assert (len(packages), set(packages.values())) == (8, {2})


CHECKS: tuple[Callable[[], None], ...] = (check_labels, check_xlink, check_affinity, check_nics, check_dies)


# ---------- mutants of the parser


def label_is_the_index(patched: pytest.MonkeyPatch) -> None:
    real = npu_topo._device

    def device(name: str, of: matrix.Matrix) -> Device:
        made = real(name, of)
        return made if made.phy_id is None else replace(made, index=made.phy_id, phy_id=None)

    patched.setattr(npu_topo, "_device", device)


def labels_begin_at_0(patched: pytest.MonkeyPatch) -> None:
    """Counts rows."""
    real = npu_topo._device

    def device(name: str, of: matrix.Matrix) -> Device:
        made = real(name, of)
        return made if made.phy_id is None else replace(made, phy_id=of.names.index(name))

    patched.setattr(npu_topo, "_device", device)


def xlink_is_a_word_that_nobody_knows(patched: pytest.MonkeyPatch) -> None:
    for word in ("XLINK", "XLINK_SW"):
        patched.delitem(labels.WORDS, word)


def the_last_column_is_an_affinity(patched: pytest.MonkeyPatch) -> None:
    real = matrix._labels

    def one_less(text: str, width: int) -> tuple[list[str], str]:
        found, rest = real(text, width)
        return found[:-1], " ".join([*found[-1:], rest])

    patched.setattr(matrix, "_labels", one_less)


def every_row_is_an_npu(patched: pytest.MonkeyPatch) -> None:
    for module in (matrix, npu_topo):
        patched.setattr(module, "ACCELERATOR", re.compile(r"(GPU|NPU|NIC|Phy-ID)([0-9]{1,5})", re.ASCII))


def a_rank_is_a_card(patched: pytest.MonkeyPatch) -> None:
    """One device for each package, and the links of that one."""
    real, real_links = npu_topo._generation, matrix.links_of

    def links_of(of: matrix.Matrix, devices: list[Device]) -> tuple[list[Link], Any]:
        links, notes = real_links(of, devices)
        second = {link.b for link in links if link.kind == "sio"}
        kept = [link for link in links if link.kind == "sio" or not {link.a, link.b} & second]
        return kept, notes

    def generation(devices: list[Device], links: list[Link]) -> list[Device]:
        second = {link.b for link in links if link.kind == "sio"}
        made = [each for each in real(devices, links) if each.id not in second]
        links[:] = [link for link in links if link.kind != "sio"]
        return made

    patched.setattr(npu_topo, "links_of", links_of)
    patched.setattr(npu_topo, "_generation", generation)


MUTANTS: tuple[tuple[Callable[[], None], Spoil], ...] = (
    (check_labels, label_is_the_index),
    (check_labels, labels_begin_at_0),
    (check_xlink, xlink_is_a_word_that_nobody_knows),
    (check_affinity, the_last_column_is_an_affinity),
    (check_nics, every_row_is_an_npu),
    (check_dies, a_rank_is_a_card),
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: str(check.__name__))
def test_15_what_is_printed_is_read(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(("check", "spoil"), MUTANTS, ids=lambda each: str(each.__name__))
def test_15_a_parser_that_falls_into_it_is_found(
    check: Callable[[], None], spoil: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the check, and not since it cannot read the text at all."""
    spoil(monkeypatch)
    with pytest.raises(AssertionError):
        check()


def test_15_a_word_that_nobody_prints_is_no_link() -> None:
    facts = read(text_of("npu-a3-xlink.txt").replace("XLink_SW", "YLink_SW"))
    assert {kind for *_, kind, _ in links_in(facts)} == {"sio"}
    assert classify(merge([facts])).name != "switch"
