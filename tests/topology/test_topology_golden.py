"""Whole reports, word for word.

After a change that is meant: python tests/topology/test_topology_golden.py writes them anew; read the difference.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenring.topology.model.graph import merge
from tokenring.topology.model.verdict import classify
from tokenring.topology.report.text import report
from tokenring.topology.sources import read

DATA = Path(__file__).resolve().parents[1] / "data"
CASES = {
    "full-mesh": ["npu-910b.txt"],
    "switch-of-dies": ["npu-a3.txt"],
    "switch-named": ["nccl-switch.xml"],
    "switch-degraded": ["nvidia-degraded.txt"],
    "cube-mesh": ["nvidia-cube-squashed-header.txt"],
    "two-rings": ["rccl-two-rings.xml"],
    "partial-mesh": ["rccl-ladder.xml"],
    "pcie-numa": ["rccl-pcie.xml"],
    "pcie-bridge": ["nvidia-wrapped.txt"],
    "nics": ["nvidia-glued.txt"],
    "unknown": ["nvidia-elided.txt"],
    "refused": ["npu-refused.txt"],
    "two-hosts": ["nvidia-mesh.txt", "nvidia-switch.txt"],
}


def report_of(case: str) -> str:
    graph = merge([read((DATA / "topology" / name).read_text(encoding="utf-8"), name) for name in CASES[case]])
    return report(graph, classify(graph))


def place_of(case: str) -> Path:
    return DATA / "topology_reports" / f"{case}.txt"


@pytest.mark.parametrize("case", CASES)
def test_report(case: str) -> None:
    assert report_of(case) == place_of(case).read_text(encoding="utf-8")


def test_no_report_is_left_over() -> None:
    assert {path.stem for path in (DATA / "topology_reports").iterdir()} == set(CASES)


if __name__ == "__main__":
    for each in CASES:
        place_of(each).write_text(report_of(each), encoding="utf-8")
