"""ci/npu-smoke: its table of unknowns, its verdicts, and that it comes to its end whatever a task does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from patience import patient
from sampling import FULL_GRID

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "hardware" / "npu"))

from npu_smoke import command, team  # noqa: E402
from npu_smoke.links import DELAY_SECONDS, in_one_order  # noqa: E402
from npu_smoke.unknowns import AS_ASSUMED, MEASURED, OPEN, OTHERWISE, UNKNOWNS, page, verdict  # noqa: E402

BY_KEY = {each.key: each for each in UNKNOWNS}


# ---------- the table


def test_the_page_has_the_table() -> None:
    assert page() in (REPO / "docs" / "ascend.md").read_text(encoding="utf-8")


def test_every_unknown_has_a_task() -> None:
    tasks = {*command.LINKS, *command.OPERATORS, *command.KERNEL, *command.LAYERS, *command.JOBS, "schedules"}
    assert {each.task for each in UNKNOWNS} == tasks
    assert len(BY_KEY) == len(UNKNOWNS)


# ---------- verdicts


def times(one: float, both: float) -> dict[str, Any]:
    way = {"seconds": 1.0, "gbs": 20.0}
    return {
        "bytes": 1, "device": "Ascend910B3", "one way": way,
        "both, one group": {"seconds": one, "gbs": 1.0}, "both, two groups": {"seconds": both, "gbs": 1.0},
    }  # fmt: skip


def merging(taken: str, share: float) -> dict[str, Any]:
    return {"taken": taken, "why": "slow", "seconds": {"float32": {"torch": 1.0, "npu-update": share}}}


def exact(well: bool, **others: list[str]) -> dict[str, Any]:
    ring = {"error": 1e-6 if well else 1.0, "exact": well}
    return {"schedules": {"ring": ring}, "failed": [], "untried": [], **others}


ROW = {"out": "mean of v", "largest": "lowest fp32", "total": "number of keys"}
JUDGED: list[tuple[str, dict[str, Any], str]] = [
    ("pair-one-group", times(2.0, 1.0), AS_ASSUMED),
    ("pair-one-group", times(1.0, 1.0), OTHERWISE),
    ("pair-one-group", times(1.45, 1.0), OPEN),
    ("pair-two-groups", times(2.0, 1.1), AS_ASSUMED),
    ("pair-two-groups", times(2.0, 2.0), OTHERWISE),
    ("pair-width", times(2.0, 1.0), MEASURED),
    ("die-width", times(2.0, 1.0), OPEN),
    ("die-width", {**times(2.0, 1.0), "device": "Ascend910_9392"}, OTHERWISE),
    ("all-peers", {"peers": 7, "to one": {"gbs": 26.0}, "to all": {"gbs": 170.0}}, AS_ASSUMED),
    ("all-peers", {"peers": 7, "to one": {"gbs": 26.0}, "to all": {"gbs": 30.0}}, OTHERWISE),
    ("overlap", {"stretch": {"messages": 1.05, "batch": 1.2}}, AS_ASSUMED),
    ("overlap", {"stretch": {"messages": 1.05, "batch": 1.9}}, OTHERWISE),
    ("wait-blocks", {"seconds in wait": 0.001, "delay": 0.5}, AS_ASSUMED),
    ("wait-blocks", {"seconds in wait": 0.5, "delay": 0.5}, OTHERWISE),
    ("staging", {"wrong": 0, "rounds": 8}, AS_ASSUMED),
    ("staging", {"wrong": 1, "rounds": 8}, OTHERWISE),
    ("pair-memory", {"bytes": 41 << 20, "assumed bytes": 40 << 20}, AS_ASSUMED),
    ("pair-memory", {"bytes": 400 << 20, "assumed bytes": 40 << 20}, OTHERWISE),
    ("pair-memory", {"bytes": 0, "assumed bytes": 40 << 20}, OPEN),
    ("masked-rows-mode-1", {"mode 1": ROW}, AS_ASSUMED),
    ("masked-rows-mode-1", {"mode 1": {**ROW, "out": "zero"}}, OTHERWISE),
    ("no-mask", {"no mask is full": False}, OTHERWISE),
    ("packed-order", {"order": {"": "by token"}}, OTHERWISE),
    ("packed-order-tnd", {"order": {"": "by token"}}, OPEN),
    ("determinism", {"runs": 5, "different by default": 4, "different if asked": 0}, AS_ASSUMED),
    ("determinism", {"runs": 5, "different by default": 4, "different if asked": 1}, OTHERWISE),
    ("ring-update", {"ring": {"absent": True}}, OPEN),
    ("attention-update", {"update": {"error": 1e-2}}, OTHERWISE),
    ("merging", merging("npu-update", 0.8), AS_ASSUMED),
    ("merging", merging("npu-update", 1.1), OTHERWISE),
    ("merging", merging("torch", 0.8), OTHERWISE),
    ("kernel-tile", {"worst": {"float32": 1e-6}, "wrong": []}, AS_ASSUMED),
    ("kernel-tile", {"worst": {"float32": 1e-1}, "wrong": ["dq of full, float32: 1e-1"]}, OTHERWISE),
    ("kernel-packed", {"worst": {"float32": 1e-6}, "wrong": []}, AS_ASSUMED),
    ("kernel-packed", {"worst": {"float32": 1.0}, "wrong": ["lse of float32: 1"]}, OTHERWISE),
    ("exactness", exact(True), AS_ASSUMED),
    ("exactness", exact(False), OTHERWISE),
    ("exactness", exact(True, failed=["usp/2"]), OTHERWISE),
    ("exactness", exact(True, untried=["usp/2"]), OPEN),
    ("exactness", exact(False, untried=["usp/2"]), OTHERWISE),
]


@pytest.mark.parametrize(("key", "result", "word"), JUDGED)
def test_verdicts(key: str, result: dict[str, Any], word: str) -> None:
    unknown = BY_KEY[key]
    assert verdict(unknown, {unknown.task: {"status": "done", "result": result}}).word == word


@pytest.mark.parametrize("unknown", UNKNOWNS, ids=lambda each: str(each.key))
def test_what_failed_or_is_of_another_form_settles_nothing(unknown: Any) -> None:
    late = {unknown.task: {"status": "late", "error": "no answer in 60 s"}}
    assert verdict(unknown, late) == (OPEN, f"task {unknown.task}: late: no answer in 60 s")
    assert verdict(unknown, {}) == (OPEN, f"task {unknown.task}: it did not run")
    for other in ({}, {"one way": None}, {"left out": "one rank"}):
        assert verdict(unknown, {unknown.task: {"status": "done", "result": other}}).word == OPEN


@pytest.mark.parametrize("told", [{}, {"schedule:usp/2": {"status": "left out", "error": "the time was used up"}}])
def test_schedules_that_were_not_tried_leave_it_open(told: dict[str, Any]) -> None:
    """For lack of time, or since the run was stopped before; asked for fewer, these are all."""
    ring = {"schedule:ring": {"status": "done", "result": exact(True)["schedules"]["ring"]}}
    fewer, all_asked = ["rows", "schedule:ring"], ["rows", "schedule:ring", "schedule:usp/2"]
    for asked, tasks, word, says in (
        (all_asked, ring | told, OPEN, "; 1 of 2 tried"),
        (fewer, ring, AS_ASSUMED, "in fp32"),
    ):
        document: dict[str, Any] = {"kind": "npu", "emulated": False, "asked": asked, "tasks": tasks}
        command._judge(document)
        (found,) = [each for each in document["verdicts"] if each["key"] == "exactness"]
        assert found["verdict"] == word and found["text"].endswith(says)


def test_times_without_an_npu_settle_nothing() -> None:
    told = {"pair": {"status": "done", "result": times(2.0, 1.0)}}
    assert verdict(BY_KEY["pair-one-group"], told, real=False).word == OPEN


# ---------- the script


class Ran(NamedTuple):
    code: int
    out: str
    document: dict[str, Any]


def smoke(folder: Path, *options: str, seconds: float = 110, python: str = sys.executable) -> Ran:
    path = folder / "found.json"
    arguments = [python, str(REPO / "ci" / "npu-smoke"), "--no-doctor", "-o", str(path), *options]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=folder, timeout=patient(seconds))
    assert path.exists(), done.stderr
    return Ran(done.returncode, done.stdout, json.loads(path.read_text(encoding="utf-8")))


def status(ran: Ran) -> dict[str, str]:
    return {name: told["status"] for name, told in ran.document["tasks"].items()}


@pytest.mark.slow
def test_dry_run(tmp_path: Path, warm: str) -> None:
    ran = smoke(tmp_path, "--device", "cpu", "--ranks", "2", "--schedules", "ring,ulysses", python=warm)
    assert (ran.code, set(status(ran).values())) == (0, {"done"})
    assert [each["key"] for each in ran.document["verdicts"]] == list(BY_KEY)
    assert {"schedule:ring", "schedule:ulysses"} <= status(ran).keys()
    words = {each["key"]: each["verdict"] for each in ran.document["verdicts"]}
    assert (words["exactness"], words["wait-blocks"], words["no-mask"]) == (AS_ASSUMED, OPEN, OPEN)
    assert all(f"{each.key:<20} " in ran.out for each in UNKNOWNS)
    assert "A TRIAL, no NPU was there" in ran.out


def check_whole(ran: Ran) -> None:
    """Every task was done, each unknown has a printed line of its own, and no verdict is otherwise than assumed."""
    assert (ran.code, set(status(ran).values())) == (0, {"done"})
    verdicts = {each["key"]: each for each in ran.document["verdicts"]}
    assert list(verdicts) == list(BY_KEY)
    printed = ran.out.splitlines()
    for key, each in verdicts.items():
        assert printed.count(f"{each['verdict']:<12} {key:<20} {each['text']}") == 1, key
        assert each["text"]
    words = {key: each["verdict"] for key, each in verdicts.items()}
    by_device = {each.key for each in UNKNOWNS if each.by_time}
    assert {words[key] for key in by_device} == {OPEN}
    assert {words[key] for key in words.keys() - by_device} == {AS_ASSUMED, MEASURED}
    assert ran.document["device"] == "Ascend910B3"


@pytest.mark.slow
def test_on_emulated_npus(tmp_path: Path, warm: str) -> None:
    """All of it, but for the schedules: two of these."""
    ran = smoke(tmp_path, "--emulate", "--ranks", "2", "--schedules", "tokenring,direct-kv", python=warm)
    check_whole(ran)
    silent = ran._replace(out=ran.out.replace("exactness", "exactitude"))  # a line that is not printed is missed
    with pytest.raises(AssertionError, match="exactness"):
        check_whole(silent)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not FULL_GRID, reason="takes many minutes: TOKENRING_FULL_GRID=1")
def test_every_schedule_on_emulated_npus(tmp_path: Path) -> None:
    """As it is run on NPUs, with more time."""
    ran = smoke(tmp_path, "--emulate", "--minutes", "50", seconds=3500)
    check_whole(ran)
    families = {task.removeprefix("schedule:").partition("/")[0] for task in ran.document["tasks"]}
    assert {"ring", "tokenring", "direct-q", "ulysses", "usp", "tiles", "sub-sharded", "mesh-kv", "mixed"} <= families


def test_a_task_that_fails_is_named_and_the_rest_goes_on(tmp_path: Path, warm: str) -> None:
    asked = ("--device", "cpu", "--ranks", "2", "--only", "memory,schedule:spiral,rows")
    ran = smoke(tmp_path, *asked, python=warm)
    assert (ran.code, status(ran)) == (1, {"memory": "done", "schedule:spiral": "failed", "rows": "done"})
    told = ran.document["tasks"]["schedule:spiral"]
    assert "unknown schedule 'spiral'" in told["error"] and told["error"].startswith("rank ")
    assert "ConfigurationError" in told["log"]["0"]


SLOWER = 20  # times as long as just before, and a task counts as one that hangs: load changes no faster


def as_python(monkeypatch: pytest.MonkeyPatch, path: Path, does: str) -> None:
    """Ranks are started by this shell script from now on."""
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


@pytest.mark.timeout(600)
def test_a_task_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warm: str) -> None:
    """It would take an hour; its limit is a multiple of what another task takes here and now, before and after it."""
    hangs = "from npu_smoke import links, rank; links.DELAY_SECONDS = 3600; import sys; rank.main(sys.argv[1])"
    as_python(monkeypatch, tmp_path / "python", f"exec {warm} -c '{hangs}' \"$3\"")
    asked = team.Asked("cpu", 2, None, time.monotonic() + 3600)
    told: list[tuple[str, dict[str, Any]]] = []

    def tell(task: str, found: dict[str, Any]) -> None:
        told.append((task, found))
        if len(told) == 1:
            asked.task_seconds = max(0.3, SLOWER * found["seconds"])

    team.run(asked, ["rows", "wait", "rows"], tell)
    assert [(task, found["status"]) for task, found in told] == [("rows", "done"), ("wait", "late"), ("rows", "done")]
    assert told[1][1]["error"] == f"no answer in {asked.task_seconds:g} s"


def test_limits_are_as_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And what is late makes the whole a failure."""
    given: list[team.Asked] = []

    def run(asked: team.Asked, tasks: list[str], tell: Any) -> str:
        given.append(asked)
        tell("rows", {"status": "late", "error": "no answer in 0.3 s"})
        return "cpu"

    monkeypatch.setattr(command, "run", run)
    began = time.monotonic()
    options = ["--no-doctor", "--device", "cpu", "--only", "rows", "-o", str(tmp_path / "found.json")]
    assert command.main([*options, "--task-seconds", "0.3", "--minutes", "2"]) == 1
    assert given[0].task_seconds == 0.3 and began + 120 <= given[0].until <= time.monotonic() + 120


def test_the_time_that_is_used_up(tmp_path: Path, warm: str) -> None:
    ran = smoke(tmp_path, "--device", "cpu", "--ranks", "2", "--only", "rows", "--minutes", "0", python=warm)
    assert (ran.code, status(ran)) == (1, {"rows": "left out"})


@pytest.mark.timeout(600)
def test_the_time_bounds_a_run_that_goes_well(tmp_path: Path, warm: str) -> None:
    """Tasks that all succeed, half a second each at least: no more are begun than the time has room for."""
    tasks, minutes = 60, 0.1
    asked = ("--only", ",".join(["wait"] * tasks), "--minutes", str(minutes))
    ran = smoke(tmp_path, "--device", "cpu", "--ranks", "2", *asked, seconds=590, python=warm)
    assert (ran.code, status(ran)) == (1, {"wait": "left out"})
    words = [line.split()[1] for line in ran.out.splitlines() if line.startswith("wait ")]
    done = words.count("done")
    assert done <= 60 * minutes / DELAY_SECONDS + 1 < tasks
    assert words == ["done"] * done + ["left"] * (tasks - done)
    assert ran.document["tasks"]["wait"]["error"] == "the time was used up"


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_messages_of_an_exchange_have_one_order(ranks: int) -> None:
    """Each once; worked off one after another at both ends, as in a single stream a rank, none waits for ever."""
    order = in_one_order(ranks)
    assert sorted(order) == [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    assert stuck([[each for each in order if rank in each] for rank in range(ranks)]) == []
    sends_first = [
        [*((rank, to) for to in range(ranks) if to != rank), *((by, rank) for by in range(ranks) if by != rank)]
        for rank in range(ranks)
    ]
    assert stuck(sends_first)


def stuck(queues: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """What is left when no message stands first at both its ends."""
    while met := {queue[0] for queue in queues if queue and all(queues[end][:1] == [queue[0]] for end in queue[0])}:
        queues = [queue[1:] if queue and queue[0] in met else queue for queue in queues]
    return [each for queue in queues for each in queue]


def test_ranks_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_python(monkeypatch, tmp_path / "python", "echo no such thing >&2\nexit 3")
    told: dict[str, Any] = {}
    asked = team.Asked("cpu", 2, None, time.monotonic() + 60)
    team.run(asked, ["pair", "rows"], lambda task, found: told.update({task: found}))
    assert {each["status"] for each in told.values()} == {"failed"}
    assert re.search("the ranks cannot be started: rank [01] ended with 3", told["pair"]["error"])  # both do
    assert told["pair"]["log"]["0"] == "no such thing"


def test_no_npu_is_said(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(REPO / "ci" / "npu-smoke"), "-o", str(tmp_path / "a.json")],
        capture_output=True, text=True, timeout=patient(110), cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert "no NPU was found here: `tokenring doctor` says why" in done.stderr
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["doctor"]["torch"] and len(document["verdicts"]) == len(UNKNOWNS)
