"""The README's program runs as it is pasted, its files are there, and so are those of the map of the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patient
from sampling import FULL_GRID
from test_docs import example

REPO = Path(__file__).resolve().parents[2]
README = (REPO / "README.md").read_text(encoding="utf-8")


def test_is_short() -> None:
    assert len(README.splitlines()) <= 150
    assert len(example("../README.md").splitlines()) <= 20


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.skipif(not FULL_GRID, reason="full grid"))])
def test_program_runs_as_pasted(ranks: int, tmp_path: Path, warm: str) -> None:
    """One rank's is a Python of its own, which has nothing but what the program imports."""
    python = sys.executable if ranks == 1 else warm
    path = tmp_path / "split.py"
    path.write_text(example("../README.md"), encoding="utf-8")
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=patient(100))
    assert done.returncode == 0, done.stderr
    said = sorted(re.findall(rf"rank (\d) of {ranks}: (\(.*?\))", done.stdout))  # ranks share the output, and its lines
    assert said == [(str(rank), f"(1, {4096 // ranks}, 8, 64)") for rank in range(ranks)], done.stdout


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted((REPO / "docs").glob("*.md")))])
def test_links_lead_somewhere(page: str) -> None:
    path = REPO / page
    links = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", path.read_text(encoding="utf-8"))
    missing = [link for link in links if not (path.parent / link).exists()]
    assert not missing


def map_paths() -> list[str]:
    """Files and folders that docs/map.md names; in its walk through a call, relative to tokenring/ or to a room."""
    return re.findall(r"`([a-z_./]+(?:\.py|/))`", (REPO / "docs" / "map.md").read_text(encoding="utf-8"))


def test_the_map_names_every_room() -> None:
    """In the order of the pipeline, which the import contract has too; rooms within rooms by their own name."""
    text = (REPO / "docs" / "map.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(?:tokenring/)?([a-z]+)/` \|", text, re.MULTILINE)
    contract = (REPO / "pyproject.toml").read_text(encoding="utf-8").partition('id = "layers"')[2]
    layers = re.findall(r"[a-z_]+", contract.partition("layers = [")[2].partition("]")[0])
    assert listed == [name for name in layers if (REPO / "tokenring" / name).is_dir()]
    within = [
        path.relative_to(REPO).as_posix()
        for top in ("tokenring", "backends", "topology")
        for path in (REPO / top).rglob("*")
        if path.is_dir() and path.name != "__pycache__" and len(path.relative_to(REPO).parts) > (top == "tokenring") + 1
    ]
    assert len(within) > 25
    assert not [path for path in within if f"`{path.rpartition('/')[2]}/`" not in text]


def test_files_of_the_map_are_there() -> None:
    """Named in full, or by the end of their path."""
    code = [str(path.relative_to(REPO)) for room in ("tokenring", "backends", "topology", "examples")
            for path in (REPO / room).rglob("*") if "__pycache__" not in path.parts]  # fmt: skip
    named = map_paths()
    assert len(named) > 60
    lost = [name for name in named if not any(f"/{path}{'/' if not path.endswith('.py') else ''}".endswith(f"/{name}")
                                              for path in code) and not (REPO / name).exists()]  # fmt: skip
    assert not lost
