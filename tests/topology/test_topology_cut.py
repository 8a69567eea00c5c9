"""Dumps that were cut: the report says so, and the verdict is not called sure."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from broken_dumps import DATA

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import Facts
from tokenring.topology.model.graph import Graph, merge
from tokenring.topology.model.verdict import Verdict, classify
from tokenring.topology.report.text import report
from tokenring.topology.sources import read

# Each with where what it shows of links ends: after that, only legends and figures beside it are lost.
FORMATS = {
    "nvidia-mesh.txt": "Legend", "nvidia-switch.txt": "Legend", "nvidia-glued.txt": "Legend",
    "npu-910b.txt": "Legend", "npu-a3.txt": "Legend", "npu-950-mesh-nics.txt": "Legend",
    "metax-pairs.txt": "Legend", "rocm-mesh.txt": "Numa Nodes", "amd-smi-topology.txt": "HOPS TABLE",
    "amd-smi-xgmi-ring.txt": "\x00", "nvlink-R-mesh.txt": "\x00", "p2p-numa.txt": "P2P=Disabled Latency",
    "nvbandwidth-switch.txt": "SUM", "nccl-switch.xml": "\x00", "hwloc1-two-vendors.xml": "\x00",
    "hccl-1.0.json": "\x00", "ascend950-mesh.json": "\x00", "matrix-hops.json": "\x00",
}  # fmt: skip


def verdict_of(text: str) -> tuple[Facts, Graph, Verdict] | None:
    try:
        facts = read(text)
    except TopologyError:  # it says what is wrong, and where
        return None
    graph = merge([facts])
    return facts, graph, classify(graph)


def shown(graph: Graph, counts: bool) -> tuple[object, object]:
    edges = {(each.a, each.b, each.kind, each.count if counts else None) for each in graph.edges}
    return [device.id for device in graph.accelerators], edges


@pytest.mark.parametrize("name", FORMATS)
def test_what_lost_something_is_not_sure(name: str) -> None:
    text = (DATA / name).read_text(encoding="utf-8")
    whole = verdict_of(text)
    assert whole is not None
    counts = not name.startswith("amd-smi")  # it counts links in a table of its own, which may be absent
    chance = random.Random(name)
    cuts = {chance.randrange(1, len(text)) for _ in range(60)} | {i for i, c in enumerate(text) if c == "\n"}
    judged = 0
    for cut in sorted(cuts):
        found = verdict_of(text[:cut])
        if found is None or shown(found[1], counts) == shown(whole[1], counts):
            continue
        judged += 1
        facts, graph, verdict = found
        assert verdict.confidence != "high", (cut, verdict)
        doubts = [str(note) for note in facts.notes if note.role == "doubt"]
        assert doubts or verdict.name in ("unknown", "single") or facts.coverage != "links", (cut, verdict)
        for doubt in doubts:
            assert doubt in verdict.evidence
            assert doubt in report(graph, verdict)
    assert judged or name.endswith(("xml", "json"))


@pytest.mark.parametrize("name", ["nvidia-mesh.txt", "npu-910b.txt", "nvidia-switch.txt"])
def test_rows_fewer_than_columns(name: str) -> None:
    """Even where the rows that are left name every pair."""
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    last = max(i for i, line in enumerate(lines) if line.lstrip().startswith(("GPU", "NPU")))
    found = verdict_of("\n".join(lines[:last]))
    assert found is not None
    assert found[2].confidence == "medium"
    assert any("no row for" in line for line in found[2].evidence)


def test_rows_shorter_than_the_header() -> None:
    names = [f"GPU{i}" for i in range(4)]
    rows = ["\t".join([a, *("X" if a == b else "NV18" for b in names)][: 5 if a == "GPU0" else 4]) for a in names[:4]]
    rows[-1] = "\t".join(["GPU3", "NV18", "NV18", "NV18", "X"])
    text = "\t" + "\t".join([*names, "CPU Affinity"]) + "\n" + "\n".join(rows) + "\n"
    found = verdict_of(text)
    assert found is not None
    assert found[2].confidence == "medium"
    assert "line 3: the row of GPU1 has 3 of 4 cells" in found[2].evidence


def test_rows_without_header_whose_others_are_missing() -> None:
    found = verdict_of("GPU0\tX\tNV4\tNV4\tNV4\nGPU1\tNV4\tX\tNV4\tNV4\n")
    assert found is not None
    assert found[2].confidence != "high"
    assert "a row has 4 cells, and there are 2 rows: others are missing" in found[2].evidence


def test_a_list_that_may_go_on_is_not_sure() -> None:
    listed = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-11111111-2222-3333-4444-555555555555)\n"
    found = verdict_of(listed)
    assert found is not None
    assert (found[2].name, found[2].confidence) == ("single", "medium")
    cut = verdict_of(listed + "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-1111")
    assert cut is not None
    assert "line 2: the line is cut" in [str(note) for note in cut[0].notes]


def test_one_of_two_machines(tmp_path: Path) -> None:
    """The machine whose dump was cut is doubted, the other is not."""
    whole = (DATA / "nvidia-mesh.txt").read_text(encoding="utf-8")
    lines = whole.splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith("GPU"))
    graph = merge([read(whole, "a"), read("\n".join(lines[:last]), "b")])
    verdict = classify(graph)
    assert verdict.confidence == "medium"
    assert {host: inside.confidence for host, inside in verdict.inside} == {"a": "high", "b": "medium"}


def test_whole_dumps_are_as_sure_as_they_were() -> None:
    for name in ("nvidia-mesh.txt", "npu-910b.txt", "rocm-mesh.txt", "nvidia-single.txt", "nvidia-p2p.txt"):
        found = verdict_of((DATA / name).read_text(encoding="utf-8"))
        assert found is not None
        assert not [note for note in found[0].notes if note.role == "doubt"], name
