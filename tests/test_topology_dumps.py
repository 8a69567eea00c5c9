"""The collection of real dumps beside the repository, where it is there: how many get the right class."""

from __future__ import annotations

import csv
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tokenring.errors import TopologyError
from tokenring.topology.graph import merge
from tokenring.topology.sources import read, recognise
from tokenring.topology.verdict import CLASSES, classify

REPO = Path(__file__).resolve().parent.parent
AT_LEAST = 0.97
# README.md there calls multi-node what describes several servers. These rows say so of files that name one.
DISPUTED = (
    "hccl-ranktable/doc-a5-ranktable-v2.0-b.json",
    "hccl-ranktable/mindcluster-doc-v1.0.json",
    "hccl-ranktable/mindcluster-doc-v1.2.json",
    "hccl-ranktable/mindcluster-doc-v2.0.json",
)


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
    seconds: float


def answers() -> Iterator[Answer]:
    assert SHARED is not None
    root = SHARED / "topology"
    with (root / "INDEX.tsv").open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
            text = (root / row["file"]).read_text(encoding="utf-8", errors="replace")
            source = recognise(text)
            began = time.process_time()
            found = answer(text)
            yield Answer(row["file"], source.name if source else None, row["class"], found, time.process_time() - began)


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
    known = [each for each in all_answers if each.format is not None and each.file not in DISPUTED]
    right = [each for each in known if each.found == each.wanted]
    folders = Counter(each.file.partition("/")[0] for each in known)
    print(f"\n{len(right)} of {len(known)} right; {len(all_answers) - len(known)} in formats not known yet")
    for folder, count in sorted(folders.items()):
        print(f"  {folder}: {sum(each.file.startswith(f'{folder}/') for each in right)} of {count}")
    wrong = [f"{each.file}: {each.found}, wanted {each.wanted}" for each in known if each not in right]
    assert len(right) >= AT_LEAST * len(known), "\n".join(wrong)


def test_every_answer_is_of_the_list_and_quick(all_answers: list[Answer]) -> None:
    assert {each.found for each in all_answers} <= {*CLASSES, "malformed"}
    assert max(each.seconds for each in all_answers) < 1


def test_every_ascend_fixture_has_an_answer() -> None:
    """Of the tools' outputs: the rest are schemas, logs of Python, a list by lspci, and an empty answer."""
    assert SHARED is not None
    others = ("op_schemas", "torch_npu", "lspci", "SOURCES", "hccn_tool_ip_unset")
    for path in sorted((SHARED / "ascend/fixtures").rglob("*.*")):
        found = answer(path.read_text(encoding="utf-8", errors="replace"))
        assert (found == "malformed") == path.name.startswith(others), path.name
