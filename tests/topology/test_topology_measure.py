"""Measuring: what is inferred from networks of which all is known, transfers between ranks, and the command."""

from __future__ import annotations

import json
import random
import subprocess
from io import StringIO
from pathlib import Path
from typing import get_args

import pytest
from networks import Network, NetworkLab, bus, islands, mesh, ring, switch
from patience import patient
from ranks import Here, RankPools

from tokenring.cli.main import main
from tokenring.errors import ConfigurationError
from tokenring.topology.measure.colours import rounds, shuffled
from tokenring.topology.measure.infer import infer
from tokenring.topology.measure.model import facts
from tokenring.topology.measure.run import measure
from tokenring.topology.measure.survey import Tables, survey
from tokenring.topology.model.facts import Facts
from tokenring.topology.model.graph import Graph, merge
from tokenring.topology.model.schema import from_json, to_json
from tokenring.topology.model.verdict import Class, Verdict, classify
from tokenring.topology.ranks import topology_of

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
    assert verdict.evidence[1].startswith("every pair slows down when others are at work: all share 0.012")


def test_facts_are_kept_in_the_document() -> None:
    lab, tables = NetworkLab(islands([2, 2], LINK, LINK, inside="switch", half=True)), Tables(4)
    survey(lab, tables)
    made = facts(infer(tables, lab), tables)
    assert from_json(to_json([made])) == [made]
    assert made.measurements[0].spread == 0


def measured(here: Here, transport: str, seconds: float) -> Facts:
    return measure(here.transport(transport), seconds)


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_all_ranks_have_equal_facts(ranks: RankPools, transport: str) -> None:
    first, *others = ranks(3)(measured, transport, patient(10.0))
    assert all(each == first for each in others)
    assert len(first.measurements) >= 6
    assert all((each.gbs or 0) > 0 and each.spread is not None for each in first.measurements[:6])
    assert classify(merge([first])).name in get_args(Class)
    made = topology_of(first)
    assert made.world_size == 3
    assert len(made.bandwidth_gbs) == 6


def test_too_short_a_time_is_an_answer(ranks: RankPools) -> None:
    first, *others = ranks(2)(measured, "gloo", 1e-6)
    assert [first] == others
    verdict = classify(merge([first]))
    assert verdict.name == "unknown"
    assert "were too short" in " ".join(verdict.evidence)


def test_one_rank_is_single() -> None:
    assert classify(merge([measure(None)])).name == "single"


def test_command_on_ranks_of_its_own(tmp_path: Path, warm: str) -> None:
    command = [warm, "-m", "tokenring", "topology", "--measure", "--ranks", "2", "--seconds", f"{patient(5.0)}"]
    command += ["--save", "t.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patient(90))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    document = json.loads((tmp_path / "t.json").read_text())
    assert document["verdict"]["class"] == "full-mesh"
    assert [link["source"] for link in document["links"]] == ["measured"]
    out = StringIO()
    assert main(["topology", "--from", str(tmp_path / "t.json")], out, StringIO(), StringIO()) == 0
    assert out.getvalue().startswith("2 × CPU process, full mesh")


@pytest.mark.parametrize("seconds", [0.0, float("nan"), float("inf")])
def test_no_time_limit_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigurationError, match="use more than 0, and a number"):
        measure(None, seconds)


def test_a_part_of_the_word_is_refused() -> None:
    """It would report what this machine's tools say, as if it had been measured."""
    err = StringIO()
    assert main(["topology", "--measur"], StringIO(), err, StringIO()) == 2
    assert "unrecognized arguments: --measur" in err.getvalue()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--ranks", "2", "--seconds", "0"], "--seconds 0: use more than 0"),
        (["--ranks", "2", "--seconds", "nan"], "--seconds nan: use more than 0, and a number"),
        (["--ranks", "2", "--seconds", "inf"], "--seconds inf: use more than 0, and a number"),
        (["--ranks", "2", "--transport", "carrier-pigeon"], "--transport carrier-pigeon: unknown"),
        ([], "say how many processes to start"),
        (["--from", "x"], "unrecognized arguments"),
    ],
)
def test_command_refuses(argv: list[str], says: str) -> None:
    err = StringIO()
    assert main(["topology", "--measure", *argv], StringIO(), err, StringIO()) == 2
    assert says in err.getvalue()
