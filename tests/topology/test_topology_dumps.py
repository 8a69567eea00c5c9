"""The collection of real dumps beside the repository, where it is there: how many get the right class."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args

import pytest
from test_topology_sources import tally

from tokenring.errors import TopologyError
from tokenring.topology.model.graph import merge
from tokenring.topology.model.verdict import Class, classify
from tokenring.topology.sources import read, recognise

REPO = Path(__file__).resolve().parents[2]
AT_LEAST = 0.97
# README.md there calls multi-node what describes several servers. These rows say so of files that name one: they count
# as wrong here, and no others are.
DISPUTED = {
    "hccl-ranktable/doc-a5-ranktable-v2.0-b.json",
    "hccl-ranktable/mindcluster-doc-v1.0.json",
    "hccl-ranktable/mindcluster-doc-v1.2.json",
    "hccl-ranktable/mindcluster-doc-v2.0.json",
}
# link_summary of INDEX.tsv for twenty layouts, in the words of our graph.
LINKS: dict[str, dict[str, int]] = {
    "ascend-topo-json/atlas_350_2.json": {"ub×4": 8, "pcie": 112},
    "ascend-topo-json/atlas_350_3.json": {"ub×1": 24, "pcie": 96},
    "ascend-topo-json/atlas_850_1.json": {"ub×1": 28},
    "ascend-topo/910b3-8npu-hccs-mesh.txt": {"hccs": 28},
    "ascend-topo/ascend950-8npu-ub-pairs.txt": {"ub": 4, "sys": 24},
    "ascend-topo/ascend950-8npu-ub-two-4mesh.txt": {"ub": 12, "sys": 16},
    "hwloc-xml/power8gpudistances.xml": {"nvlink×2": 2, "sys": 4},
    "nvidia-topo-m/8gpu-pcie-node-sys.txt": {"node": 12, "sys": 16},
    "nvidia-topo-m/a100-pcie-4gpu-nv12-pairs-sys.txt": {"nvlink×12": 2, "sys": 4},
    "nvidia-topo-m/a6000-3gpu-nv4-pair-plus-node.txt": {"nvlink×4": 1, "node": 2},
    "nvidia-topo-m/dgx1-v100-8gpu-4mlx5.txt": {"nvlink×1": 8, "nvlink×2": 8, "sys": 12},
    "nvidia-topo-m/gh200-4gpu-nv6-numeric-gpu-numa.txt": {"nvlink×6": 6},
    "nvidia-topo-m/odd/dgx1-p100-8gpu-squashed-header-soc.txt": {"nvlink×1": 16, "sys": 12},
    "nvidia-topo-m/odd/h200-8gpu-nv18-12nic-numa-off-glued-cells.txt": {"nvlink×18": 28},
    "nvidia-topo-m/p40-8gpu-pix-pxb-soc-legend.txt": {"pix": 12, "pxb": 16},
    "rccl-topo-xml/topo_8p1h.xml": {"xgmi×4": 4, "xgmi×2": 2, "xgmi×1": 6, "pxb": 6, "sys": 10},
    "rccl-topo-xml/topo_8p_940.xml": {"xgmi×1": 28},
    "reconstructed/ascend-a3-16die-sio-hccs-sw.json": {"sio": 8, "hccs→": 112},
    "rocm-showtopo/odd/8gpu-two-xgmi-4mesh-literal-backslash-t.txt": {"xgmi": 12, "sys": 16},
    "vendor-other/metax-8gpu-two-4mesh-6nic-topo-n.txt": {"mxlink": 12, "node": 16},
}


def shared() -> Path | None:
    """`../shared` of a checkout, or of the main one where this is a worktree of it."""
    places = [REPO.parent]
    if (git := REPO / ".git").is_file():  # "gitdir: CHECKOUT/.git/worktrees/NAME"
        places.append(Path(git.read_text().partition(":")[2].strip()).parents[3])
    return next((place / "shared" for place in places if (place / "shared/topology/INDEX.tsv").exists()), None)


SHARED = shared()
pytestmark = pytest.mark.skipif(SHARED is None, reason="no ../shared/topology here")


class Answer(NamedTuple):
    file: str
    format: str | None
    wanted: str
    found: str


def answers() -> Iterator[Answer]:
    assert SHARED is not None
    root = SHARED / "topology"
    with (root / "INDEX.tsv").open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
            text = (root / row["file"]).read_text(encoding="utf-8", errors="replace")
            source = recognise(text)
            yield Answer(row["file"], source.name if source else None, row["class"], answer(text))


def answer(text: str) -> str:
    """The class, or "malformed" for our own error; any other error is a failure."""
    try:
        return classify(merge([read(text)])).name
    except TopologyError:
        return "malformed"


@pytest.fixture(scope="module")
def all_answers() -> list[Answer]:
    return list(answers())


def test_share_of_right_classes(all_answers: list[Answer]) -> None:
    right = [each for each in all_answers if each.found == each.wanted]
    folders = Counter(each.file.partition("/")[0] for each in all_answers)
    print(f"\n{len(right)} of {len(all_answers)} right")
    for folder, count in sorted(folders.items()):
        print(f"  {folder}: {sum(each.file.startswith(f'{folder}/') for each in right)} of {count}")
    wrong = {each.file: f"{each.found}, wanted {each.wanted}" for each in all_answers if each not in right}
    assert len(right) >= AT_LEAST * len(all_answers), wrong
    assert set(wrong) <= DISPUTED, wrong


def test_every_dump_is_of_a_known_format(all_answers: list[Answer]) -> None:
    assert [each.file for each in all_answers if each.format is None] == []


@pytest.mark.parametrize("file", LINKS)
def test_links_are_those_of_the_index(file: str) -> None:
    assert SHARED is not None
    text = (SHARED / "topology" / file).read_text(encoding="utf-8", errors="replace")
    assert tally(merge([read(text)])) == LINKS[file]


def test_every_answer_is_of_the_list(all_answers: list[Answer]) -> None:
    assert {each.found for each in all_answers} <= {*get_args(Class), "malformed"}


def test_every_ascend_fixture_has_an_answer() -> None:
    """Of the tools' outputs: the rest are schemas, logs of Python, a list by lspci, and an empty answer."""
    assert SHARED is not None
    others = ("op_schemas", "torch_npu", "lspci", "SOURCES", "hccn_tool_ip_unset")
    for path in sorted((SHARED / "ascend/fixtures").rglob("*.*")):
        found = answer(path.read_text(encoding="utf-8", errors="replace"))
        assert (found == "malformed") == path.name.startswith(others), path.name
