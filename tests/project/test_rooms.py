"""The rooms of the package: who may import whom (ci/rooms.py), and how many files a room holds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import patient

REPO = Path(__file__).resolve().parents[2]
CHECK = REPO / "ci" / "rooms.py"
MOST_FILES = 20  # of one folder: about what one takes in at a glance
LARGER = {"topology/sources"}  # one file a format
NAMES = ("__init__", "__main__", "_version", "errors", "gc_pause", "graph_breaks", "imports", "nearest", "weak_method")
ROOT = {f"{name}.py" for name in NAMES}
UP = "A room imports the rooms below it BROKEN"
ROUND = "Neither rooms nor modules import each other round BROKEN"
BACKENDS = "Whatever makes, proves or chooses schedules imports no backend BROKEN"
PACKAGES = "Vendors' packages are imported by backends alone BROKEN"
DOORS = "The command line is imported by __main__ alone BROKEN"
MUTANTS = {  # what is added to which module, and what the check says
    "up": ("ir/passes.py", "import tokenring.planner.choosing.plan", UP),
    "up-when-called": ("ir/passes.py", "def late():\n    from tokenring.planner.choosing import plan", UP),
    "up-for-types": ("ir/passes.py", "if TYPE_CHECKING:\n    from tokenring.planner.choosing.plan import Plan", UP),
    "beside": ("integrations/mindspeed_llm.py", "from tokenring.cli import main", UP),
    "a-new-room": ("attic/__init__.py", "", "tokenring.attic"),
    "round-when-called": ("ir/schedule_data.py", "def late():\n    from tokenring.ir import passes", ROUND),
    "round-for-types": ("ir/schedule_data.py", "if TYPE_CHECKING:\n    import tokenring.ir.passes", ROUND),
    "rooms-round": ("topology/sources/tables.py", "import tokenring.topology.probing.cache", ROUND),
    "round-by-public-names": ("api/inputs.py", "import tokenring", "api.inputs -> tokenring"),
    "transport": ("planner/choosing/plan.py", "import tokenring.backends.transports.gloo", BACKENDS),
    "kernel": ("runtime/pool.py", "def late():\n    from tokenring.backends.kernels import reference", BACKENDS),
    "vendor": ("schedule/names.py", "def late():\n    import torch_npu", PACKAGES),
    "command": ("__init__.py", "def late():\n    from tokenring.cli.main import main", DOORS),
}  # fmt: skip


def said_of(repo: Path) -> tuple[int, str]:
    """The exit code, and all that is said in one line."""
    found = subprocess.run(
        [sys.executable, str(CHECK), str(repo)], cwd=repo, capture_output=True, text=True, timeout=patient(60)
    )
    return found.returncode, " ".join((found.stdout + found.stderr).split())


# Forks a check of the working directory for each line that it reads, and answers with its exit code.
CHECKS = """
import os, sys
sys.path.insert(0, sys.argv[1])
import grimp, importlinter.cli, rooms
for output in sys.stdin:
    if (child := os.fork()) == 0:
        to = os.open(output.strip(), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(to, 1), os.dup2(to, 2)
        code = 70
        try:
            code = rooms.check_here(sys.argv[2])
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
Check = Callable[[], tuple[int, str]]


@pytest.fixture(scope="module")
def check(copied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Check]:
    """Checks the copy in a process that has imported the linter, and reads only what was changed since the last."""
    place = tmp_path_factory.mktemp("checks")
    output, command = place / "output", [sys.executable, "-c", CHECKS, str(CHECK.parent), str(place / "cache")]

    def checked() -> tuple[int, str]:
        assert process.stdin is not None and process.stdout is not None
        print(output, file=process.stdin, flush=True)
        code = process.stdout.readline()
        return int(code), " ".join(output.read_text().split())

    with subprocess.Popen(command, cwd=copied, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            code, said = checked()
            assert code == 0, said
            yield checked
        finally:
            process.kill()


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("rooms")
    shutil.copytree(REPO / "tokenring", place / "tokenring", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "pyproject.toml", place)
    return place


def test_imports_go_down() -> None:
    code, said = said_of(REPO)
    assert code == 0, said


@pytest.mark.parametrize("mutant", MUTANTS)
def test_other_imports_are_refused(copied: Path, check: Check, mutant: str) -> None:
    name, added, refusal = MUTANTS[mutant]
    path = copied / "tokenring" / name
    before = path.read_text() if path.exists() else None
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{before or ''}\n{added}\n")
    try:
        code, said = check()
    finally:
        shutil.rmtree(path.parent) if before is None else path.write_text(before)
    assert code == 1
    assert refusal in said


def test_a_room_holds_what_one_takes_in() -> None:
    folders = {path.parent for top in ("tokenring", "backends", "topology") for path in (REPO / top).rglob("*.py")}
    counts = {str(folder.relative_to(REPO)): len(list(folder.glob("*.py"))) for folder in folders}
    assert {name for name, count in counts.items() if count > MOST_FILES} == LARGER


def test_the_root_holds_what_all_need() -> None:
    assert {path.name for path in (REPO / "tokenring").glob("*.py")} == ROOT


def test_folders_of_tests_are_listed() -> None:
    """Tests import parts of others by name: pytest and mypy look into all folders of tests, and into no other."""
    tomllib = pytest.importorskip("tomllib", reason="the lists are the same on every Python")
    settings = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    there = {path.parent.relative_to(REPO).as_posix() for path in (REPO / "tests").rglob("test_*.py")}
    there |= {"tests/support", "tests/fakes"}
    assert set(settings["pytest"]["ini_options"]["pythonpath"]) == there | {"benchmarks"}
    assert {path for path in settings["mypy"]["mypy_path"].split(":") if path.startswith("tests/")} == there
