"""Plans on disk: taken where everything is the same, never where anything differs, is damaged or of somebody else."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from nets import BOTH, call, setting, workload
from patience import patient

import tokenring as tr
from tokenring.backends.kernels.cpu_flash import CpuFlash
from tokenring.cli.main import main
from tokenring.errors import ConfigurationError
from tokenring.lowering.target import Target
from tokenring.planner.choosing import kept_plans
from tokenring.planner.choosing.auto import CallToPlan, plan_call
from tokenring.planner.choosing.kept_plans import digest, path_of, plan_kept
from tokenring.planner.choosing.plan import Plan
from tokenring.planner.interconnects.interconnect import Interconnect, full_mesh, ring, switch
from tokenring.schedule.families.registry import FAMILIES
from tokenring.schedule.scheme import Scheme
from tokenring.sequence.layout import make_layout
from tokenring.sequence.region import Patch
from tokenring.tables.kept_files import folder_of_plans, write_whole
from tokenring.tables.rates import Messages

Kept = tuple[CallToPlan, dict[str, str], Path]


@pytest.fixture(scope="module")
def asked() -> CallToPlan:
    return call(setting(full_mesh(4, 1.0), workload(4, (4, 2), 64), BOTH, tflops=1e-2), tr.Causal())


@pytest.fixture(scope="module")
def anew(asked: CallToPlan) -> Plan:
    """The plan of that call, made once."""
    return plan_call(asked)


@pytest.fixture(scope="module")
def folder(asked: CallToPlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of plans with that of the call, which nobody changes."""
    folder = tmp_path_factory.mktemp("kept") / "plans"
    plan_kept(asked, {"TOKENRING_PLAN_CACHE": str(folder)})
    return folder


@pytest.fixture
def kept(asked: CallToPlan, folder: Path, tmp_path: Path) -> Kept:
    """A call, an environment with a folder of its own, and the file that is there now."""
    shutil.copytree(folder, tmp_path / "plans")
    (path,) = (tmp_path / "plans").iterdir()
    return asked, {"TOKENRING_PLAN_CACHE": str(tmp_path / "plans")}, path


def planned(kept: Kept, anew: Plan, monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, bool]:
    """The plan, and whether the planner was asked, which then gives `anew`."""
    made: list[CallToPlan] = []

    def noted(call: CallToPlan) -> Plan:
        made.append(call)
        return anew

    monkeypatch.setattr(kept_plans, "plan_call", noted)
    found = plan_kept(*kept[:2])
    assert made in ([], [kept[0]])
    return found, bool(made)


def test_the_same_call_is_not_planned_again(kept: Kept, anew: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = planned(kept, anew, monkeypatch)
    assert not asked
    assert (found, str(found)) == (anew, str(anew))


def test_the_direction_of_rings_is_kept(asked: CallToPlan, tmp_path: Path) -> None:
    """Nobody has to find out again which moves less; a family that has none says none."""
    environment = {"TOKENRING_PLAN_CACHE": str(tmp_path)}
    turning, still = replace(asked, families=("ring",)), replace(asked, families=("direct-q",))
    for each, direction in ((turning, -1), (still, None)):
        found, again = (plan_kept(each, environment) for _ in range(2))
        assert found.direction == again.direction == direction and found == again == plan_call(each)


def placed(*places: tuple[int, int]) -> Interconnect:
    return replace(full_mesh(4, 1.0), places=places)


OTHERS: dict[str, Callable[[CallToPlan], CallToPlan]] = {
    "length": lambda each: call(setting(full_mesh(4, 1.0), workload(4, (4, 2), 128), BOTH, tflops=1e-2), tr.Causal()),
    "heads": lambda each: call(setting(full_mesh(4, 1.0), workload(4, (4, 4), 64), BOTH, tflops=1e-2), tr.Causal()),
    "dtype": lambda each: replace(
        each, setting=replace(each.setting, workload=replace(each.setting.workload, dtype=torch.float16))
    ),
    "mask": lambda each: replace(each, mask=tr.Full()),
    "documents": lambda each: replace(each, mask=tr.Causal() & tr.Documents([0, 100, each.q_layout.length])),
    "layout": lambda each: replace(each, q_layout=make_layout("striped", 4, each.q_layout.length)),
    "passes": lambda each: replace(each, setting=replace(each.setting, passes=("forward",))),
    "wires": lambda each: replace(each, setting=replace(each.setting, interconnect=full_mesh(4, 1.5))),
    "shape": lambda each: replace(each, setting=replace(each.setting, interconnect=ring(4, 1.0))),
    "switch": lambda each: replace(each, setting=replace(each.setting, interconnect=switch(4, 1.0))),
    "places": lambda each: replace(
        each, setting=replace(each.setting, interconnect=placed((0, 0), (0, 2), (0, 1), (0, 3)))
    ),
    "messages": lambda each: replace(
        each, setting=replace(each.setting, machine=replace(each.setting.machine, messages=Messages(1e-6)))
    ),
    "cores": lambda each: replace(
        each, setting=replace(each.setting, machine=replace(each.setting.machine, shared_cores=2.0))
    ),
    "target": lambda each: replace(each, setting=replace(each.setting, target=Target(collectives=True))),
    "kernel": lambda each: replace(each, setting=replace(each.setting, supports=CpuFlash.supports_patch)),
    "families": lambda each: replace(each, families=("ring",)),
    "limit": lambda each: replace(each, memory_limit_bytes=1 << 30),
    "everything": lambda each: replace(each, everything=True),
    "modes": lambda each: replace(each, modes={"few": Target(channels=1), "fewer": Target(channels=3)}),
    "modes in another order": lambda each: replace(
        each, modes={"fewer": Target(channels=3), "few": Target(channels=1)}
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_whatever_differs_has_another_file(asked: CallToPlan, what: str) -> None:
    other = OTHERS[what](asked)
    assert digest(other) != digest(asked)
    assert digest(other) == digest(OTHERS[what](asked))


def test_values_that_are_written_alike_differ() -> None:
    """Tuples of tuples, which are written without the names of their types, are like nothing else."""
    class Pair(NamedTuple):
        first: object
        second: object

    values: list[Any] = [
        ((1, 2),), ((True, 2),), (("tuple", 1, 2),), (Pair(1, 2),), ([1, 2],), ("tuple", (1, 2)), (("tuple",), (1, 2)),
        ((1, 2), Pair(1, 2)), (((1, 2),),), ((1,), (2,)), ((),), (),
    ]  # fmt: skip
    written = [json.dumps(kept_plans._plain(each, {})) for each in values]
    assert len(set(written)) == len(values)
    assert written == [json.dumps(kept_plans._plain(copy.deepcopy(each), {})) for each in values]


def test_code_and_versions_count(asked: CallToPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(asked)
    with monkeypatch.context() as patched:
        patched.setattr(kept_plans, "__version__", "another")
        assert digest(asked) != before
    files = kept_plans._sources()
    assert any("backends/kernels/cpu_flash.py" in str(each[0]) for each in files)
    assert any("planner/choosing/select.py" in str(each[0]) for each in files)
    with monkeypatch.context() as patched:
        patched.setattr(kept_plans, "_sources", lambda: files[1:])
        assert digest(asked) != before
    assert digest(asked) == before


def test_a_digest_is_the_same_in_another_process(asked: CallToPlan, warm: str) -> None:
    """Hashes of texts differ between processes; a digest does not."""
    script = (
        "import sys; sys.path[:0] = ['tests', 'tests/support']\n"
        "import tokenring as tr\nfrom nets import BOTH, call, setting, workload\n"
        "from tokenring.planner.interconnects.interconnect import full_mesh\n"
        "from tokenring.planner.choosing.kept_plans import digest\n"
        "print(hash('digest'))\n"
        "print(digest(call(setting(full_mesh(4, 1.0), workload(4, (4, 2), 64), BOTH, tflops=1e-2), tr.Causal())))"
    )
    repo = Path(__file__).resolve().parents[2]
    ran = subprocess.run([warm, "-c", script], cwd=repo, capture_output=True, text=True, timeout=patient(60))
    hashed, found = ran.stdout.split()
    assert int(hashed) != hash("digest") or "PYTHONHASHSEED" in os.environ
    assert found == digest(asked), ran.stderr


def edited(path: Path, **changes: object) -> None:
    document = json.loads(path.read_text())
    document["plan"] |= changes
    path.write_text(json.dumps(document))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_text(""),
    "half": lambda path: path.write_text(path.read_text()[: path.stat().st_size // 2]),
    "no UTF-8": lambda path: path.write_bytes(b"\xff\xfe"),
    "a list": lambda path: path.write_text("[]"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "another format": lambda path: path.write_text(path.read_text().replace("kept-plan", "other")),
    "another version": lambda path: path.write_text(path.read_text().replace('"version": 1', '"version": 2')),
    "another file": lambda path: path.write_text(path.read_text().replace(path.name, "plan-0.json")),
    "no schedule of ours": lambda path: edited(path, name="rung"),
    "name is a number": lambda path: edited(path, name=7),
    "order of another world": lambda path: edited(path, order=[1, 0]),
    "a direction that it has not": lambda path: edited(path, direction=7),
    "a direction in words": lambda path: edited(path, direction="up"),
    "half a direction": lambda path: edited(path, direction=-1.5),
    "an endless direction": lambda path: edited(path, direction=float("inf")),
    "an endless order": lambda path: edited(path, order=[float("inf")]),
    "no reason": lambda path: edited(path, reason=None),
    "no candidates": lambda path: edited(path, candidates=[{"name": "ring"}]),
    "too large": lambda path: path.write_text(path.read_text() + " " * kept_plans.MOST_BYTES),
    "others may write": lambda path: path.chmod(0o666),
    "a link": lambda path: path.symlink_to(path.rename(path.with_name("elsewhere"))),
    "a folder": lambda path: path.rename(path.with_name("elsewhere")).with_name(path.name).mkdir(),
    "a pipe": lambda path: subprocess.run(f"rm {path} && mkfifo {path}", shell=True, check=True),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_not_used(kept: Kept, damage: str, anew: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is planned again, and but for a folder in its place the file is whole again."""
    DAMAGES[damage](kept[2])
    assert planned(kept, anew, monkeypatch) == (anew, True)
    assert planned(kept, anew, monkeypatch) == (anew, damage == "a folder")


def test_a_file_of_another_user_is_not_used(kept: Kept, anew: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = kept[2].stat().st_uid
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: owner + 1)
        assert planned(kept, anew, monkeypatch)[1]


def test_a_folder_that_cannot_be_written_is_no_error(asked: CallToPlan, anew: Plan, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert plan_kept(asked, {"TOKENRING_PLAN_CACHE": str(tmp_path / "file" / "plans")}) == anew


def test_a_writer_that_is_killed_leaves_nothing_in_the_way(
    kept: Kept, anew: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had begun has another name, which nobody reads."""
    kept[2].unlink()
    (kept[2].parent / ".writing-x").write_text("half")
    assert [planned(kept, anew, monkeypatch)[1] for _ in range(2)] == [True, False]


def test_the_oldest_go(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_plans, "MOST_FILES", 3)
    folder = kept[2].parent
    for number in range(5):
        write_whole(folder / f"plan-{number}.json", "{}")
        os.utime(folder / f"plan-{number}.json", (number, number))
    plan_kept(OTHERS["families"](kept[0]), kept[1])
    names = {each.name for each in folder.iterdir()}
    assert len(names) == 3 and kept[2].name in names and "plan-4.json" in names


def test_what_was_begun_long_ago_goes(kept: Kept) -> None:
    """A job that was killed left it; what somebody may still write stays."""
    old, new = (kept[2].parent / f".writing-{age}" for age in ("old", "new"))
    for each in (old, new):
        each.touch()
    os.utime(old, (1, 1))
    plan_kept(OTHERS["families"](kept[0]), kept[1])
    assert not old.exists() and new.exists()


def test_a_family_of_the_user_is_not_kept(asked: CallToPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code may change without anybody noticing."""

    def mine(world_size: int) -> Scheme:
        return FAMILIES["ring"].scheme(world_size)

    environment = {"TOKENRING_PLAN_CACHE": str(tmp_path)}
    assert path_of(asked, environment) is not None
    for part in ({"scheme": mine}, {"cut": mine}, {"small": mine}, {"choices": mine}):
        with monkeypatch.context() as patched:
            patched.setitem(FAMILIES, "mine", replace(FAMILIES["ring"], name="mine", **part))  # type: ignore[arg-type]
            assert path_of(asked, environment) is None, part


def test_a_kernel_of_the_user_is_not_kept(asked: CallToPlan, tmp_path: Path) -> None:
    def takes(patch: Patch) -> str | None:
        return None

    its = replace(asked, setting=replace(asked.setting, supports=takes))
    assert path_of(its, {"TOKENRING_PLAN_CACHE": str(tmp_path)}) is None


def test_files_of_editors_do_not_count(
    asked: CallToPlan, anew: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their locks are links to nothing; what cannot be read keeps no plan, and stops none."""
    environment = {"TOKENRING_PLAN_CACHE": str(tmp_path / "plans")}
    for room in kept_plans.PLANS:
        (tmp_path / room).mkdir(parents=True)
    (tmp_path / "planner" / "a.py").touch()
    (tmp_path / "planner" / ".#a.py").symlink_to(tmp_path / "nothing")
    monkeypatch.setattr(kept_plans, "PACKAGE", tmp_path)
    kept_plans._sources.cache_clear()
    try:
        assert [each[0] for each in kept_plans._sources()] == ["planner/a.py"]
        assert path_of(asked, environment) is not None
        kept_plans._sources.cache_clear()
        (tmp_path / "planner" / "b.py").symlink_to(tmp_path / "nothing")
        assert path_of(asked, environment) is None
        assert plan_kept(asked, environment) == anew
    finally:
        kept_plans._sources.cache_clear()


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"TOKENRING_PLAN_CACHE": "/a/b"}, "/a/b"),
        ({"TOKENRING_PLAN_CACHE": "off", "HOME": "/h"}, None),
        ({"HOME": "/h"}, "/h/.cache/tokenring/plans"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/tokenring/plans"),
        ({}, None),
    ],
)
def test_where_plans_are_kept(environment: dict[str, str], folder: str | None) -> None:
    assert folder_of_plans(environment) == (None if folder is None else Path(folder))


@pytest.mark.parametrize("asked", ["relative", "OFF", "~/plans", "0"])
def test_a_folder_that_is_none_is_refused(asked: str) -> None:
    with pytest.raises(ConfigurationError, match="give an absolute path, or 'off'"):
        folder_of_plans({"TOKENRING_PLAN_CACHE": asked, "HOME": "/h"})


def test_the_command_keeps_plans_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENRING_PLAN_CACHE", str(tmp_path / "plans"))
    command = ["plan", "--topology", "preset:a10-pix-4", "--seq", "4k", "--heads", "8", "--pass", "forward"]

    def said(*options: str) -> str:
        out = StringIO()
        assert main([*command, *options], out, StringIO()) == 0
        return out.getvalue()

    anew = said("--no-cache")
    assert not (tmp_path / "plans").exists()
    assert said() == anew
    (path,) = (tmp_path / "plans").iterdir()
    edited(path, reason="ring: as the file says")
    assert "as the file says" in said("--json") and "as the file says" not in said("--json", "--no-cache")
