"""What a verdict is, and how one is made of what a task came back with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Found = Mapping[str, Any]  # what a task came back with

AS_ASSUMED, OTHERWISE, MEASURED, OPEN = "as assumed", "otherwise", "measured", "not settled"
CLOSE = 0.3  # relative


class Verdict(NamedTuple):
    word: str
    text: str


@dataclass(frozen=True)
class Unknown:
    """A question; `assumed`: what the code builds on until then; `task`: who finds out; judge: of what it
    found; by_time: by how long things took, or by what else only a real device has, such as memory."""

    key: str
    question: str
    assumed: str
    task: str
    judge: Callable[[Found], Verdict]
    by_time: bool = False


def verdict(unknown: Unknown, tasks: Mapping[str, Mapping[str, Any]], real: bool = True) -> Verdict:
    """Never fails: a task that failed, or an answer of another form, settles nothing; nor do times where no NPU is."""
    told = tasks.get(unknown.task)
    if told is None or told.get("status") != "done":
        why = "it did not run" if told is None else f"{told['status']}: {told.get('error', '')}"
        return Verdict(OPEN, f"task {unknown.task}: {why}")
    result = told.get("result") or {}
    if "left out" in result:
        return Verdict(OPEN, str(result["left out"]))
    try:
        judged = unknown.judge(result)
        return judged if real or not unknown.by_time else Verdict(OPEN, f"no NPU, so no matter that {judged.text}")
    except Exception as error:
        return Verdict(OPEN, f"task {unknown.task} came back with something else: {type(error).__name__}: {error}")


def yes(condition: bool, text: str) -> Verdict:
    """What was assumed is so, or not."""
    return Verdict(AS_ASSUMED if condition else OTHERWISE, text)
