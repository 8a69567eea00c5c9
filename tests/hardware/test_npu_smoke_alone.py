"""ci/npu-smoke: a step of MindSpeed, and that no task stops the others, whatever settings or ends it needs."""

from __future__ import annotations

import importlib.util
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ascend.ranks import NpuPools
from ranks import Here, RankError
from smoke_on_npus import found_by, run, words
from warm import warm_python

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "hardware" / "npu"))

from npu_smoke import here as smoke
from npu_smoke import rank, tasks, team, training
from npu_smoke.unknowns import AS_ASSUMED, MEASURED, OPEN, OTHERWISE

pytestmark = pytest.mark.timeout(600)  # ranks of their own, on a machine that is busy


# ---------- MindSpeed

# Lines as Megatron's training_log prints them (megatron/training/training.py: "lm loss: {:.6E} |"), on the last rank.
PRETRAIN = """
import os, sys
ranks = int(os.environ["WORLD_SIZE"])
flags = sys.argv[1:]
assert flags[flags.index("--context-parallel-size") + 1] == str(ranks), flags
assert ("tokenring" in flags) is (ranks > 1) and os.environ["MASTER_PORT"]
assert os.path.isfile(os.path.join(os.environ["PYTHONPATH"].split(os.pathsep)[0], "pretrain_gpt.py"))
BROKEN
if int(os.environ["RANK"]) == ranks - 1:
    for step, loss in ((1, 6.25), (2, 5.5 + SPOILT * (ranks > 1))):
        print(f" iteration {step:8d}/{2:8d} | consumed samples: {step:12d} | elapsed time per iteration (ms): 99.0 | "
              f"learning rate: 1.000000E-03 | global batch size: 1 | lm loss: {loss:.6E} | loss scale: 1.0 |")
"""


def with_mindspeed(folder: str, spoilt: float, broken: str, patched: pytest.MonkeyPatch) -> None:
    """A stand-in that takes MindSpeed's place, its job's too."""
    made = Path(folder)
    text = PRETRAIN.replace("SPOILT", str(spoilt)).replace("BROKEN", broken)
    script = made / f"job{spoilt}{len(broken)}.py"
    script.write_text(text, encoding="utf-8")
    (made / "pretrain_gpt.py").touch()
    patched.setenv("MEGATRON", folder)
    patched.setattr(training, "SCRIPT", script)
    find = importlib.util.find_spec
    patched.setattr(importlib.util, "find_spec", lambda name: find("json" if name == "mindspeed" else name))


@pytest.mark.parametrize(
    ("spoilt", "broken", "word"),
    [
        (0.0, "", AS_ASSUMED), (0.001, "", AS_ASSUMED), (0.5, "", OTHERWISE),
        (0.0, "assert ranks == 1, 'tokenring refuses'", OTHERWISE), (0.0, "sys.exit(0)", OPEN),
    ],
)  # fmt: skip
def test_a_step_of_mindspeed(npus: NpuPools, tmp_path: Path, spoilt: float, broken: str, word: str) -> None:
    result, found = run(npus, 2, "mindspeed", partial(with_mindspeed, str(tmp_path), spoilt, broken))
    assert found == {"mindspeed-loss": word}
    if not broken:
        assert result == {"alone": [6.25, 5.5], "split": [6.25, 5.5 + spoilt]}
    if "refuses" in broken:
        assert "tokenring refuses" in result["failed"]


def test_mindspeed_that_does_not_run_by_itself_settles_nothing(npus: NpuPools, tmp_path: Path) -> None:
    spoil = partial(with_mindspeed, str(tmp_path), 0.0, "raise ImportError('libhccl.so')")
    says = r"without context parallelism pretrain_gpt.*libhccl"
    with npus.expendable(2) as some, pytest.raises(RankError, match=says):
        some(found_by, "mindspeed", spoil)


@pytest.mark.parametrize("has", [True, False])
def test_without_mindspeed_it_is_left_out(has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace() if has else None)
    monkeypatch.delenv("MEGATRON", raising=False)
    result = training.mindspeed(smoke.Here(0, 2, "npu", False, lambda text: None))
    assert ("MEGATRON names no folder" if has else "MindSpeed is not installed") in result["left out"]
    assert words("mindspeed", result) == {"mindspeed-loss": OPEN}


def test_its_flags_are_megatrons() -> None:
    """Those that the test of MindSpeed's own parsers gives it, but for sizes and what is of NPUs."""
    from test_mindspeed_real import FLAGS

    known = {flag for flag in FLAGS if flag.startswith("--")}
    more = {"--min-lr", "--seed", "--log-interval", "--eval-iters", "--bf16", "--use-flash-attn"}
    more.add("--attention-mask-type")
    assert {flag for flag in training.FLAGS if flag.startswith("--")} <= known | more


# ---------- none stops the others


@pytest.mark.parametrize("task", [*tasks.LINKS, *tasks.OPERATORS, *tasks.KERNEL, *tasks.JOBS])
def test_on_one_rank_of_a_cpu_every_task_comes_to_its_end(task: str, ranks: Any) -> None:
    """Or says why it is left out; each is found by its name."""
    (result,) = ranks(1)(on_a_cpu, task)
    assert isinstance(result, dict)
    assert set(words(task, result, real=False).values()) <= {OPEN, AS_ASSUMED, MEASURED}


def on_a_cpu(here: Here, task: str) -> Any:
    return rank._do(smoke.Here(0, 1, "cpu", False, lambda text: None), task)


def test_settings_have_processes_of_their_own() -> None:
    """In order, and no more starts than there are changes."""
    asked = team.Asked("npu", 2, None, 0.0, settings=tasks.SETTINGS)
    left, starts = ["rows", "tile", "retried", "curve64", "curve64", "wait"], []
    while left:
        starts.append(asked.together(left))
        left = left[len(starts[-1]) :]
    assert starts == [["rows", "tile"], ["retried"], ["curve64", "curve64"], ["wait"]]
    assert team.Asked("cpu", 2, None, 0.0).together(["rows", "retried", "wait"]) == ["rows", "retried", "wait"]
    assert (asked.limit_seconds("rows"), asked.limit_seconds("mindspeed")) == (120.0, 360.0)
    assert set(tasks.SETTINGS) | set(tasks.TIMES_AS_LONG) <= {*tasks.JOBS, *tasks.KERNEL}


STUCK = """
import os, sys
from npu_smoke import links, rank
def rows(here):
    return {"seen": os.environ.get("SEEN")}
def wait(here):
    return {"stuck": True, "ends": True, "process": os.getpid()}
links.rows, links.wait = rows, wait
rank.main(sys.argv[1])
"""


def test_stuck_messages_end_their_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was found is kept, and the other tasks get ranks of their own, with the settings of each."""
    script, shell = tmp_path / "rank.py", tmp_path / "python"
    script.write_text(STUCK)
    settings = {"rows": {"SEEN": "by rows"}}
    asked = team.Asked("cpu", 2, None, time.monotonic() + 3600, settings=settings)
    told: list[tuple[str, dict[str, Any]]] = []
    with warm_python() as warm:
        shell.write_text(f'#!/bin/sh\nexec {warm} {script} "$3"\n')
        shell.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(shell))
        team.run(asked, ["wait", "rows", "wait", "memory", "rows"], lambda task, found: told.append((task, found)))
    assert [(task, found["status"]) for task, found in told] == [
        ("wait", "done"), ("rows", "done"), ("wait", "done"), ("memory", "done"), ("rows", "done"),
    ]  # fmt: skip
    assert told[1][1]["result"] == told[4][1]["result"] == {"seen": "by rows"}
    assert told[0][1]["result"]["process"] != told[2][1]["result"]["process"]
