"""Measuring: what is inferred from networks of which all is known, transfers between ranks, and the command."""

from __future__ import annotations

import random

import pytest
from networks import Network, NetworkLab, bus, islands, mesh, ring, switch

from tokenring.topology.graph import Graph, merge
from tokenring.topology.measure.colours import rounds, shuffled
from tokenring.topology.measure.infer import infer
from tokenring.topology.measure.model import facts
from tokenring.topology.measure.survey import Tables, survey
from tokenring.topology.schema import from_json, to_json
from tokenring.topology.verdict import Verdict, classify

LINK = 0.0125


def found(network: Network, noise: float = 0.03) -> tuple[Graph, Verdict]:
    lab, tables = NetworkLab(network, noise), Tables(network.ranks)
    survey(lab, tables)
    graph = merge([facts(infer(tables, lab), tables)])
    return graph, classify(graph)


def widths(graph: Graph, kind: str) -> list[float]:
    return [edge.bandwidth_gbs or 0.0 for edge in graph.edges if edge.kind == kind]


def named(network: Network, seed: int) -> Network:
    order = list(range(network.ranks))
    if seed:
        random.Random(seed).shuffle(order)
    return network.renamed(order)


@pytest.mark.parametrize("ranks", range(2, 20))
def test_rounds_have_every_pair_once_and_no_rank_twice(ranks: int) -> None:
    for made in (rounds(ranks), shuffled(ranks, 1)):
        assert len(made) == ranks - 1 + ranks % 2
        assert all(len({end for pair in each for end in pair}) == 2 * len(each) for each in made)
        pairs = [pair for each in made for pair in each]
        assert sorted(pairs) == [(a, b) for a in range(ranks) for b in range(a + 1, ranks)]


SHAPES = [
    *((f"mesh {n}", mesh(n, LINK), "full-mesh", n * (n - 1) // 2) for n in (2, 3, 4, 6, 8)),
    *((f"switch {n}", switch(n, LINK), "switch", n) for n in (3, 4, 6, 8)),
    ("half-duplex switch 8", switch(8, LINK, half=True), "switch", 8),
    *((f"ring {n}", ring(n, LINK), "ring", n) for n in (4, 5, 6, 7, 8, 9)),
]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("shape", "network", "wanted", "links"), SHAPES, ids=[case[0] for case in SHAPES])
def test_shape_and_widths(shape: str, network: Network, wanted: str, links: int, seed: int) -> None:
    graph, verdict = found(named(network, seed))
    assert (verdict.name, verdict.confidence) == (wanted, "high"), verdict.evidence
    assert widths(graph, "link") == pytest.approx([LINK] * links, rel=0.06)
    assert any("half duplex" in line for line in verdict.evidence) == shape.startswith("half")


def test_ring_is_in_order() -> None:
    graph, _ = found(ring(8, LINK).renamed([3, 1, 4, 0, 5, 2, 6, 7]))
    linked = {frozenset((int(edge.a[4:]), int(edge.b[4:]))) for edge in graph.edges if edge.kind == "link"}
    order = [3, 1, 4, 0, 5, 2, 6, 7]
    assert linked == {frozenset((order[at], order[(at + 1) % 8])) for at in range(8)}


ISLANDS = [
    ([2, 2], "switch"),
    ([2, 2], "mesh"),
    ([2, 2, 2, 2], "switch"),
    ([4, 4], "switch"),
    ([4, 4], "mesh"),
    ([3, 3], "mesh"),
    ([3, 3], "switch"),
    ([2, 2, 2], "switch"),
    ([4, 2], "mesh"),
]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("half", [False, True], ids=["full", "half"])
@pytest.mark.parametrize("uplink", [0.5 * LINK, LINK, 1.2 * LINK])
@pytest.mark.parametrize(("sizes", "inside"), ISLANDS, ids=str)
def test_islands_and_uplinks(sizes: list[int], inside: str, uplink: float, half: bool, seed: int) -> None:
    graph, verdict = found(named(islands(sizes, LINK, uplink, inside=inside, half=half), seed))
    assert verdict.name == "islands", verdict.evidence
    assert sorted(len(island.members) for island in verdict.islands) == sorted(sizes)
    shape = "switch" if inside == "switch" else "full-mesh"
    assert {island.shape for island in verdict.islands} == {shape}, verdict.evidence
    assert widths(graph, "uplink") == pytest.approx([uplink] * (1 if len(sizes) == 2 else len(sizes)), rel=0.08)
    duplex = "half duplex" if half else "full duplex"
    assert all(line.endswith(duplex) for line in verdict.evidence if line.startswith("uplink "))
    ports = [LINK] * (sum(sizes) if inside == "switch" else sum(size * (size - 1) // 2 for size in sizes))
    assert widths(graph, "link") == pytest.approx(ports, rel=0.06)


def test_one_path_for_all_is_unknown_with_the_reason() -> None:
    _, verdict = found(bus(4, LINK))
    assert verdict.name == "unknown"
    assert verdict.evidence[1].startswith("every pair slows down when others are at work: all share 0.0125 GB/s")


def test_facts_are_kept_in_the_document() -> None:
    lab, tables = NetworkLab(islands([2, 2], LINK, LINK, inside="switch", half=True)), Tables(4)
    survey(lab, tables)
    made = facts(infer(tables, lab), tables)
    assert from_json(to_json([made])) == [made]
    assert made.measurements[0].spread == 0
